"""Feeding a tree of tokens to a model of mlx-lm in one forward, its code as it is.

A row of a tree sees the cached positions, the rows that it continues and itself, and its position is that of its depth.
The first is a mask, which model code takes from its cache. The second is the cache's `offset`, here an array with a
position for each row, and rotary embeddings have to take it: a hook on their instances (`hooks.py`) for the length of
one forward. Recurrent layers are in tree_recurrence.py. Which models compute the same that way is found out by running
them (`target_caches.trees_work_with`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.caches.row_layers import RowLengths, TreePass
from dflash_mlx.caches.rows import Rows
from dflash_mlx.hooks import subclassed
from dflash_mlx.tree_steps import TreeSteps

# Of a tree's rows, the anchor first: how far each is from it, (N + 1,), and which rows each sees, (N + 1, N + 1).
TreeShape = Sequence[mx.array]


def find_ropes(model: nn.Module) -> list[nn.Module]:
    """Every rotary embedding in a model, whatever its kind is called."""
    return [module for module in model.modules() if "rope" in type(module).__name__.lower()]


@contextmanager
def branched(
    ropes: Sequence[nn.Module], rows: Rows, depths: mx.array, visible: mx.array, steps: TreeSteps | None = None
) -> Iterator[None]:
    """For one forward over the rows of a tree, (1, R) tokens, the root first, of the model with these `find_ropes`.

    depths: of all rows of the tree so far, (S,), counted from the root; visible: which of them each one of the newest R
    sees, boolean (R, S). R is S unless earlier forwards were fed the others. Their keys and values are written after
    the length in this order or, with `steps`, where positions are out of order, all of them at the first free places.
    """
    lengths = rows.lengths
    assert rows.count == 1
    if steps is None:
        lengths.tree = _after_length(lengths, depths, visible)
    else:
        assert lengths.placed is not None
        lengths.tree = TreePass(*steps.place(lengths.placed[: lengths.seen], lengths.value, depths, visible))
    try:
        with subclassed(ropes, _by_row):
            yield
    finally:
        lengths.tree = None


def _after_length(lengths: RowLengths, depths: mx.array, visible: mx.array) -> TreePass:
    (count, so_far), seen = visible.shape, mx.arange(lengths.seen)
    start = lengths.value - (so_far - count)
    row, row_positions = seen - start, start + depths
    # Of each place, which row of the tree is there, below 0 where none is.
    row = mx.where(row < so_far, row, -1)
    index = mx.maximum(row, 0)
    mask = mx.where(row < 0, seen < start, mx.take(visible, index, axis=1))
    positions = mx.where(row < 0, seen, row_positions[index])
    return TreePass(row_positions[so_far - count :], mask, positions)


def keep_path(rows: Rows, path: mx.array, steps: TreeSteps) -> None:
    """Of the tree that the rows were fed last, let the rows of `path`, (D + 1,), be the next positions."""
    lengths = rows.lengths
    assert lengths.placed is not None
    assert lengths.places is not None
    lengths.placed = steps.keep(lengths.placed, lengths.value, lengths.places, path)


@cache
def _by_row(kind: type[nn.Module]) -> type[nn.Module]:
    """A rotary embedding that also takes a position for each row."""

    def call(self: nn.Module, x: mx.array, offset: int | mx.array = 0, **kwargs: Any) -> mx.array:
        """x: (1, heads, L, head_dim); offset: a number, or (L,)."""
        if not isinstance(offset, mx.array) or offset.ndim == 0:
            return kind.__call__(self, x, offset=offset, **kwargs)
        # MLX takes a position for each item of a batch, so the rows become one.
        rotated: mx.array = kind.__call__(self, x.transpose(2, 1, 0, 3), offset=offset, **kwargs)
        return rotated.transpose(2, 1, 0, 3)

    return type(f"ByRow{kind.__name__}", (kind,), {"__call__": call})
