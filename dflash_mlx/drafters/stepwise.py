"""Drafters that draft one token after another: what they have in common, and their state on a batch of answers.

Such a drafter is a small causal network. What it reads at a position is an *entry*: a token, and for drafters that read
features of the target the feature of the position before that token. Entry t is

- without features: token t;
- with features: the feature of position t and token t + 1 (EAGLE-3, multi-token prediction).

Beside the network's own caches there is one of *notes*: the token and the feature of each position that the target has
read. From them the entries that are still missing are put together when the next draft begins, all in one pass. So
nothing waits in a queue, and what is kept of a conversation, in whatever way it is cut, can be gone on from.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from dflash_mlx.caches.replay import replayed
from dflash_mlx.caches.rows import Rows
from dflash_mlx.caches.tree_rows import branched, find_ropes
from dflash_mlx.drafters.contract import Drafted, DraftVocabulary, TreeChooser, Writer, draft_each_place
from dflash_mlx.drafters.growing import grow
from dflash_mlx.drafters.ranking import BRANCHES, Ranking, rank
from dflash_mlx.drafters.row_state import RowState
from dflash_mlx.targets.target import Target

# While nothing is drafted, entries wait in batches of this many.
_MOST_MISSING = 64


class StepwiseDrafter(ABC):
    """See `contract.Drafter`. What differs between the kinds is the network: how it reads entries and what it says."""

    method: str
    # A place depends on the tokens chosen before it: so there is one chain, unless the network takes a tree's rows, and
    # its confidence depends on draws.
    supports_trees = False
    allows_rejection = False
    drafts_on_host = False

    def __init__(self, network: nn.Module, *, places: int) -> None:
        """places: the most tokens that it drafts for a round."""
        self.networks: Sequence[nn.Module] = [network]
        self.places = places

    @property
    def taps(self) -> Sequence[int]:
        """The layers of the target whose outputs it reads; none here."""
        return ()

    @property
    def shift(self) -> int:
        """How many positions the token of an entry is after the entry's own."""
        return 1 if self.taps else 0

    @abstractmethod
    def misfits(self, target: Target) -> list[str]:
        """See `contract.Drafter`."""

    @abstractmethod
    def vocabulary(self, target: Target) -> DraftVocabulary | None:
        """The tokens it may draft, or None for all of the target's."""

    @abstractmethod
    def make_layer_caches(self) -> list[Any]:
        """The network's caches of one answer: mlx-lm's, of full attention."""

    def project(self, features: mx.array) -> mx.array:
        """Features (B, L, taps * D) as the network reads and the notes keep them, (B, L, N)."""
        return features

    @abstractmethod
    def feed(self, target: Target, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        """Read the next entries: their tokens (B, L), and features as `project` gives them (B, L, N).

        Returns for each what `logits` takes, and what stands for the next position's feature while it drafts.
        """

    @abstractmethod
    def logits(self, target: Target, hidden: mx.array) -> mx.array:
        """What `feed` returned, (B, L, N), as logits of the next tokens (B, L, V), or (B, L, n) of its vocabulary."""

    def rehearsal(self) -> "StepwiseDrafter":
        return self

    def make_cache(self) -> list[Any]:
        """The notes' cache, then the network's."""
        return [KVCache(), *self.make_layer_caches()]

    def read(self, target: Target, tokens: mx.array, features: mx.array | None, caches: list[Any]) -> None:
        """See `contract.Drafter`. Of the newest entry only the position is taken, where its token is yet to come."""
        notes, layers, start = caches[0], caches[1:], caches[0].offset
        notes.update_and_fetch(*self.noted(tokens, features))
        first = max(start - self.shift, 0)
        for layer in layers:
            layer.trim(layer.offset - first)
        end = notes.offset
        known = mx.pad(notes.keys[:, 0, first + self.shift : end, 0], [(0, 0), (0, self.shift)])
        self.feed(target, known, notes.values[:, 0, first:end], layers)

    def noted(self, tokens: mx.array, features: mx.array | None) -> tuple[mx.array, mx.array]:
        """Tokens (B, L) and features as the notes' keys and values, (B, 1, L, 1) and (B, 1, L, N)."""
        hidden = mx.zeros((*tokens.shape, 1)) if features is None else self.project(features)
        return tokens.astype(mx.uint32)[:, None, :, None], hidden[:, None]

    def filled(self, target: Target, caches: list[Any]) -> list[Any]:
        """The same caches, with buffers also where nothing was ever written."""
        if caches[0].keys is None:
            nothing = mx.zeros((1, 1, len(self.taps) * target.hidden_size)) if self.taps else None
            self.read(target, mx.zeros((1, 1), dtype=mx.uint32), nothing, caches)
            for cache in caches:
                cache.trim(1)
        return caches

    def open(self, target: Target, caches: list[Any], length: int) -> "StepwiseState":
        return StepwiseState(self, target, Rows.of(self.filled(target, caches), length))

    def blank(self, target: Target, rows: int, positions: int) -> "StepwiseState":
        caches = self.filled(target, self.make_cache())
        return StepwiseState(self, target, Rows.blank(caches, rows, positions))


class StepwiseState(RowState):
    """See `contract.DraftState`.

    Entries are written by their index. What a draft writes after the anchor's entry stays where it is, and the next
    entries are written over it; so nothing has to be known of what was kept. The drafts that are verified after
    `propose` have to be the first of those that it gave, unless they were withdrawn.
    """

    def __init__(self, drafter: StepwiseDrafter, target: Target, rows: Rows) -> None:
        super().__init__(rows)
        self.drafter = drafter
        self._passes = target.passes_of(drafter, _Passes)
        self.vocabulary = self._passes.vocabulary
        self._begin_settled()

    def _begin_settled(self) -> None:
        # Of each row, how many entries are right, (B,); None: all those before the anchor's.
        self._right: mx.array | None = None
        # How many more come before the next anchor's at most. Below 0 where some of the right ones may come after it.
        self._missing = 0
        # How many of the entries that the newest draft wrote are right as far as its drafts are kept.
        self._drafted = 0

    def extend(self, tokens: mx.array, features: mx.array | None, at: mx.array, *, room: int, all_kept: bool) -> None:
        if self._missing >= _MOST_MISSING:
            self.settle(at)
        self._reserve(room)
        self.rows.lengths.value = at
        self._passes.note(self.rows, tokens, *([] if features is None else [features]))
        self._right = self._right_before(at) + self._drafted
        self._missing = max(self._missing, 0) + tokens.shape[1] - self._drafted
        self._drafted = 0

    def settle(self, at: mx.array) -> None:
        self._read_missing(self._right_before(at))
        self._begin_settled()

    def propose(
        self, writers: Sequence[Writer], anchors: mx.array, at: mx.array, places: int, *, room: int, tree: bool = False
    ) -> Drafted:
        assert places <= self.drafter.places
        tree = tree and self.drafter.supports_trees
        self._reserve(room + (BRANCHES * places if tree else 0))
        own = at - self.drafter.shift
        columns = mx.arange(max(self._missing, 0) + 1)
        self.rows.lengths.value = mx.maximum(self._right_before(at), 0)
        hidden, logits = self._passes.catch_up(self.rows, columns, anchors.astype(mx.uint32), at)
        if tree:
            [writer] = writers
            return self._grow(writer, hidden, logits, at, places)
        tokens, all_logits = [self._choose(writers, logits, at + 1)], [logits]
        for place in range(1, places):
            self.rows.lengths.value = own + place
            hidden, logits = self._passes.step(self.rows, tokens[-1][:, None], hidden)
            tokens.append(self._choose(writers, logits, at + 1 + place))
            all_logits.append(logits)
        # Without features its own drafts are read as the answer's tokens would be.
        self._right, self._missing, self._drafted = own, 0, 1 if self.drafter.shift else places
        return Drafted(mx.stack(tokens, axis=1), mx.concatenate(all_logits, axis=1))

    def _grow(self, writer: Writer, hidden: mx.array, logits: mx.array, at: mx.array, places: int) -> Drafted:
        """A tree of one row, by what is said of its anchor: hidden (1, 1, N) and logits (1, 1, n)."""
        own, said = at - self.drafter.shift, hidden

        def follow(tokens: mx.array, parents: mx.array, visible: mx.array) -> Ranking:
            nonlocal said
            count, read = visible.shape
            # Written after the anchor, in the order in which they are read.
            self.rows.lengths.value = own + 1 + read - count
            depths = mx.arange(read) // count
            said, logits = self._passes.branch(self.rows, tokens[None], said[:, parents], depths, visible)
            return self._ranked(writer, logits[0], at + 1 + read // count)

        grown = grow(self._ranked(writer, logits[0], at + 1), follow, places)
        self._right, self._missing, self._drafted = own, 0, 1
        best, log_probs = grown.token_ids[grown.best], grown.log_probs[grown.best]
        return Drafted(best[None], log_probs=log_probs[None], grown=grown)

    def _ranked(self, writer: Writer, logits: mx.array, position: mx.array) -> Ranking:
        """The likeliest tokens of a writer at one position, by each of the rows of logits (K, n)."""
        ids = self.vocabulary.token_ids if self.vocabulary else None
        if not writer.is_plain_greedy:
            chooser = cast(TreeChooser, writer.strategy)
            logits = chooser.preferences(logits[None], position, self.vocabulary)[0]
        return rank(logits, BRANCHES, ids)

    def withdraw(self) -> None:
        # The anchors' entries are right whatever comes after them.
        self._drafted = min(self._drafted, 1)

    def _choose(self, writers: Sequence[Writer], logits: mx.array, position: mx.array) -> mx.array:
        """A token of each row, (B,), by logits (B, 1, n) for the positions (B,)."""
        return draft_each_place(writers, logits, position, self.vocabulary).tokens[:, 0].astype(mx.uint32)

    def _right_before(self, at: mx.array) -> mx.array:
        """How many entries of each row are right when its anchor is at the positions `at` (B,); -1 when that is 0.

        What a round fed and did not keep is not before its end.
        """
        own = at - self.drafter.shift
        return own if self._right is None else mx.minimum(self._right, own)

    def _reserve(self, room: int) -> None:
        """Make room for all that is written: entries that may be missing are fed as if all drafts had been kept."""
        self.rows.reserve(room + self.drafter.places + min(max(self._missing, 0), _MOST_MISSING))

    def _read_missing(self, start: mx.array) -> None:
        """Feed the entries that are missing, from the ones at `start` (B,) on."""
        if self._missing > 0:
            self.rows.lengths.value = mx.maximum(start, 0)
            self._passes.read(self.rows, mx.arange(self._missing))

    def absorb(self) -> None:
        """Feed whatever may be missing of what was kept. How much that is only the device knows; some is fed again."""
        if self._right is not None:
            self._read_missing(self._right)


class _Passes:
    """What a drafter computes over rows for a target; replayed where the target's passes are."""

    def __init__(self, drafter: StepwiseDrafter, target: Target) -> None:
        self.drafter, self.target = drafter, target
        self.vocabulary = drafter.vocabulary(target)
        self._ropes = find_ropes(drafter.networks[0]) if drafter.supports_trees else []
        self.note, self.read, self.catch_up, self.step, self.branch = (
            replayed(body, on=target.replays)
            for body in (self._note, self._read, self._catch_up, self._step, self._branch)
        )

    def _note(self, rows: Rows, tokens: mx.array, features: mx.array | None = None) -> list[mx.array]:
        """Write down the tokens (B, L) and features (B, L, taps * D) of the positions from the rows' lengths on."""
        rows.layers[0].update_and_fetch(*self.drafter.noted(tokens, features))
        return []

    def _read(self, rows: Rows, columns: mx.array) -> list[mx.array]:
        """Feed the entries from the rows' lengths on, as many as there are columns."""
        tokens, hidden = self._entries(rows, rows.lengths.value[:, None] + columns)
        self.drafter.feed(self.target, tokens, hidden, rows.layers[1:])
        return []

    def _catch_up(self, rows: Rows, columns: mx.array, anchors: mx.array, at: mx.array) -> list[mx.array]:
        """The same, up to the entries of the anchors (B,) at the positions `at` (B,), and what is said there.

        Returns hidden (B, 1, N) and logits (B, 1, n). What is fed after an anchor has no meaning.
        """
        index = rows.lengths.value[:, None] + columns
        tokens, hidden = self._entries(rows, index)
        own = (at - self.drafter.shift)[:, None]
        said = self.drafter.feed(self.target, mx.where(index == own, anchors[:, None], tokens), hidden, rows.layers[1:])
        last = mx.clip(own - index[:, :1], 0, columns.shape[0] - 1)
        newest = mx.take_along_axis(said, last[..., None], axis=1)
        return [newest, self.drafter.logits(self.target, newest)]

    def _step(self, rows: Rows, tokens: mx.array, hidden: mx.array) -> list[mx.array]:
        """Feed the drafts (B, 1) with what was said at the place before, (B, 1, N). Returns the same as `_catch_up`."""
        said = self.drafter.feed(self.target, tokens, hidden, rows.layers[1:])
        return [said, self.drafter.logits(self.target, said)]

    def _branch(
        self, rows: Rows, tokens: mx.array, hidden: mx.array, depths: mx.array, visible: mx.array
    ) -> list[mx.array]:
        """The same for drafts of a tree, (1, K): see `tree_rows.branched`."""
        with branched(self._ropes, rows, depths, visible):
            return self._step(rows, tokens, hidden)

    def _entries(self, rows: Rows, index: mx.array) -> tuple[mx.array, mx.array]:
        """Tokens (B, L) and features (B, L, N) of the entries `index` (B, L), by the notes."""
        tokens, features = rows.layers[0].keys[:, 0], rows.layers[0].values[:, 0]
        last = tokens.shape[1] - 1
        return (
            mx.take_along_axis(tokens[..., 0], mx.minimum(index + self.drafter.shift, last), axis=1),
            mx.take_along_axis(features, mx.minimum(index, last)[..., None], axis=1),
        )
