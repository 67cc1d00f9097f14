"""A DFlash drafter at work on a batch of answers."""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from dflash_mlx.caches.replay import replayed
from dflash_mlx.caches.rows import Rows
from dflash_mlx.drafters.contract import Drafted, DraftVocabulary, Writer, best_tokens, choose_tokens, confidence
from dflash_mlx.drafters.denoising import surest
from dflash_mlx.drafters.row_state import RowState
from dflash_mlx.targets.target import Target

if TYPE_CHECKING:
    from dflash_mlx.drafters.dflash import DFlashDrafter

# While nothing is drafted, features wait for the drafter in batches of this many tokens.
_MAX_PENDING = 64


class DFlashState(RowState):
    """See `contract.DraftState`."""

    def __init__(self, drafter: "DFlashDrafter", target: Target, rows: Rows) -> None:
        super().__init__(rows)
        self.drafter, self.target = drafter, target
        self._passes = target.passes_of(drafter, _Passes)
        self.vocabulary = self._passes.vocabulary
        self._pending: list[mx.array] = []
        self._pending_at = self.rows.lengths.value
        self._pending_kept = True

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
        if self._pending and not self._pending_kept:
            self.absorb()
        if not self._pending:
            self._pending_at = at
        self._pending.append(features)
        self._pending_kept = all_kept
        self.rows.reserve(room)
        if len(self._pending) >= _MAX_PENDING:
            self.absorb()

    def absorb(self) -> None:
        """Turn the features that wait into keys and values.

        By twice as many tokens each time, so that few shapes have to be written down and compiled.
        """
        if not self._pending:
            return
        features = self._pending[0] if len(self._pending) == 1 else mx.concatenate(self._pending, axis=1)
        self._pending = []
        # A block, of which a part may be rejected, is a shape that comes each time.
        sizes = _powers_of_two(features.shape[1]) if self._pending_kept else [features.shape[1]]
        at = self._pending_at
        for part in mx.split(features, list(accumulate(sizes))[:-1], axis=1):
            self.rows.lengths.value = at
            self._passes.absorb(self.rows, part)
            at = at + part.shape[1]

    def settle(self, at: mx.array) -> None:
        self.absorb()

    def propose(
        self, writers: Sequence[Writer], anchors: mx.array, at: mx.array, places: int, *, room: int, tree: bool = False
    ) -> Drafted:
        if self.drafter.drafting.diffusion_steps > 1:
            return self._propose_in_steps(writers, anchors, at, places, room=room)
        logits, hidden = self.draft(anchors, at, self._masks(anchors, places), room=room)
        if self.drafter.supports_trees and all(writer.is_plain_greedy for writer in writers):
            return Drafted(best_tokens(logits, self.vocabulary), logits)
        proposals = [
            self.drafter.choose(
                writer.strategy,
                logits[row],
                hidden[row],
                anchor=anchors[row : row + 1],
                position=at[row] + 1,
                vocabulary=self.vocabulary,
            )
            for row, writer in enumerate(writers)
        ]
        return Drafted(mx.stack([proposal.tokens for proposal in proposals]), logits, proposals=proposals)

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
            chosen = choose_tokens(writers, said, at + 1, self.vocabulary).astype(mx.uint32)
            now = surest(confidence(logits), fixed, count)
            tokens, fixed = mx.where(fixed, tokens, mx.where(now, chosen, masks)), now
        return Drafted(tokens, logits)

    def _masks(self, anchors: mx.array, places: int) -> mx.array:
        return mx.full((anchors.shape[0], places), self.drafter.config.mask_token_id, dtype=mx.uint32)

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


def _powers_of_two(count: int) -> list[int]:
    """Different powers of two that add up to a number: 11 -> [1, 2, 8]."""
    return [1 << bit for bit in range(count.bit_length()) if count >> bit & 1]


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
