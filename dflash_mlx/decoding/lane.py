"""A lane: one answer in progress, as the host knows it. A batch holds any number of them, a single answer is one."""

from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx

from dflash_mlx.decoding.accept import Greedy, Strategy
from dflash_mlx.decoding.constraint import Guide
from dflash_mlx.decoding.logprobs import TokenLogprob
from dflash_mlx.decoding.policies import WidthPolicy
from dflash_mlx.decoding.session import Session
from dflash_mlx.sampling import LogitsProcessor

FinishReason = Literal["stop", "length"]
# Penalties look back at most this far (mlx-lm's default is 20 tokens).
_HISTORY = 64


@dataclass
class Step:
    """What a round added to an answer: `tokens` (at least one); `num_accepted` of its `width` drafts stayed.

    `depth` is the most that could have stayed: all of a chain, a tree's longest path. seconds: what the round took, all
    its answers together; None where that is not known.
    """

    tokens: list[int]
    width: int
    depth: int
    num_accepted: int
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    seconds: float | None = None


@dataclass(eq=False, kw_only=True)
class Lane:
    """An answer to `prompt`, of which the session holds all but the last token.

    `guide` says which tokens may come; `top_logprobs`, how many alternatives to report with the log-probability of each
    token (None: report nothing). Once it runs, `anchor` is the newest token and `remaining` counts those still wanted.
    """

    session: Session
    prompt: list[int]
    strategy: Strategy
    policy: WidthPolicy
    max_tokens: int
    eos_ids: set[int]
    processors: list[LogitsProcessor] = field(default_factory=list)
    guide: Guide | None = None
    top_logprobs: int | None = None
    anchor: int = field(init=False)
    remaining: int = field(init=False)
    # Whether the policy was told of any round, from which it may have learnt.
    taught: bool = field(init=False, default=False)
    # The tokens before the next one, as far as penalties look back: for the processors only.
    history: mx.array | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        assert self.session.tokens == self.prompt[:-1], "a lane starts when its prompt has been read"
        self.anchor, self.remaining = self.prompt[-1], self.max_tokens
        if self.processors:
            self.history = mx.array(self.prompt[-_HISTORY:])

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the target's best token is all that is asked for, so that lanes can be judged together."""
        alone = self.processors or self.guide is not None or self.top_logprobs is not None
        return type(self.strategy) is Greedy and not alone

    def text_from(self, position: int) -> list[int]:
        """The tokens from a position on, prompt and answer, up to the anchor."""
        held = self.session.tokens
        return [*held[position:], self.anchor] if position <= len(held) else []

    def history_after(self, tokens: mx.array) -> mx.array:
        """The history once `tokens` (n,) have come."""
        assert self.history is not None
        return mx.concatenate([self.history, tokens.astype(self.history.dtype)])[-_HISTORY:]

    def take(self, tokens: list[int]) -> tuple[list[int], FinishReason | None]:
        """Commit a round's tokens, as far as they are wanted: what the caches hold grows by as many."""
        tokens, finish_reason = clip(tokens, self.remaining, self.eos_ids)
        self.session.tokens += [self.anchor, *tokens[:-1]]
        self.anchor = tokens[-1]
        self.remaining -= len(tokens)
        if self.history is not None:
            self.history = self.history_after(mx.array(tokens))
        return tokens, finish_reason


def clip(tokens: list[int], remaining: int, eos_ids: set[int]) -> tuple[list[int], FinishReason | None]:
    """Cut a round's tokens at the first end-of-sequence token and at the tokens still wanted."""
    for i, token in enumerate(tokens[:remaining]):
        if token in eos_ids:
            return tokens[: i + 1], "stop"
    if len(tokens) >= remaining:
        return tokens[:remaining], "length"
    return tokens, None
