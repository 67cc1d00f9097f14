"""The suites of prompts with which papers measure, in the papers' wording, from the Hub or a file on this disk."""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.bench.suites.hub import Address, fetch_rows
from dflash_mlx.errors import UsageError, did_you_mean

Row = Mapping[str, Any]
# The wording of DFlash's own measurements.
_MATHS = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_HUMAN_EVAL = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"


@dataclass(frozen=True)
class Suite:
    """A published suite. turns: the user's messages of a row, one for most suites. columns: what a row has to have."""

    title: str
    address: Address
    columns: tuple[str, ...]
    turns: Callable[[Row], Sequence[str]]
    category: Callable[[Row], str]


SUITES = {
    "gsm8k": Suite(
        "GSM8K",
        Address("openai/gsm8k", "main", "test"),
        ("question",),
        lambda row: [_MATHS.format(row["question"])],
        lambda row: "math",
    ),
    "math-500": Suite(
        "MATH-500",
        Address("HuggingFaceH4/MATH-500", "default", "test"),
        ("problem",),
        lambda row: [_MATHS.format(row["problem"])],
        lambda row: "math",
    ),
    "humaneval": Suite(
        "HumanEval",
        Address("openai/openai_humaneval", "openai_humaneval", "test"),
        ("prompt",),
        lambda row: [_HUMAN_EVAL.format(row["prompt"])],
        lambda row: "code",
    ),
    "mbpp": Suite(
        "MBPP",
        Address("google-research-datasets/mbpp", "sanitized", "test"),
        ("prompt",),
        lambda row: [row["prompt"]],
        lambda row: "code",
    ),
    "mt-bench": Suite(
        "MT-Bench",
        Address("HuggingFaceH4/mt_bench_prompts", "default", "train"),
        ("prompt", "category"),
        lambda row: row["prompt"],
        lambda row: row["category"],
    ),
    "spec-bench": Suite(
        "Spec-Bench",
        Address(url="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"),
        ("turns", "category"),
        lambda row: row["turns"],
        lambda row: row["category"],
    ),
}


def load_suite(
    name: str, file: Path | None = None, *, report: Callable[[str], None] | None = None
) -> list[BenchPrompt]:
    """All prompts of a suite, from `file` (its rows as JSON lines, also compressed with gzip), else from the Hub.

    What was fetched is kept and used from then on. Raises UsageError for a suite or rows that are not as expected, and
    DownloadError.
    """
    suite = find_suite(name)
    if file is not None:
        rows, where = read_rows(file), str(file)
    else:
        rows, where = fetch_rows(name, suite.address, report=report), suite.address.where
    return prompts_of(suite, name, rows, where=where)


def find_suite(name: str) -> Suite:
    """The suite of that name. Raises UsageError."""
    if name not in SUITES:
        from difflib import get_close_matches

        hint = did_you_mean(get_close_matches(name.lower(), SUITES, n=1))
        raise UsageError(f"there is no suite {name!r}.{hint} Known: {', '.join(SUITES)}; --prompts FILE takes others.")
    return SUITES[name]


def prompts_of(suite: Suite, name: str, rows: Sequence[Row], *, where: str) -> list[BenchPrompt]:
    """Rows as prompts; a second turn of a conversation becomes a prompt that follows the first. Raises UsageError."""
    prompts: list[BenchPrompt] = []
    for number, row in enumerate(rows, start=1):
        missing = [column for column in suite.columns if not isinstance(row, Mapping) or not row.get(column)]
        if missing:
            raise UsageError(f"{where}, row {number}: {suite.title} has a column {missing[0]!r}, missing here.")
        turns = list(suite.turns(row))
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise UsageError(f"{where}, row {number}: expected text in {suite.columns[0]!r}; found {turns!r:.60}.")
        before: str | None = None
        for turn, text in enumerate(turns, start=1):
            own = f"{name}-{number}" + (f".{turn}" if turn > 1 else "")
            prompts.append(BenchPrompt(name=own, category=suite.category(row), text=text, follows=before))
            before = own
    if not prompts:
        raise UsageError(f"{where} has no rows; expected those of {suite.title}.")
    return prompts


def read_rows(path: Path) -> list[Any]:
    """The objects of a file with JSON lines, which may be compressed. Raises UsageError, naming the line."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{path}, line {number}: expected a JSON object; {error}") from error
    return rows
