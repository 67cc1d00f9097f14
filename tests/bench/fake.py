"""A pair whose answers and their timing are written down, and the clock that keeps that time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dflash_mlx.bench.runner import Mode
from dflash_mlx.decoding.stats import Acceptance
from dflash_mlx.generation import GenerationResponse


@dataclass
class FakePair:
    """Answers with `tokens(prompt, mode)`; the first token takes `first_s`, every later response `step_s[mode]`.

    Plain responses hold one token, drafted ones three: two drafts of the four that were verified, and one of the
    target's own.
    """

    tokens: Callable[[str, Mode], list[int]]
    first_s: float = 0.5
    step_s: dict[Mode, float] = field(default_factory=lambda: {"plain": 0.1, "drafted": 0.15})
    now: float = 100.0
    asked: list[tuple[str, Mode]] = field(default_factory=list)

    def clock(self) -> float:
        return self.now


def fake_stream(pair: FakePair, prompt: str, params: object, *, draft: bool) -> Iterator[GenerationResponse]:
    mode: Mode = "drafted" if draft else "plain"
    pair.asked.append((prompt, mode))
    tokens = pair.tokens(prompt, mode)
    acceptance = Acceptance()
    emitted = 0
    while emitted < len(tokens):
        size = 3 if draft and emitted else 1
        chunk = tokens[emitted : emitted + size]
        pair.now += pair.step_s[mode] if emitted else pair.first_s
        emitted += len(chunk)
        if draft and emitted > 1:
            acceptance.record(width=4, depth=4, num_accepted=len(chunk) - 1, tokens=len(chunk))
        yield GenerationResponse(
            text="",
            token_ids=chunk,
            prompt_tokens=7,
            mode="dflash" if draft else "plain",
            finish_reason="length" if emitted == len(tokens) else None,
            acceptance=acceptance if draft else None,
            notice="drafting paused" if draft and emitted == 4 else None,
        )
