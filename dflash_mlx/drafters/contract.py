"""What a way of drafting gives to the decode loop and gets from it. The loop knows nothing else of drafters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx


@dataclass
class DraftVocabulary:
    """The tokens a drafter may draft, out of a vocabulary of `size`: token_ids (n,), in the order of its logits."""

    token_ids: mx.array
    size: int

    def widen(self, values: mx.array, *, elsewhere: float) -> mx.array:
        """(W, n) -> (W, size), float32, with the value `elsewhere` for the tokens that are never drafted."""
        full = mx.full((values.shape[0], self.size), elsewhere, dtype=mx.float32)
        columns = mx.broadcast_to(self.token_ids, values.shape)
        return mx.put_along_axis(full, columns, values.astype(mx.float32), axis=-1)


@dataclass
class Proposal:
    """A drafted continuation of one answer's anchor.

    tokens: (W,) drafted ids; probs: (W, V) float32 distributions they were drawn from, for sampling by rejection;
    logits: the drafter's, (W, V) or (W, n) when it has a vocabulary of its own.
    """

    tokens: mx.array
    logits: mx.array
    probs: mx.array | None = None

    @property
    def width(self) -> int:
        return int(self.tokens.shape[0])

    def shortened(self, width: int) -> "Proposal":
        """The first `width` drafts."""
        if width >= self.width:
            return self
        return Proposal(self.tokens[:width], self.logits[:width], None if self.probs is None else self.probs[:width])


@dataclass
class Draft:
    """What a drafter says of the W places after each anchor: logits (B, W, V), or (B, W, n) when it has a vocabulary
    of its own, and hidden states (B, W, D)."""

    logits: mx.array
    hidden: mx.array


class Chooser(Protocol):
    """How one answer's tokens are chosen: greedy or a way of sampling (`decoding.accept.Strategy`)."""

    def propose(self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None) -> Proposal:
        """Draft from logits (W, V), or (W, n) of a `vocabulary`; `position` is the first token's."""


class DraftState(Protocol):
    """A drafter at work on a batch: what it remembers of B answers, a row for each."""

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The tokens that may be drafted, or None for all."""

    @property
    def supports_trees(self) -> bool:
        """Whether what it says of a place is the same whatever is chosen at the places before."""

    @property
    def taps(self) -> Sequence[int]:
        """Layers of the target whose outputs it wants to see, their features concatenated."""

    def extend(self, features: mx.array, at: mx.array, *, room: int, all_kept: bool) -> None:
        """Take in the features (B, L, taps * D) of a round whose first token is at the positions `at` (B,).

        Those that are rejected are written over by the next ones. `room`: no row has more positions after this.
        all_kept: none will be rejected.
        """

    def draft(self, anchors: mx.array, at: mx.array, places: int, *, room: int) -> Draft:
        """Draft `places` tokens after each of the anchors (B,), which are at the positions `at` (B,)."""

    def propose(self, chooser: Chooser, draft: Draft, row: int, anchor: mx.array, position: mx.array) -> Proposal:
        """Choose one answer's drafts; `anchor` (1,), `position` () of the first draft."""

    def layers(self) -> list[Any]:
        """The caches of all rows, with everything that was kept so far."""

    def add(self, count: int) -> None:
        """Add rows that hold nothing."""

    def take_over(self, other: Any, places: Sequence[int]) -> None:
        """Take the rows of another, each into the place of one that holds nothing."""

    def keep(self, rows: Sequence[int]) -> None:
        """Leave only these rows, in this order."""

    def give_back(self, row: int, length: int, caches: list[Any]) -> None:
        """Put what it remembers of the first `length` positions of a row into the caches that a session keeps."""
