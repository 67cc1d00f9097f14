"""The state of one conversation: what the target's and the drafter's caches hold."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from dflash_mlx.decoding.accept import DraftVocabulary, Proposal, Strategy
from dflash_mlx.decoding.path import propose_path
from dflash_mlx.decoding.tree import DraftTree
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.drafters.dflash2 import DFlash2Drafter
from dflash_mlx.targets.branching import branched, keep_path
from dflash_mlx.targets.device_cache import DeviceCaches
from dflash_mlx.targets.rollback import Rollback, choose_rollback
from dflash_mlx.targets.target import Target


@dataclass
class Draft:
    """What the drafter said of the W places behind an anchor: logits (W, V), or (W, n) when it has a vocabulary of its
    own, and hidden states (W, D)."""

    logits: mx.array
    hidden: mx.array


@dataclass
class Session:
    """Caches of a target and, when it drafts, its drafter.

    Invariants between rounds: the target's cache holds exactly `tokens`; the drafter's cache holds the first of
    those positions and `pending` the features (1, L, taps * D) of the others, in order. `in_flight` counts the
    positions of a launched round that has not been committed; `settle` takes them out again. `turn` counts answers,
    so that one that was left unfinished does not touch the caches once the next has begun. Between `to_device` and
    `to_host`, in the middle of an answer, `device` holds what the target's and the drafter's caches did.
    """

    target: Target
    drafter: DFlashDrafter | None
    tokens: list[int] = field(default_factory=list)
    pending: list[mx.array] = field(default_factory=list)
    in_flight: int = 0
    turn: int = 0
    target_cache: list[Any] = field(init=False)
    draft_cache: list[KVCache] = field(init=False)
    rollback: Rollback = field(init=False)
    vocabulary: DraftVocabulary | None = field(init=False)
    device: tuple[DeviceCaches, DeviceCaches] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.tokens, self.pending, self.in_flight, self.device = [], [], 0, None
        self.target_cache = self.target.make_cache()
        self.draft_cache = self.drafter.make_cache() if self.drafter else []
        self.rollback = choose_rollback(self.target_cache, self.target)
        ids = self.drafter.config.draft_token_ids if self.drafter else ()
        self.vocabulary = DraftVocabulary(mx.array(ids), self.target.vocab_size) if ids else None

    def draft_logits(self, hidden: mx.array) -> mx.array:
        """The drafter's logits for its hidden states, (W, D) -> (W, V), or (W, n) for the n tokens it may draft."""
        assert self.drafter is not None
        config = self.drafter.config
        head = self.target.head_for(config.draft_token_ids) if config.draft_token_ids else self.target.head
        if config.own_head:
            head = self.drafter.lm_head
        return self.drafter.adjust_logits(head(hidden))

    def forward(
        self, tokens: mx.array, *, revocable: bool = False, tree: DraftTree | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """tokens (1, L) -> logits (1, L, V) and, when there is a drafter, features (1, L, taps * D).

        Each forward is to be followed by `keep`, which may keep only some of the tokens if `revocable`. With a `tree`,
        where `can_branch`, the tokens are the anchor and the tree's.
        """
        if self.device is not None:
            assert self.drafter is not None
            caches, _ = self.device
            caches.reserve(len(self.tokens) + self.in_flight + tokens.shape[1])
            with self._whole_or_reset():
                return self.target.forward_tapped(tokens, caches.layers, self.drafter.config.target_layer_ids)
        if tree is not None:
            assert self.drafter is not None
            sight = branched(self.target.ropes, self.target_cache, tree.depths, tree.visible)
            with self._whole_or_reset(), sight as branched_caches:
                return self.target.forward_tapped(tokens, branched_caches, self.drafter.config.target_layer_ids)
        with self._whole_or_reset(), self.rollback.feeding(self.target_cache, tokens, revocable=revocable):
            if self.drafter is None:
                return self.target.forward(tokens, self.target_cache), None
            return self.target.forward_tapped(tokens, self.target_cache, self.drafter.config.target_layer_ids)

    def keep(self, path: Sequence[int], *, fed: int) -> None:
        """Leave the rows of `path`, in rising order, of the `fed` tokens of the oldest forward in the target's cache.

        They are the first ones, except behind a tree. While the lengths are on the device, they alone say what is left.
        """
        if self.device is not None:
            return
        with self._whole_or_reset():
            keep_path(self.target_cache, len(self.tokens), path)
            self.rollback.commit(self.target_cache, fed=fed, keep=len(path))

    @contextmanager
    def _whole_or_reset(self) -> Iterator[None]:
        """Forget everything if a change to the target's caches fails in some layer, after others have made it."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def draft(self, features: mx.array | None, block: mx.array, *, end: int | mx.array) -> Draft:
        """One forward of the drafter, for the anchor and masks of `block`, (W + 1,).

        `features` (1, L, taps * D), of the newest round, go into the drafter's cache. `end` is the number of positions
        in it that then count, and so the anchor's position; as an int it is all of them.
        """
        drafter = self.drafter
        assert drafter is not None
        embedded = drafter.embed_block(block[None], self.target.embed)
        if self.device is not None:
            assert features is not None
            assert not self.pending
            _, caches = self.device
            caches.reserve(len(self.tokens) + self.in_flight + block.shape[0])
            drafter.extend_context(features, caches.layers)
            hidden = drafter(embedded, caches.layers, context_length=mx.array(end))[0, 1:]
        else:
            self.absorb_pending(features)
            hidden = drafter(embedded, self.draft_cache, context_length=None if isinstance(end, int) else end)[0, 1:]
        return Draft(self.draft_logits(hidden), hidden)

    def propose(self, strategy: Strategy, draft: Draft, *, anchor: mx.array, position: int | mx.array) -> Proposal:
        """Choose drafts for the W places behind `anchor` (1,), of which `position` is the first."""
        if not isinstance(self.drafter, DFlash2Drafter):
            return strategy.propose(draft.logits, position, self.vocabulary)
        return propose_path(
            self.drafter.candidate_selector,
            strategy,
            hidden=draft.hidden,
            logits=draft.logits,
            anchor=anchor,
            position=position,
            vocabulary=self.vocabulary or DraftVocabulary(mx.arange(draft.logits.shape[-1]), self.target.vocab_size),
        )

    def absorb_pending(self, newest: mx.array | None = None) -> None:
        """Move pending features, and `newest` behind them, into the drafter's cache."""
        features = [*self.pending, newest] if newest is not None else self.pending
        if features and self.drafter is not None:
            self.drafter.extend_context(
                features[0] if len(features) == 1 else mx.concatenate(features, axis=1), self.draft_cache
            )
        self.pending = []

    @property
    def next_position(self) -> int | mx.array:
        """Where the next token fed to the target will be."""
        return self.device[0].length.value if self.device else len(self.tokens) + self.in_flight

    def can_queue_ahead(self) -> bool:
        """Whether the lengths of both models' caches may stay on the device."""
        return self.drafter is not None and self.target.takes_device_lengths()

    def can_branch(self) -> bool:
        """Whether rounds may be trees: the target takes them, and the drafter's places do not depend on each other."""
        return self.drafter is not None and not isinstance(self.drafter, DFlash2Drafter) and self.target.takes_trees()

    def to_device(self, length: mx.array) -> None:
        """From here on both caches hold `length` positions, (), a number that the host need not know.

        They may hold more, of which the rest is forgotten.
        """
        if self.device is None:
            self.device = DeviceCaches.stand_in(self.target_cache), DeviceCaches.stand_in(self.draft_cache)
        for caches in self.device:
            caches.length.value = length.astype(mx.int32)

    def to_host(self) -> None:
        """Back to the usual caches with the committed tokens; what a launched round fed beyond them is forgotten."""
        if self.device is None:
            return
        absorbed = len(self.tokens) - sum(features.shape[1] for features in self.pending)
        self.device[0].give_back(len(self.tokens))
        self.device[1].give_back(absorbed)
        self.device, self.in_flight = None, 0

    def settle(self) -> None:
        """Take out the positions of a launched round that will not be committed."""
        self.to_host()
        if self.in_flight:
            fed, self.in_flight = self.in_flight, 0
            if not self.rollback.trim(self.target_cache, fed):
                self.reset()
        self.trim_drafts(len(self.tokens))

    def rewind(self, length: int) -> None:
        """Keep only the first `length` tokens; forget everything if the caches cannot go back."""
        self.settle()
        count = len(self.tokens) - length
        if count <= 0:
            return
        self.absorb_pending()
        if not self.rollback.trim(self.target_cache, count):
            self.reset()
            return
        del self.tokens[length:]
        self.trim_drafts(length)

    def trim_drafts(self, length: int) -> None:
        """Keep at most the first `length` positions in the drafter's cache."""
        for layer_cache in self.draft_cache:
            layer_cache.trim(max(0, layer_cache.offset - length))


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
