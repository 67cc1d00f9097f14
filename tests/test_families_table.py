"""The table in docs/families.md says what test_families.py runs; run this file as a script to write it anew."""

import inspect
import re
from collections import Counter
from pathlib import Path

import mlx.core as mx
import pytest
import test_families
from tiny_families import FAMILY_CONFIGS, OWN_EMBEDDINGS, WINDOW, family_target, unavailable

from dflash_mlx.caches.rollback import ReplayRollback, choose_rollback
from dflash_mlx.caches.trimming import is_trimmed, leaves

DOCUMENT = Path(__file__).parents[1] / "docs/families.md"
BEGIN, END = "<!-- table: written by tests/test_families_table.py -->", "<!-- end of table -->"


def listed_cases() -> list[tuple[str, str]]:
    """Letter and first docstring line of each test in test_families.py, in the order of the file."""
    tests = [
        function
        for name, function in vars(test_families).items()
        if name.startswith("test_") and function.__module__ == "test_families"
    ]
    return [(chr(ord("a") + i), (inspect.getdoc(test) or "").splitlines()[0]) for i, test in enumerate(tests)]


def rollback_of(target) -> str:
    """How a rejected block leaves this target's caches, found out by feeding one after a prompt."""
    cache = target.make_cache()
    rollback = choose_rollback(cache, target.layers, target.forward)
    if not isinstance(rollback, ReplayRollback):
        return "trim"
    target.forward(mx.array([list(range(2 * WINDOW))]), cache)
    block = mx.array([[1, 2, 3]])
    with rollback.feeding(cache, block, revocable=True):
        target.forward(block, cache)
    recording = rollback._forwards[0].recording
    recurrent = [leaf for leaf in leaves(cache) if not is_trimmed(leaf)]
    return "recurrence again" if recording.is_complete(recurrent, 3) else "model again"


def row(name: str) -> str:
    target = family_target(name)
    counts = Counter(type(leaf).__name__ for leaf in leaves(target.make_cache()))
    caches = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    letters = [letter for letter, _ in listed_cases()]
    if FAMILY_CONFIGS[name][0] in OWN_EMBEDDINGS:
        letters = letters[:-1]
    cases = f"{letters[0]} to {letters[-1]}"
    batch, trees = ("yes" if takes else "no" for takes in (target.takes_rows(), target.takes_trees()))
    return (
        f"| {name} | `{FAMILY_CONFIGS[name][0]}.py` | {caches} | {rollback_of(target)} | {batch} | {trees} | {cases} |"
    )


def legend() -> list[str]:
    return [f"- **{letter}**: {text}" for letter, text in listed_cases()]


def written() -> list[str]:
    text = DOCUMENT.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip().splitlines()


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_the_row_is_up_to_date(name):
    if reason := unavailable(name):
        pytest.skip(reason)
    assert row(name) in written(), "run: python tests/test_families_table.py"


def test_the_table_has_nothing_else():
    names = [match[1] for line in written() if (match := re.match(r"\| (.*?) \| `", line))]
    assert names == list(FAMILY_CONFIGS)
    assert [line for line in written() if line.startswith("- ")] == legend(), "run: python tests/test_families_table.py"


if __name__ == "__main__":
    head = [
        "| family | mlx-lm's file | caches of the tiny model | rollback | batch | trees | cases |",
        "|---|---|---|---|---|---|---|",
    ]
    table = "\n".join([*head, *(row(name) for name in FAMILY_CONFIGS), "", *legend()])
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}", encoding="utf-8")
