"""A DFlash drafter at work on a batch of answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from dflash_mlx.caches.replay import replayed
from dflash_mlx.caches.rows import Rows
from dflash_mlx.constants import constant
from dflash_mlx.drafters.contract import Drafted, DraftVocabulary, Writer, confidence, draft_each_place
from dflash_mlx.drafters.denoising import surest
from dflash_mlx.drafters.row_state import RowState
from dflash_mlx.targets.target import Target

if TYPE_CHECKING:
    from dflash_mlx.drafters.dflash import DFlashDrafter

# While nothing is drafted, the features of up to so many rounds, and tokens, wait for the drafter.
_MOST_ROUNDS, _MOST_TOKENS = 256, 4096


class DFlashState(RowState):
    """See `contract.DraftState`."""

    def __init__(self, drafter: "DFlashDrafter", target: Target, rows: Rows) -> None:
        super().__init__(rows)
        self.drafter, self.target = drafter, target
        self._passes = target.passes_of(drafter, _Passes)
        self.vocabulary = self._passes.vocabulary
        # The features of a block, or of single tokens, (B, 1, ...) each, that wait; the positions of the first; and the
        # most positions that a row has after them.
        self._block: mx.array | None = None
        self._waiting: list[mx.array] = []
        self._at, self._room = self.rows.lengths.value, 0

    @classmethod
    def of(cls, drafter: "DFlashDrafter", target: Target, caches: Sequence[KVCache], length: int) -> "DFlashState":
        """Of one answer, of which the drafter's caches hold the first `length` positions. They move over here."""
        return cls(drafter, target, Rows.of(drafter.filled(caches), length))

    @classmethod
    def blank(cls, drafter: "DFlashDrafter", target: Target, rows: int, positions: int) -> "DFlashState":
        """Of so many answers of which nothing is known, with room for some positions each."""
        return cls(drafter, target, Rows.blank(drafter.filled(drafter.make_cache()), rows, positions))

    def extend(self, tokens: mx.array, features: mx.array | None, at: mx.array, *, room: int, all_kept: bool) -> None:
        assert features is not None
        waits = all_kept and features.shape[1] == 1
        if not waits or self._block is not None:
            self.absorb()
        self._room = room
        if not self._waiting:
            self._at = at
        if not waits:
            self._block = features
            return
        self._waiting.append(features)
        rounds = len(self._waiting)
        if rounds >= _MOST_ROUNDS or rounds * features.shape[0] >= _MOST_TOKENS:
            self.absorb()

    def absorb(self) -> None:
        """Turn the features that wait into keys and values."""
        if self._block is not None:
            block, self._block = self._block, None
            self.rows.reserve(self._room)
            self._absorb(block)
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            count = len(waiting)
            if self.target.replays:
                # Some more are taken in, and written over later, where each number would be written down and compiled
                # anew.
                waiting += waiting[-1:] * ((1 << (count - 1).bit_length()) - count)
            self.rows.reserve(self._room + len(waiting) - count)
            # There is no room made for a row whose lane has left since the first of them, so it must not go on.
            self._at = mx.minimum(self._at, self.rows.lengths.capacity - len(waiting))
            self._absorb(mx.concatenate(waiting, axis=1))
            if self.target.replays:
                # Now, by itself, for the same reason.
                mx.async_eval([leaf.state for leaf in self.rows.attention])

    def _absorb(self, features: mx.array) -> None:
        self.rows.lengths.value = self._at
        self._passes.absorb(self.rows, features)

    def settle(self, at: mx.array) -> None:
        self.absorb()

    def propose(
        self, writers: Sequence[Writer], anchors: mx.array, at: mx.array, places: int, *, room: int, tree: bool = False
    ) -> Drafted:
        if self.drafter.drafting.diffusion_steps > 1:
            return self._propose_in_steps(writers, anchors, at, places, room=room)
        logits, hidden = self.draft(anchors, at, self._masks(anchors, places), room=room)
        return self.drafter.choose(
            writers, logits, hidden, anchors=anchors, position=at + 1, vocabulary=self.vocabulary, tree=tree
        )

    def _propose_in_steps(
        self, writers: Sequence[Writer], anchors: mx.array, at: mx.array, places: int, *, room: int
    ) -> Drafted:
        """Draft, fix the surest places and draft the others again around them, until all are fixed."""
        tokens = masks = self._masks(anchors, places)
        fixed = mx.zeros(masks.shape, dtype=mx.bool_)
        logits: mx.array | None = None
        for count in self.drafter.drafting.fixed_counts(places):
            said, _ = self.draft(anchors, at, tokens, room=room)
            logits = said if logits is None else mx.where(fixed[..., None], logits, said)
            chosen = draft_each_place(writers, said, at + 1, self.vocabulary).tokens.astype(mx.uint32)
            now = surest(confidence(logits), fixed, count)
            tokens, fixed = mx.where(fixed, tokens, mx.where(now, chosen, masks)), now
        return Drafted(tokens, logits)

    def _masks(self, anchors: mx.array, places: int) -> mx.array:
        return constant(self.drafter.config.mask_token_id, mx.uint32, (anchors.shape[0], places))

    def draft(self, anchors: mx.array, at: mx.array, drafts: mx.array, *, room: int) -> tuple[mx.array, mx.array]:
        """What the drafter says of the places after the anchors: logits (B, W, n) and hidden states (B, W, D).

        drafts: (B, W), what the block holds there: masks, and tokens that are fixed.
        """
        self.absorb()
        self.rows.reserve(room)
        self.rows.lengths.value = at
        block = mx.concatenate([anchors.astype(mx.uint32)[:, None], drafts], axis=1)
        logits, hidden = self._passes.draft(self.rows, block)
        return logits, hidden


class _Passes:
    """What a drafter computes over rows for a target; replayed where the target's passes are."""

    def __init__(self, drafter: "DFlashDrafter", target: Target) -> None:
        self.drafter, self.target = drafter, target
        self.vocabulary = DraftVocabulary.of(drafter.config.draft_token_ids, target.vocab_size)
        self.absorb, self.draft = (replayed(body, on=target.replays) for body in (self._absorb, self._draft))

    def _absorb(self, rows: Rows, features: mx.array) -> list[mx.array]:
        self.drafter.extend_context(features, rows.layers)
        return []

    def _draft(self, rows: Rows, block: mx.array) -> list[mx.array]:
        hidden = self.drafter(self.drafter.embed_block(block, self.target.embed), rows)[:, 1:]
        return [draft_logits(self.drafter, self.target, hidden), hidden]


def draft_logits(drafter: "DFlashDrafter", target: Target, hidden: mx.array) -> mx.array:
    """The drafter's logits for its hidden states, (..., D) -> (..., V), or (..., n) for the n tokens it may draft."""
    ids = drafter.config.draft_token_ids
    own = drafter.lm_head if drafter.config.own_head else None
    head = own or (target.head_for(ids) if ids else target.head)
    return drafter.adjust_logits(head(hidden))
