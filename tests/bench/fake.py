"""Contestants whose answers and their timing are written down, the clock that keeps that time, and results by hand."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.bench.load import Arrival
from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.bench.record import PromptResult, Results, Round, Run
from dflash_mlx.decoding.stats import Acceptance
from dflash_mlx.generation import GenerationResponse

Tokens = Callable[[str, str], list[int]]


@dataclass
class Time:
    now: float = 100.0
    asked: list[tuple[str, str]] = field(default_factory=list)  # (prompt, contestant)

    def clock(self) -> float:
        return self.now


@dataclass
class Fake:
    """Answers with `tokens(prompt, name)`; the first token takes `first_s`, every later response `step_s`.

    Plain responses hold one token, drafted ones three: two drafts of the four that were verified, and one of the
    target's own.
    """

    name: str
    time: Time
    tokens: Tokens
    step_s: float = 0.1
    first_s: float = 0.5
    words: str = "a fake"
    rounds_s: list[float] = field(default_factory=list)  # what the first rounds say they took

    def answer(self, prompt: Any, params: object) -> Iterator[GenerationResponse]:
        draft = self.name == "drafted"
        text = prompt if isinstance(prompt, str) else " | ".join(message["content"] for message in prompt)
        self.time.asked.append((text, self.name))
        tokens = self.tokens(text, self.name)
        acceptance = Acceptance()
        emitted, rounds = 0, iter(self.rounds_s)
        while emitted < len(tokens):
            size = 3 if draft and emitted else 1
            chunk = tokens[emitted : emitted + size]
            self.time.now += self.step_s if emitted else self.first_s
            kept = len(chunk) - 1 if draft and emitted else None
            emitted += len(chunk)
            if kept is not None:
                acceptance.record(width=4, depth=4, num_accepted=kept, tokens=len(chunk))
            yield GenerationResponse(
                text="".join(chr(97 + token % 26) for token in chunk),
                token_ids=chunk,
                prompt_tokens=7,
                mode="dflash" if draft else "plain",
                finish_reason="length" if emitted == len(tokens) else None,
                acceptance=acceptance if draft else None,
                num_accepted=kept,
                width=None if kept is None else 4,
                depth=None if kept is None else 4,
                round_s=None if kept is None else next(rounds, None),
                notice="drafting paused" if draft and emitted == 4 else None,
            )

    def answer_many(self, prompts: Any, params: object, streams: int) -> Iterator[Arrival]:
        for index in range(len(prompts)):
            yield Arrival(index, 1.0 + index, 1, False)
            yield Arrival(index, 2.0 + index, 3, True)


def fakes(tokens: Tokens, *, time: Time | None = None) -> dict[str, Fake]:
    """Plain decoding of 0.1 s a token, and drafting of 0.15 s a round of three."""
    time = time or Time()
    return {"plain": Fake("plain", time, tokens), "drafted": Fake("drafted", time, tokens, step_s=0.15)}


def a_run(
    contestant: str,
    *,
    tokens: int,
    decode_s: float,
    first_s: float = 0.5,
    kept: tuple[int, ...] = (),
    width: int = 4,
    **more: Any,
) -> Run:
    """An answer of `tokens` tokens, the first of which came alone; drafted in rounds that kept so many drafts."""
    rounds = [Round(ms=100.0 + width, width=width, depth=width, kept=k, tokens=k + 1) for k in kept]
    drafted, accepted = width * len(kept), sum(kept)
    acceptance = {
        "rounds": len(kept),
        "tokens": accepted + len(kept),
        "mean_acceptance_length": (accepted + len(kept)) / len(kept) if kept else 0.0,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
    }
    fields: dict[str, Any] = {
        "token_ids": list(range(tokens)),
        "prompt_tokens": 5,
        "decode_tokens": tokens - 1,
        "peak_memory_gb": 1.0,
        "acceptance": acceptance if contestant != "plain" else None,
        "rounds": rounds,
    }
    return Run(contestant=contestant, first_s=first_s, wall_s=first_s + decode_s, **fields | more)


def some_results(prompts: dict[str, list[Run]], **more: Any) -> Results:
    """Results of plain against drafted decoding; a prompt's category is its name without the number."""
    names = list(dict.fromkeys(run.contestant for runs in prompts.values() for run in runs))
    fields: dict[str, Any] = {
        "facts": {"pair": "demo", "label": "demo", "finished": True, "machine": {"chip": "a chip"}},
        "contestants": {name: f"what {name} is" for name in names},
        "main": "drafted" if "drafted" in names else "plain",
        "comparable": {"": names[1:]},
        "prompts": [
            PromptResult(prompt=BenchPrompt(name=name, category=name.split("-")[0], text=f"say {name}"), runs=runs)
            for name, runs in prompts.items()
        ],
    }
    return Results(**fields | more)


def ratios(values: list[float], *, speed: float = 10.0, **more: Any) -> Results:
    """Prompts of which each was drafted so many times as fast as it was decoded plainly."""
    return some_results(
        {
            f"chat-{i}": [
                a_run("plain", tokens=101, decode_s=100 / speed, first_s=0.0001),
                a_run("drafted", tokens=101, decode_s=100 / speed / value, first_s=0.0001, kept=(3, 1)),
            ]
            for i, value in enumerate(values, start=1)
        },
        **more,
    )
