"""A target's caches in the decode loop: fed a block for each answer, then told how much of it stays.

- `BatchCaches`: any number of answers, a row for each (`rows.py`).
- `SingleCaches`: one answer over mlx-lm's own caches, for the models that do not compute right with rows.

Which of them a model takes is found out by running it (`works_with`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.caches.own import OwnCaches, arrays_of
from dflash_mlx.caches.recurrence import Recorder, Recording
from dflash_mlx.caches.replay import Pass
from dflash_mlx.caches.rows import Rows, fits
from dflash_mlx.caches.tree_rows import TreeShape, find_ropes, keep_path
from dflash_mlx.ranks.mirror import Mirrored, mirrored
from dflash_mlx.rounding import TOLERANCE, relative_difference
from dflash_mlx.tree_steps import PLAIN, TreeSteps


class TargetCaches(Protocol):
    # Whether a block that is only partly kept has to be committed before the next one is fed.
    commits_on_host: bool

    def feed(
        self, model: Pass, tokens: mx.array, *, at: mx.array, room: int, tree: TreeShape | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """Run the model over the next tokens (B, L), which follow the positions `at` (B,).

        More than one token a row are a block of which `commit` may keep a part. `room`: no row will have more positions
        than this. With a `tree`, B is 1 and the tokens are its rows, of which `keep_path` leaves some.
        """

    def keep_path(self, path: mx.array) -> None:
        """Of the tree that was fed last, leave the rows of `path` (D + 1,), as if they had been fed as a chain."""

    def tidy(self) -> None:
        """Put positions in order that trees have left out of order, since many single tokens follow."""

    def commit(self, fed: int, kept: Sequence[int]) -> None:
        """Of the oldest block, `fed` tokens a row, leave the first `kept` of each."""

    def give_back(self, row: int, length: int, caches: OwnCaches) -> None:
        """Put what was committed of a row, `length` positions, into the caches of mlx-lm's that it came from."""


@dataclass
class _Block:
    """A block that is not committed: the recurrent states before it, and a recording where it may be kept in part.

    branched: it was a tree, of which the recording has one path, and the caches hold nothing that counts.
    """

    states: list[list[mx.array]]
    recording: Recording | None = None
    branched: bool = False


class BatchCaches(Mirrored):
    """See `TargetCaches`. The model's `layers` are those that hold recurrent parts. steps: how trees are computed."""

    def __init__(self, rows: Rows, layers: Sequence[nn.Module], steps: TreeSteps = PLAIN) -> None:
        self.rows, self._steps = rows, steps
        self.commits_on_host = bool(rows.states)
        self._recorder = Recorder(layers) if rows.states else None
        self._blocks: list[_Block] = []

    @mirrored
    def feed(
        self, model: Pass, tokens: mx.array, *, at: mx.array, room: int, tree: TreeShape | None = None
    ) -> tuple[mx.array, mx.array | None]:
        self.rows.reserve(room)
        self.rows.lengths.value = at
        if self._recorder is None:
            return model.over(self.rows, tokens, tree)
        block = _Block([list(state.cache) for state in self.rows.states])
        self._blocks.append(block)
        if tokens.shape[1] == 1:
            return model.over(self.rows, tokens)
        with self._recorder.recording(self.rows.states, tree) as block.recording:
            return model.over(self.rows, tokens, tree)

    @mirrored
    def keep_path(self, path: mx.array) -> None:
        keep_path(self.rows, path, self._steps)
        if self._recorder is not None:
            [block] = self._blocks
            assert block.recording is not None
            block.recording, block.branched = block.recording.of(path), True

    @mirrored
    def tidy(self) -> None:
        self.rows.tidy()

    @mirrored
    def commit(self, fed: int, kept: Sequence[int]) -> None:
        if self._recorder is None:
            return
        block = self._blocks.pop(0)
        if not block.branched and all(count == fed for count in kept):
            return
        assert not self._blocks, "a block was only partly kept, and more had been fed after it"
        assert block.recording is not None
        self._restore(block)
        counts, most = mx.array(list(kept)), max(kept)
        for state in self.rows.states:
            # Of its own: mlx-lm counts it down in place.
            state.lengths = mx.array(list(kept))
        self._recorder.replay_rows(block.recording.of(slice(most)), mx.arange(most) < counts[:, None])
        for state in self.rows.states:
            state.lengths = None

    @mirrored
    def read(self, model: Pass, tokens: mx.array, counts: Sequence[int], *, at: mx.array, room: int) -> mx.array | None:
        """Read the first `counts` of each row's tokens (B, L) of prompts; returns features where there are any."""
        assert not self._blocks
        self.rows.reserve(room)
        self.rows.lengths.value = at
        for state in self.rows.states:
            state.lengths = mx.array(list(counts))
        _, features = model.over(self.rows, tokens)
        for state in self.rows.states:
            state.lengths = None
        return features

    @mirrored
    def add(self, count: int) -> None:
        """Add rows that hold nothing, between rounds."""
        assert not self._blocks
        self.rows.add(count)

    @mirrored
    def take_over(self, other: "BatchCaches", places: Sequence[int]) -> None:
        """Take the rows of another into places that hold nothing, between rounds."""
        assert not self._blocks
        self.rows.take_over(other.rows, places)

    @mirrored
    def keep(self, rows: Sequence[int]) -> None:
        """Leave only these rows, between rounds."""
        assert not self._blocks
        self.rows.keep(rows)

    @mirrored
    def give_back(self, row: int, length: int, caches: OwnCaches) -> None:
        states = self._blocks[0].states if self._blocks else [state.cache for state in self.rows.states]
        self.rows.give_back(row, length, caches, states=states)

    def arrays(self) -> list[mx.array]:
        return arrays_of([vars(leaf) for leaf in (*self.rows.attention, *self.rows.states)])

    def replays(self, fed: int) -> bool:
        """Whether what was recorded of the newest block is enough to keep parts of it."""
        if self._recorder is None:
            return True
        recording = self._blocks[-1].recording
        assert recording is not None
        return recording.is_complete(self.rows.states, fed, answers=self.rows.count) and self._recorder.takes_rows(
            recording
        )

    def _restore(self, block: _Block) -> None:
        for state, arrays in zip(self.rows.states, block.states, strict=True):
            state.cache = list(arrays)


class SingleCaches(Mirrored):
    """See `TargetCaches`: mlx-lm's own caches of one answer, from which `rollback` takes what was rejected."""

    commits_on_host = True

    def __init__(self, caches: OwnCaches) -> None:
        self.caches, self._rollback = caches, caches.rollback
        self._fed: list[int] = []

    @mirrored
    def feed(
        self, model: Pass, tokens: mx.array, *, at: mx.array, room: int, tree: TreeShape | None = None
    ) -> tuple[mx.array, mx.array | None]:
        assert tree is None
        count = int(tokens.shape[1])
        with self._rollback.feeding(self.caches, tokens, revocable=count > 1):
            outputs = model(tokens, self.caches)
        self._fed.append(count)
        return outputs

    def keep_path(self, path: mx.array) -> None:
        raise AssertionError("models without rows take no trees")

    def tidy(self) -> None:
        """They always are."""

    @mirrored
    def commit(self, fed: int, kept: Sequence[int]) -> None:
        assert self._fed.pop(0) == fed
        self._rollback.commit(self.caches, fed=fed, keep=kept[0])

    @mirrored
    def give_back(self, row: int, length: int, caches: OwnCaches) -> None:
        assert caches is self.caches
        fed, self._fed = sum(self._fed), []
        undone = self._rollback.trim(self.caches, fed)
        assert undone, f"cannot take the last {fed} positions out of the caches"

    def arrays(self) -> list[mx.array]:
        return self.caches.arrays()


def works_with(
    model: nn.Module, layers: Sequence[nn.Module], vocab_size: int, make_cache: Callable[[], list[Any]]
) -> bool:
    """Whether a model of mlx-lm computes for two answers in one batch what it computes for each alone. Runs it.

    The two have different lengths and keep different parts of a block.
    """
    if not fits(make_cache()):
        return False
    tokens = np.random.default_rng(0).integers(0, vocab_size, (2, 12))
    contexts, block, more, kept = (tokens[:1, :5], tokens[1:, :3]), tokens[:, 5:9], tokens[:, 9:11], (2, 3)

    forward = Pass(lambda tokens, caches: (model(tokens, cache=caches), None))

    def alone(row: int) -> mx.array:
        caches = make_cache()
        model(mx.array(contexts[row]), cache=caches)
        fed = np.concatenate([block[row : row + 1, : kept[row]], more[row : row + 1]], axis=1)
        return mx.concatenate([model(mx.array(fed[:, i : i + 1]), cache=caches) for i in range(fed.shape[1])], axis=1)

    try:
        rows = []
        for context in contexts:
            caches = make_cache()
            model(mx.array(context), cache=caches)
            rows.append(Rows.of(caches, context.shape[1]))
        rows[0].add(1)
        rows[0].take_over(rows[1], [1])
        batch = BatchCaches(rows[0], layers)
        at = mx.array([context.shape[1] for context in contexts], dtype=mx.int32)
        logits, _ = batch.feed(forward, mx.array(block), at=at, room=16)
        if not batch.replays(block.shape[1]):
            return False
        batch.commit(block.shape[1], kept)
        further, _ = batch.feed(forward, mx.array(more), at=at + mx.array(kept), room=16)
        differences = []
        for row in range(2):
            expected = alone(row)
            found = mx.concatenate([logits[row : row + 1, : kept[row]], further[row : row + 1]], axis=1)
            differences.append(relative_difference(found, expected) / TOLERANCE[expected.dtype])
        # Not before: several machines have to make the same passes, whatever each of them finds.
        return all(difference <= 1 for difference in differences)
    except Exception:  # model code that wants a number for the length may fail in any way
        return False


def trees_work_with(
    model: nn.Module, layers: Sequence[nn.Module], vocab_size: int, make_cache: Callable[[], list[Any]]
) -> bool:
    """Whether a model of mlx-lm computes for the rows of a tree what it computes for each path by itself. Runs it."""
    ropes = find_ropes(model)
    if not fits(make_cache()) or not ropes:
        return False
    tokens = np.random.default_rng(0).integers(0, vocab_size, 12)
    context, block, more = tokens[None, :5], tokens[None, 5:10], tokens[None, 10:]
    # Two paths after the anchor: rows 1 and 2, and rows 3 and 4.
    visible = np.tril(np.ones((5, 5), dtype=bool))
    visible[3:, 1:3] = False
    path = [0, 3, 4]
    forward = Pass(lambda tokens, caches: (model(tokens, cache=caches), None), ropes=ropes)

    def alone(rows: Sequence[int], *, and_more: bool = False) -> mx.array:
        caches = make_cache()
        model(mx.array(context), cache=caches)
        fed = np.concatenate([block[:, list(rows)], *([more] if and_more else [])], axis=1)
        return mx.concatenate([model(mx.array(fed[:, i : i + 1]), cache=caches) for i in range(fed.shape[1])], axis=1)

    try:
        caches = make_cache()
        model(mx.array(context), cache=caches)
        batch = BatchCaches(Rows.of(caches, context.shape[1]), layers)
        at, shape = mx.array([context.shape[1]], dtype=mx.int32), (mx.array([0, 1, 2, 1, 2]), mx.array(visible))
        found, _ = batch.feed(forward, mx.array(block), at=at, room=16, tree=shape)
        batch.keep_path(mx.array(path))
        batch.commit(block.shape[1], [len(path)])
        further, _ = batch.feed(forward, mx.array(more), at=at + len(path), room=16)
        expected = [alone(range(3)), alone(path, and_more=True)]
        found = mx.concatenate([found[:, :3], found[:, :1], found[:, 3:], further], axis=1)
        return relative_difference(found, mx.concatenate(expected, axis=1)) <= TOLERANCE[found.dtype]
    except Exception:  # model code that wants a number for the offset may fail in any way
        return False
