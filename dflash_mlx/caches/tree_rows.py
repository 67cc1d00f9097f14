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

from dflash_mlx.caches.rows import Rows
from dflash_mlx.hooks import subclassed

# Of a tree's rows, the anchor first: how far each is from it, (N + 1,), and which rows each sees, (N + 1, N + 1).
TreeShape = Sequence[mx.array]


def find_ropes(model: nn.Module) -> list[nn.Module]:
    """Every rotary embedding in a model, whatever its kind is called."""
    return [module for module in model.modules() if "rope" in type(module).__name__.lower()]


@contextmanager
def branched(ropes: Sequence[nn.Module], rows: Rows, depths: mx.array, visible: mx.array) -> Iterator[None]:
    """For one forward over the rows of a tree, (1, R) tokens, the root first, of the model with these `find_ropes`.

    depths: of all rows of the tree so far, (S,), counted from the root; visible: which of them each one of the newest R
    sees, boolean (R, S). R is S unless earlier forwards were fed the others. Their keys and values are written after
    the length in this order; `keep_path` then writes one path there.
    """
    assert rows.count == 1
    lengths, (count, so_far) = rows.lengths, visible.shape
    start = lengths.value - (so_far - count)
    # Of each position, which row of the tree it is: below 0 for the context.
    row = mx.arange(lengths.seen) - start
    index = mx.clip(row, 0, so_far - 1)
    own = mx.take(visible, index, axis=1)
    mask = mx.where(row < 0, True, own & (row < so_far))
    row_positions = start + depths
    positions = mx.where(row < 0, mx.arange(lengths.seen), row_positions[index])
    lengths.tree = row_positions[so_far - count :], mask, positions
    try:
        with subclassed(ropes, _by_row):
            yield
    finally:
        lengths.tree = None


def put_fed(rows: Rows, fed: Sequence[mx.array]) -> None:
    """Set what `take_fed` returns."""
    for leaf, keys, values in zip(rows.attention, fed[::2], fed[1::2], strict=True):
        leaf.fed = keys, values


def take_fed(rows: Rows) -> list[mx.array]:
    """The keys and values of a tree's rows, layer by layer, for `keep_path`; no reference to them stays in `rows`."""
    fed: list[mx.array] = []
    for leaf in rows.attention:
        assert leaf.fed is not None
        fed += leaf.fed
        leaf.fed = None
    return fed


def keep_path(rows: Rows, path: mx.array, fed: Sequence[mx.array]) -> None:
    """Write the rows of `path`, (D + 1,), of what was `fed` after the lengths, where they would be as a chain.

    They come from what was fed and not from the buffers: MLX copies a whole array that is written while a read of it is
    on its way. All rows are written, those off the path to the last place of the tree, which counts no more: to pick
    the path's first would be twice as many operations, and this takes two for each layer.
    """
    fed_rows = fed[0].shape[2]
    found = path[:, None] == mx.arange(fed_rows)
    places = mx.where(found.any(axis=0), found.argmax(axis=0), fed_rows - 1)
    index = (rows.lengths.value + places)[None, None, :, None]
    for leaf, keys, values in zip(rows.attention, fed[::2], fed[1::2], strict=True):
        leaf.write_at(index, keys, values)


@cache
def _by_row(kind: type[nn.Module]) -> type[nn.Module]:
    """A rotary embedding that also takes a position for each row."""

    def call(self: nn.Module, x: mx.array, offset: int | mx.array = 0, **kwargs: Any) -> mx.array:
        """x: (1, heads, L, head_dim); offset: a number, or (L,)."""
        if not isinstance(offset, mx.array) or offset.ndim == 0:
            return kind.__call__(self, x, offset=offset, **kwargs)
        # MLX takes a position for each item of a batch, so the rows become one.
        return kind.__call__(self, x.transpose(2, 1, 0, 3), offset=offset, **kwargs).transpose(2, 1, 0, 3)

    return type(f"ByRow{kind.__name__}", (kind,), {"__call__": call})
