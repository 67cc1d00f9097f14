"""A drafter together with drafting from the text itself.

In each round the one drafts that is expected to be kept further. What the text says besides may join a tree of the
drafter's (`decoding/joined.py`).
"""

from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.contract import (
    Continuation,
    Drafted,
    Drafter,
    DraftState,
    DraftVocabulary,
    Nobody,
    Outlook,
    Proposal,
    Writer,
)
from dflash_mlx.drafters.ngram import Lookup, NgramState
from dflash_mlx.runtime import backend
from dflash_mlx.targets.target import Target

# Drafts that are kept of the drafter's, and that are taken to be kept of the text's as promised: what is assumed at
# first, and how fast newer rounds count more.
_FIRST_KEPT, _FIRST_TOLD, _FADE = 2.0, 4.0, 0.8
# So many times as many tokens the text has to promise: where it drafts, the next round waits for the host.
_MARGIN = 1.3
# The same of all answers of a round together: a GPU that is done quickly loses more by the wait.
_MARGIN_TOGETHER = {"cuda": 1.3, "metal": 1.05, "cpu": 1.05}


class WithNgram:
    """See `contract.Drafter`. Everything but the choice in a round is the drafter's own."""

    drafts_on_host = False

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.method = f"{drafter.method}+ngram"

    @property
    def places(self) -> int:
        return self.drafter.places

    @property
    def taps(self) -> Sequence[int]:
        return self.drafter.taps

    @property
    def supports_trees(self) -> bool:
        return self.drafter.supports_trees

    @property
    def allows_rejection(self) -> bool:
        return self.drafter.allows_rejection

    @property
    def networks(self) -> Sequence[nn.Module]:
        return self.drafter.networks

    def misfits(self, target: Target) -> list[str]:
        return self.drafter.misfits(target)

    def make_cache(self) -> list[Any]:
        return self.drafter.make_cache()

    def read(self, target: Target, tokens: mx.array, features: mx.array | None, caches: list[Any]) -> None:
        self.drafter.read(target, tokens, features, caches)

    def open(self, target: Target, caches: list[Any], length: int) -> "WithNgramState":
        return self._state(target, self.drafter.open(target, caches, length))

    def blank(self, target: Target, rows: int, positions: int) -> "WithNgramState":
        return self._state(target, self.drafter.blank(target, rows, positions))

    def _state(self, target: Target, inner: DraftState) -> "WithNgramState":
        return WithNgramState(inner, places=self.places, vocab_size=target.vocab_size)

    def rehearsal(self) -> Drafter:
        return self.drafter.rehearsal()


class WithNgramState:
    """See `contract.DraftState`; `inner` is the drafter's. places: the most tokens drafted for a round."""

    def __init__(self, inner: DraftState, *, places: int, vocab_size: int) -> None:
        self.inner, self.text = inner, NgramState(always=False)
        self._places, self._vocab_size = places, vocab_size
        # Drafted for each answer when several last were: a text's further drafts would not be verified. `outlook` and
        # the `propose` after it have to decide alike, since a text's drafts must wait for its newest tokens.
        self._shared_places = places
        self._kept: WeakKeyDictionary[Writer, _Kept] = WeakKeyDictionary()

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self.inner.vocabulary

    def outlook(self, writers: Sequence[Writer]) -> Outlook:
        return Outlook.HOST if any(self._by_text(writers)) else self.inner.outlook(writers)

    def told(self, writer: Writer) -> float:
        return self._kept_of(writer).told(self.text.lookup(writer), self._places)

    def continuation(self, writer: Writer, places: int) -> Continuation | None:
        return None if self._kept_of(writer).by_text else self.text.lookup(writer).continuation(places)

    def _by_text(self, writers: Sequence[Writer]) -> list[bool]:
        """For which answers the text drafts: where it promises more, if that makes up for the wait of all."""
        places = self._places if len(writers) == 1 else self._shared_places
        told, gained, own = [], 0.0, 0.0
        for writer in writers:
            kept = self._kept_of(writer)
            told.append(kept.told(self.text.lookup(writer), places))
            if told[-1]:
                gained += told[-1] - kept.mean
            if not isinstance(writer, Nobody):
                own += 1 + kept.mean
        worthwhile = gained >= (_MARGIN_TOGETHER[backend().kind] - 1) * own
        return [worthwhile and text > 0.0 for text in told]

    def _kept_of(self, writer: Writer) -> "_Kept":
        kept = self._kept.get(writer)
        if kept is None:
            kept = self._kept[writer] = _Kept()
        return kept

    def propose(
        self, writers: Sequence[Writer], anchors: mx.array, at: mx.array, places: int, *, room: int, tree: bool = False
    ) -> Drafted:
        chosen = self._by_text(writers)
        if len(writers) > 1:
            self._shared_places = places
        for writer, by_text in zip(writers, chosen, strict=True):
            self._kept_of(writer).begin(by_text=by_text)
        if not any(chosen):
            return self.inner.propose(writers, anchors, at, places, room=room, tree=tree)
        of_text = self.text.propose(writers, anchors, at, places, room=room)
        if any(not writer.is_plain_greedy for writer in writers):
            of_text.proposals = [self._certain(tokens) for tokens in of_text.tokens]
        if all(chosen):
            return of_text
        drafted = self.inner.propose(writers, anchors, at, places, room=room)
        self.inner.withdraw()
        rows = mx.array(chosen)[:, None]
        assert of_text.log_probs is not None
        return Drafted(
            mx.where(rows, of_text.tokens, drafted.tokens),
            log_probs=mx.where(rows, of_text.log_probs, drafted.confidence),
            proposals=[
                text if by_text else own
                for by_text, text, own in zip(chosen, of_text.proposals, drafted.proposals, strict=True)
            ]
            if of_text.proposals and drafted.proposals
            else None,
        )

    def _certain(self, tokens: mx.array) -> Proposal:
        """Drafts (W,) that were not drawn: the text has no other."""
        return Proposal(tokens, (mx.arange(self._vocab_size) == tokens[:, None]).astype(mx.float32))

    def withdraw(self) -> None:
        self.inner.withdraw()

    def extend(self, tokens: mx.array, features: mx.array | None, at: mx.array, *, room: int, all_kept: bool) -> None:
        self.inner.extend(tokens, features, at, room=room, all_kept=all_kept)

    def settle(self, at: mx.array) -> None:
        self.inner.settle(at)

    def layers(self) -> list[Any]:
        return self.inner.layers()

    def add(self, count: int) -> None:
        self.inner.add(count)

    def take_over(self, other: "WithNgramState", places: Sequence[int]) -> None:
        self.inner.take_over(other.inner, places)
        self.text.take_over(other.text, places)
        self._kept.update(other._kept)

    def keep(self, rows: Sequence[int]) -> None:
        self.inner.keep(rows)

    def give_back(self, row: int, length: int, caches: list[Any]) -> None:
        self.inner.give_back(row, length, caches)


class _Kept:
    """How many drafts an answer keeps in a round, by how its text grows.

    mean: of the drafter's own. honesty: of the text's, by those it promised, at most 1. Where words come again around
    another number, say, the text is wrong each time, though it is right of the words.
    """

    def __init__(self) -> None:
        self.mean = _FIRST_KEPT
        self._kept = self._told = _FIRST_TOLD
        # The text's length when it was last looked at; what it promised then, for how many places, how much of it was
        # equal, and what of the promise was told.
        self._length = self._places = self._equal = 0
        self._promise = self._said = 0.0
        # What the round that was begun then verifies.
        self._drafts: Literal["text", "drafter", None] = None

    @property
    def by_text(self) -> bool:
        """Whether the text drafted for the round that was begun."""
        return self._drafts == "text"

    @property
    def honesty(self) -> float:
        return min(self._kept / self._told, 1.0)

    def told(self, lookup: Lookup, places: int) -> float:
        """How many of the text's `places` drafts are expected to be kept; 0 where more of the drafter's are."""
        grown = len(lookup.tokens) - self._length
        if grown:
            self._note(lookup, grown)
            self._length, self._equal = len(lookup.tokens), lookup.length
        if grown or places != self._places:
            self._places, self._promise = places, lookup.promise(places)
            told = self._promise * self.honesty
            self._said = told if 1 + told > _MARGIN * (1 + self.mean) else 0.0
        return self._said

    def _note(self, lookup: Lookup, grown: int) -> None:
        """What has come since the last time: the drafts kept, and the target's own token."""
        if self._drafts == "drafter":
            self.mean = _FADE * self.mean + (1 - _FADE) * (grown - 1)
        elif self._drafts == "text" and lookup.length < self._equal + grown:
            # The text went on differently. Where it did not, fewer drafts were verified than it promised.
            self._kept = _FADE * self._kept + grown - 1
            self._told = _FADE * self._told + self._promise
        self._drafts = None

    def begin(self, *, by_text: bool) -> None:
        """A round is drafted for, by the text or by the drafter."""
        self._drafts = "text" if by_text else "drafter"
