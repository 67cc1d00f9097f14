"""A pair that answers at once without a model: the interface of ModelPair and stream_generate, and nothing behind it.

Run as a script it is the command line itself with that pair in place of the real ones, for tests that need a process.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import dflash_mlx
from dflash_mlx.decoding.stats import Acceptance
from dflash_mlx.errors import PromptError, UsageError

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@dataclass
class FakeSession:
    tokens: list[int] = field(default_factory=list)


@dataclass
class FakePair:
    """Tokens are characters. `asked` keeps what stream_generate was called with."""

    name: str = "fake"
    drafter: object | None = field(default_factory=object)
    block_size: int = 8
    asked: list[dict[str, Any]] = field(default_factory=list)
    sessions: int = 0
    warnings: list[str] = field(default_factory=list)
    kernels: bool = True
    exact: bool = False
    measured: bool = False
    config: Any = None

    def encode_prompt(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(c) for m in messages for c in f"{m['role']}:{m['content']}\n"]

    def with_config(self, config: Any) -> "FakePair":
        self.config = config
        return self

    def round_costs(self, report: Callable[[str, float | None], None]) -> None:
        if not self.measured:
            report("measuring", None)
        self.measured = True

    def new_session(self, *, draft: bool = True) -> FakeSession:
        self.sessions += 1
        return FakeSession()


PAIR = FakePair()


def load_pair(
    name: str | None = None,
    *,
    model: str | None = None,
    draft_model: str | None = None,
    method: str = "auto",
    draft: bool = True,
    dtype: str = "auto",
    block_size: int | None = None,
    kernels: bool = True,
    exact: bool = False,
    check: bool = True,
    recheck: bool = False,
    report: Callable[[str, float | None], None] | None = None,
) -> FakePair:
    if name is None and model is None:
        raise UsageError("say what to load.")
    if name == "crash":
        raise KeyError("a mistake\nof ours")
    if report is not None:
        report("fetching 1 of 2 MB", 0.5)
        report("fetching 2 of 2 MB", 1.0)
    PAIR.drafter, PAIR.kernels, PAIR.exact = object() if draft else None, kernels, exact
    return PAIR


def stream_generate(
    pair: FakePair,
    prompt: Any,
    params: Any = None,
    *,
    session: FakeSession | None = None,
    draft: bool = True,
    width: int | None = None,
    tree: bool = False,
    constraint: Any = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Iterator[Any]:
    """Three words a round, two rounds. $FAKE_DELAY is seconds a round, $FAKE_ROUNDS their number."""
    tokens = pair.encode_chat(prompt) if isinstance(prompt, list) and isinstance(prompt[0], dict) else list(prompt)
    if len(tokens) > 5000:
        raise PromptError(f"the prompt has {len(tokens)} tokens and this model's context holds 5000; shorten it.")
    cached = _common(session.tokens, tokens) if session else 0
    copied = [dict(m) for m in prompt] if isinstance(prompt[0], dict) else list(prompt)
    asked = {"prompt": copied, "params": params, "session": session, "draft": draft, "cached": cached}
    pair.asked.append({**asked, "width": width, "tree": tree, "constraint": constraint})
    return _rounds(pair, tokens, params, session, draft, cached)


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _rounds(
    pair: FakePair, tokens: list[int], params: Any, session: FakeSession | None, draft: bool, cached: int
) -> Iterator[Any]:
    if session is not None:
        session.tokens = list(tokens)
    rounds = int(os.environ.get("FAKE_ROUNDS", "2"))
    acceptance = Acceptance()
    count = 0
    for index in range(rounds):
        time.sleep(float(os.environ.get("FAKE_DELAY", "0")))
        words = [WORDS[(3 * index + i) % 10] for i in range(3)][: params.max_tokens - count]
        count += len(words)
        last = index == rounds - 1 or count == params.max_tokens
        acceptance.record(width=4, depth=4, num_accepted=len(words) - 1, tokens=len(words))
        totals = {
            "prompt_tokens": len(tokens),
            "cached_tokens": cached,
            "generation_tokens": count,
            "mode": "dflash" if draft and pair.drafter else "plain",
            "finish_reason": ("length" if count == params.max_tokens else "stop") if last else None,
        }
        text = "".join(f"{word} " for word in words)
        json_acceptance = acceptance.to_json() if totals["mode"] == "dflash" else None
        yield SimpleNamespace(
            **totals,
            text=os.environ.get("FAKE_TEXT", text),
            token_ids=list(range(count - len(words), count)),
            prompt_tps=100.0,
            generation_tps=20.0,
            peak_memory_gb=0.5,
            acceptance=acceptance if json_acceptance else None,
            num_accepted=len(words) - 1,
            width=4,
            depth=4,
            round_s=0.05,
            notice="drafting paused: a test" if index == 1 else None,
            logprobs=[],
            to_json=lambda totals=totals, found=json_acceptance: {
                **totals,
                "generation_tps": 20.0,
                "acceptance": found,
            },
        )
        if last:
            return


def install(setattr: Callable[[object, str, object], None] = setattr) -> None:
    """Put the fake in place of the real thing."""
    PAIR.asked.clear()
    PAIR.drafter, PAIR.sessions, PAIR.measured = object(), 0, False
    setattr(dflash_mlx, "load_pair", load_pair)
    setattr(dflash_mlx, "stream_generate", stream_generate)


def process(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> "subprocess.Popen[bytes]":
    """`dflash-mlx` with the fake pair, as a process."""
    return subprocess.Popen([sys.executable, __file__, *arguments], env={**os.environ, **(env or {})}, **options)


if __name__ == "__main__":
    # Importing MLX takes a second, which these tests need not spend.
    dflash_mlx.SamplingParams = SimpleNamespace  # type: ignore[misc, assignment]
    install()
    from dflash_mlx.cli.app import main

    sys.exit(main())
