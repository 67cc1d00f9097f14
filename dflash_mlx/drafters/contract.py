"""What a way of drafting gives to the decode loop and gets from it. The loop knows nothing else of drafters."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.growing import Grown
from dflash_mlx.targets.target import Target


@dataclass
class DraftVocabulary:
    """The tokens a drafter may draft, out of a vocabulary of `size`: token_ids (n,), in the order of its logits."""

    token_ids: mx.array
    size: int

    @classmethod
    def of(cls, token_ids: tuple[int, ...], size: int) -> "DraftVocabulary | None":
        """These tokens; None, for all, where there are none."""
        return cls(mx.array(token_ids), size) if token_ids else None

    def widen(self, values: mx.array, *, elsewhere: float) -> mx.array:
        """(W, n) -> (W, size), float32, with the value `elsewhere` for the tokens that are never drafted."""
        full = mx.full((values.shape[0], self.size), elsewhere, dtype=mx.float32)
        columns = mx.broadcast_to(self.token_ids, values.shape)
        return mx.put_along_axis(full, columns, values.astype(mx.float32), axis=-1)


@dataclass
class Proposal:
    """A drafted continuation of one answer's anchor.

    tokens: (W,) drafted ids; probs: (W, V) float32 distributions they were drawn from, for sampling by rejection.
    """

    tokens: mx.array
    probs: mx.array | None = None

    @property
    def width(self) -> int:
        return int(self.tokens.shape[0])

    def shortened(self, width: int) -> "Proposal":
        """The first `width` drafts."""
        if width >= self.width:
            return self
        return Proposal(self.tokens[:width], None if self.probs is None else self.probs[:width])


def best_tokens(logits: mx.array, vocabulary: DraftVocabulary | None) -> mx.array:
    """The likeliest tokens (...) by logits (..., V), or (..., n) of a `vocabulary`."""
    best = mx.argmax(logits, axis=-1)
    return best if vocabulary is None else vocabulary.token_ids[best]


def confidence(logits: mx.array) -> mx.array:
    """Logarithms of the chance of the best token at each place, (...) float32, by logits (..., n)."""
    logits = logits.astype(mx.float32)
    return logits.max(axis=-1) - mx.logsumexp(logits, axis=-1)


@dataclass
class Drafted:
    """Drafts of B answers: tokens (B, W) after each anchor, and what the drafter thinks of them.

    logits: (B, W, V), or (B, W, n) when it has a vocabulary of its own. log_probs: (B, W), where it has no logits and
    only holds its drafts so likely. proposals: of each answer, where tokens are not just the best ones. grown: what a
    tree of a single answer is to be chosen from, where that is not the logits; `tokens` are then no path.
    """

    tokens: mx.array
    logits: mx.array | None = None
    log_probs: mx.array | None = None
    proposals: list[Proposal] | None = None
    grown: Grown | None = None

    @classmethod
    def of_proposals(cls, proposals: list[Proposal], logits: mx.array) -> "Drafted":
        """Drafts that each of B answers chose by its logits (B, W, n)."""
        return cls(mx.stack([proposal.tokens for proposal in proposals]), logits, proposals=proposals)

    @property
    def confidence(self) -> mx.array:
        """Logarithms of the chance of the best token at each place, (B, W) float32."""
        if self.logits is None:
            assert self.log_probs is not None
            return self.log_probs
        return confidence(self.logits)


class Chooser(Protocol):
    """How one answer's tokens are chosen: greedy or a way of sampling (`decoding.accept.Strategy`)."""

    def propose(self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None) -> Proposal:
        """Draft from logits (W, V), or (W, n) of a `vocabulary`; `position` is the first token's."""


class TreeChooser(Chooser, Protocol):
    """The same for an answer whose drafts may be a tree (`decoding.accept.TreeStrategy`)."""

    def preferences(self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None) -> mx.array:
        """Scores like the logits (W, n): by them the target would choose if its logits were these.

        logits may also be (W, R, n), R rows for each place. The tokens of a `vocabulary` may be (W, n), too, other ones
        for each place.
        """


class Writer(Protocol):
    """An answer in progress, as far as drafting looks at it (`decoding.lane.Lane`)."""

    @property
    def strategy(self) -> Chooser:
        """How its tokens are chosen."""

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the best token is all that is asked for."""

    def text_from(self, position: int) -> list[int]:
        """Its tokens from a position on, prompt and answer, up to the newest one that the host knows."""


class Nobody:
    """The writer of a row without an answer: the best tokens are drafted for it, and nobody looks at them."""

    is_plain_greedy = True

    @property
    def strategy(self) -> Chooser:
        return self

    def propose(self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None) -> Proposal:
        return Proposal(best_tokens(logits, vocabulary))

    def text_from(self, position: int) -> list[int]:
        return []


def draft_each_place(
    writers: Sequence[Writer], logits: mx.array, position: mx.array, vocabulary: DraftVocabulary | None
) -> Drafted:
    """Drafts as each writer chooses them by its logits (B, W, n), from the positions (B,) on: each place for itself."""
    if all(writer.is_plain_greedy for writer in writers):
        return Drafted(best_tokens(logits, vocabulary), logits)
    proposals = [writer.strategy.propose(logits[row], position[row], vocabulary) for row, writer in enumerate(writers)]
    return Drafted.of_proposals(proposals, logits)


@dataclass(frozen=True)
class Continuation:
    """What follows an answer's newest tokens by the text alone: the tokens of one path, and how likely each of them is
    to come if those before it did."""

    tokens: list[int]
    chances: list[float]


class Outlook(Enum):
    """What drafting for the next round takes."""

    NOTHING = "there is nothing to draft"
    DEVICE = "the device knows all that drafting needs"
    HOST = "the host has to know the newest tokens first"


class Drafter(Protocol):
    """A way of drafting, loaded."""

    @property
    def method(self) -> str:
        """How it drafts, in a word or two: "dflash", "ngram", ..."""

    @property
    def places(self) -> int:
        """The most tokens that it drafts for a round."""

    @property
    def taps(self) -> Sequence[int]:
        """Layers of the target whose outputs it wants to see, their features concatenated.

        The number of layers itself stands for the hidden states after the final norm.
        """

    @property
    def supports_trees(self) -> bool:
        """Whether its drafts may be a tree.

        Either what it says of a place is the same whatever is chosen at the places before, or it grows trees itself.
        """

    @property
    def allows_rejection(self) -> bool:
        """Whether its drafts may be sampled, and then judged, by rejection.

        This needs distributions that they were drawn from, and a confidence in a place that does not depend on the
        tokens drawn before it: else choosing a width by it would bias sampling. Otherwise a sampled token is kept
        while it is the target's own draw.
        """

    @property
    def drafts_on_host(self) -> bool:
        """Whether all its drafting is done on the host, which then always waits for the newest tokens."""

    @property
    def networks(self) -> Sequence[nn.Module]:
        """Its networks, whose layers may use kernels."""

    def misfits(self, target: Target) -> list[str]:
        """What speaks against using it for this target, by what the two configs say."""

    def make_cache(self) -> list[Any]:
        """Caches for what it remembers of one answer: mlx-lm's."""

    def read(self, target: Target, tokens: mx.array, features: mx.array | None, caches: list[Any]) -> None:
        """Take in the next tokens (1, L) of a prompt with their features (1, L, taps * D)."""

    def open(self, target: Target, caches: list[Any], length: int) -> "DraftState":
        """Go to work on one answer, of which the caches hold the first `length` positions. They move over."""

    def blank(self, target: Target, rows: int, positions: int) -> "DraftState":
        """Go to work on so many answers of which nothing is known, with room for some positions each."""

    def rehearsal(self) -> "Drafter":
        """One that drafts for every round, whatever the text: for measuring what rounds take."""


class DraftState(Protocol):
    """A drafter at work on a batch: what it remembers of B answers, a row for each."""

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The tokens that may be drafted, or None for all."""

    def outlook(self, writers: Sequence[Writer]) -> Outlook:
        """What drafting for the next round takes, by what the host knows of the answers."""

    def told(self, writer: Writer) -> float:
        """How many drafts of this answer's next round are likely to be kept, where the host can tell that before they
        are made, which takes no time then; else 0.

        A policy that rests from a drafter that did not pay may use them.
        """

    def continuation(self, writer: Writer, places: int) -> Continuation | None:
        """What the text says of this answer's next `places` tokens, where that may join the drafts proposed last.

        The host knows the newest tokens by now.
        """

    def extend(self, tokens: mx.array, features: mx.array | None, at: mx.array, *, room: int, all_kept: bool) -> None:
        """Take in a round: the tokens (B, L) that the target was fed from the positions `at` (B,) on, their features
        (B, L, taps * D).

        Those that are rejected are written over by the next ones. `room`: no row has more positions after this.
        all_kept: none will be rejected.
        """

    def settle(self, at: mx.array) -> None:
        """Work off everything that came before the positions `at` (B,), which are those of the anchors."""

    def propose(
        self, writers: Sequence[Writer], anchors: mx.array, at: mx.array, places: int, *, room: int, tree: bool = False
    ) -> Drafted:
        """Draft `places` tokens after each of the anchors (B,), which are at the positions `at` (B,).

        writers: one for each row. tree: of the only row a tree is wanted, within so many places; a chain is one, too.
        """

    def withdraw(self) -> None:
        """Take back what was proposed last: some rows will have other drafts verified."""

    def layers(self) -> list[Any]:
        """The caches of all rows, with everything that was kept so far."""

    def add(self, count: int) -> None:
        """Add rows that hold nothing. What came before is settled."""

    def take_over(self, other: Any, places: Sequence[int]) -> None:
        """Take the rows of another, each into the place of one that holds nothing. Both are settled."""

    def keep(self, rows: Sequence[int]) -> None:
        """Leave only these rows, in this order. What came before is settled."""

    def give_back(self, row: int, length: int, caches: list[Any]) -> None:
        """Put what it remembers of the first `length` positions of a row into the caches that a session keeps."""
