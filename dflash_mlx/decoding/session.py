"""The state of one conversation: what the target's and the drafter's caches hold between answers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from dflash_mlx.caches.own import OwnCaches
from dflash_mlx.caches.target_caches import BatchCaches
from dflash_mlx.drafters.contract import Drafter
from dflash_mlx.targets.target import Target


class Away(Protocol):
    """Where a session's caches are while an answer is made: see `decoding.batch`."""

    def bring_home(self, session: "Session") -> None:
        """Give the caches back as they are after the last committed token, and forget the answer."""

    def layers_of(self, session: "Session") -> tuple[int, OwnCaches | BatchCaches, list[Any]]:
        """The session's row, the target's caches that hold it, and the layers of the drafter's."""


@dataclass
class Session:
    """Caches of a target and, when it drafts, its drafter.

    Between answers both hold exactly `tokens`, in mlx-lm's own caches. While an answer is made the caches are `away`,
    in a batch; `tokens` then are those that were committed, and `settle` brings the caches home. ends_with_answer:
    nobody will use it again, so that nothing need be brought home.
    """

    target: Target
    drafter: Drafter | None
    ends_with_answer: bool = False
    tokens: list[int] = field(default_factory=list)
    away: Away | None = None
    target_cache: OwnCaches = field(init=False)
    draft_cache: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.tokens, self.away = [], None
        self.target_cache = self.target.make_cache()
        self.draft_cache = self.drafter.make_cache() if self.drafter else []

    def feed(self, tokens: list[int]) -> None:
        """Read the next tokens of a prompt, into both caches; vocabulary logits are never computed."""
        assert self.away is None
        fed, taps = mx.array([tokens]), self.drafter.taps if self.drafter is not None else ()
        with self.whole_or_reset():
            features = self.target.read(fed, self.target_cache, taps)
            if self.drafter is not None:
                self.drafter.read(self.target, fed, features, self.draft_cache)
            mx.eval([layer_cache.state for layer_cache in [*self.target_cache, *self.draft_cache]])
        self.tokens += tokens

    def fill_empty(self) -> None:
        """Give caches that hold nothing their buffers, which only the model knows the shapes of."""
        if not self.tokens:
            self.target_cache = self.target.blank_cache()

    @contextmanager
    def whole_or_reset(self) -> Iterator[None]:
        """Forget everything if a change to the caches fails in some layer, after others have made it."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def settle(self) -> None:
        """End an answer that is being made: its caches come home."""
        if self.away is not None:
            self.away.bring_home(self)
        assert self.away is None

    def rewind(self, length: int) -> None:
        """Keep only the first `length` tokens; forget everything if the caches cannot go back."""
        self.settle()
        count = len(self.tokens) - length
        if count <= 0:
            return
        if not self.target_cache.trim(count):
            self.reset()
            return
        del self.tokens[length:]
        for layer_cache in self.draft_cache:
            layer_cache.trim(max(0, layer_cache.offset - length))


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
