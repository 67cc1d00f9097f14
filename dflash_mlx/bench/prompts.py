"""What is asked in a benchmark: prompts, reading them from files, and taking a fixed sample of many."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from dflash_mlx.errors import UsageError

CATEGORIES = ("chat", "code", "math", "translation", "extraction", "long-context")
# The categories of which short checks take their prompts: together they take a minute or two on a small machine.
SHORT = ("chat", "code", "math")


@dataclass(frozen=True, kw_only=True)
class BenchPrompt:
    """A user message to measure with. `name` tells it apart in tables, such as "code-2".

    follows: the name of the prompt before it in a conversation of several turns, whose answer it refers to.
    """

    name: str
    category: str
    text: str
    follows: str | None = None


@cache
def built_in() -> tuple[BenchPrompt, ...]:
    """Four prompts of each category, one category after the other, from a sentence to some pages.

    Each carries all that is needed to answer it, and leaves more to say than a benchmark's usual 128 tokens.
    """
    folder = resources.files("dflash_mlx.bench.suites")
    prompts: list[BenchPrompt] = []
    for category in CATEGORIES:
        for line in folder.joinpath(f"{category}.jsonl").read_text(encoding="utf-8").splitlines():
            prompts.append(_prompt(line, category, prompts))
    return tuple(prompts)


def short_prompts() -> tuple[BenchPrompt, ...]:
    """The twelve built-in prompts of chat, code and math."""
    return choose_category(built_in(), ",".join(SHORT))


def read_prompts(path: Path) -> tuple[BenchPrompt, ...]:
    """Prompts from a JSONL file: an object a line with "prompt" and, if you like, "category" and "name".

    Empty lines are skipped. Raises UsageError, naming the line, for anything else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts in {path}: {error}") from error
    prompts: list[BenchPrompt] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_prompt(line, f"{path}, line {number}", prompts))
    if not prompts:
        raise UsageError(f'{path} has no prompts; expected lines such as {{"category": "chat", "prompt": "Hello"}}.')
    return tuple(prompts)


def _prompt(line: str, where: str, before: list[BenchPrompt]) -> BenchPrompt:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: expected a JSON object; {error}") from error
    if not isinstance(fields, dict):
        raise UsageError(f"{where}: expected a JSON object; found {type(fields).__name__}.")
    fields = {"category": "other", **fields}
    unknown = sorted(fields.keys() - {"category", "prompt", "name"})
    if unknown:
        raise UsageError(f'{where}: unknown key {unknown[0]!r}; expected "prompt", "category" and "name".')
    category = fields["category"]
    fields.setdefault("name", f"{category}-{1 + sum(p.category == category for p in before)}")
    for key in ("prompt", "category", "name"):
        if not isinstance(fields.get(key), str) or not fields[key].strip():
            raise UsageError(f"{where}: {key!r} should be a text that is not empty; found {fields.get(key)!r}.")
    if any(fields["name"] == p.name for p in before):
        raise UsageError(f"{where}: the name {fields['name']!r} is used twice.")
    return BenchPrompt(name=fields["name"], category=category, text=fields["prompt"])


def choose_category(prompts: tuple[BenchPrompt, ...], category: str | None) -> tuple[BenchPrompt, ...]:
    """The prompts of one category, of several with commas between them, or all.

    Raises UsageError, naming the categories there are.
    """
    if category is None:
        return prompts
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    wanted = [name.strip() for name in category.split(",")]
    for name in wanted:
        if name not in known:
            raise UsageError(f"no prompt has the category {name!r}; there are: {', '.join(known)}.")
    return tuple(prompt for prompt in prompts if prompt.category in wanted)


def take(prompts: Sequence[BenchPrompt], limit: int, *, shuffle: bool = False) -> tuple[BenchPrompt, ...]:
    """`limit` conversations, as many of each category as can be, in the order of `prompts`; all of them when it is 0.

    shuffle: not the first ones of each category but a fixed sample, the same on every machine. A conversation's later
    turns come along with its first.
    """
    firsts = [prompt for prompt in prompts if prompt.follows is None]
    if not limit or limit >= len(firsts):
        return tuple(prompts)
    by_category: dict[str, list[BenchPrompt]] = {}
    for prompt in firsts:
        by_category.setdefault(prompt.category, []).append(prompt)
    if shuffle:
        for group in by_category.values():
            random.Random(0).shuffle(group)
    ranked = sorted(
        (rank, place, prompt.name)
        for place, group in enumerate(by_category.values())
        for rank, prompt in enumerate(group)
    )
    chosen = {name for _, _, name in ranked[:limit]}
    kept: list[BenchPrompt] = []
    for prompt in prompts:
        if prompt.name in chosen or prompt.follows in {p.name for p in kept[-1:]}:
            kept.append(prompt)
    return tuple(kept)


def padder(count: Callable[[str], int]) -> Callable[[str, int], str]:
    """A function that puts text before a prompt until it has about this many tokens, as `count` counts them.

    The text comes from the built-in long prompts, from the beginning again where they are not enough. A prompt that is
    long enough by itself stays as it is.
    """
    filler = "\n\n".join(prompt.text for prompt in built_in() if prompt.category == "long-context")

    def pad(text: str, tokens: int) -> str:
        padded, characters = text, 0.0
        # The number of characters a token has differs from place to place, so the first guess is put right.
        for _ in range(3):
            missing = tokens - count(padded)
            if characters == 0 and missing <= 0:
                return text
            characters = max(1.0, characters + missing * len(filler) / count(filler))
            whole = filler * (1 + int(characters) // len(filler))
            padded = f"{whole[: int(characters)]}\n\n{text}"
        return padded

    return pad
