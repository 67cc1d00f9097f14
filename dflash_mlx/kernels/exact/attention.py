"""Attention whose rows come out the same, bit for bit, whatever else is computed and however much room caches have.

Queries are computed in blocks of up to 16 rows and against 256 positions at a time, which begin at multiples of 256.
The parts are put together in the order of the positions (as in FlashAttention, arXiv 2205.14135). So every product has
the same shape. Positions that a row does not see weigh exactly 0, so further ones change nothing. All is in float32.

On a GPU kernels take less launches (rows_attention/). What those that are used give a row does not depend on others
either.

Like the other ways to compute attention, it takes the place of mlx-lm's function in single layers (`hooks.renamed`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial, reduce
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import RotatingKVCache

from dflash_mlx.caches.row_layers import RowKVCache, TreePass
from dflash_mlx.caches.trimming import newest
from dflash_mlx.kernels.attention import Mask, as_array
from dflash_mlx.kernels.exact.blocks import MOVED, SIZES, Agreement, compare_sizes, in_blocks, largest_difference
from dflash_mlx.kernels.rows_attention.layers import Rival

_POSITIONS = 256
# Rows of a block: the numbers that are tried. Of one row the place cannot count.
ROWS = (16, 8, 4, 2, 1)
# What a score that is masked becomes.
_NEVER = -1e30


class Blocks(NamedTuple):
    """How many rows a block has, and how many blocks can be computed at once (`compare_attention`)."""

    rows: int
    at_once: tuple[int, ...]


@cache
def attention_in(blocks: Blocks, *, kernels: tuple[Rival, ...] = ()) -> Callable[..., mx.array]:
    """mlx-lm's `scaled_dot_product_attention` in such blocks, or by the first of the kernels that was made for it."""

    def attend(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
    ) -> mx.array:
        keys, values, start = _in_order(keys, values, cache, queries.shape[2])
        seen = as_array(mask, queries.shape[2], keys.shape[2])
        seen = mx.broadcast_to(seen, (queries.shape[0], 1, queries.shape[2], keys.shape[2]))
        tree = cache.lengths.tree if isinstance(cache, RowKVCache) else None
        kernel = next((one for one in kernels if one.made_for(queries, keys, values)), None)
        if kernel is not None and sinks is None:
            return _by_kernel(kernel, queries, keys, values, seen, scale, start, tree)
        keys, values, seen = _filled(keys, values, seen, start % _POSITIONS, 0)
        scaled = queries.astype(mx.float32) * scale
        parts = [_of_sinks(sinks, queries.shape, values.shape[3])] if sinks is not None else []
        parts += (
            _over(scaled, keys, values, seen, blocks)
            if tree is None
            else _over_paths(scaled, keys, values, seen, tree.order, cache.lengths.value, blocks)
        )
        _, total, out = reduce(_together, parts)
        return (out / total).astype(queries.dtype)

    return attend


def _in_order(keys: mx.array, values: mx.array, cache: Any, rows: int) -> tuple[mx.array, mx.array, int]:
    """Keys and values in the order of their positions, and the first one's position."""
    if not isinstance(cache, RotatingKVCache):
        return keys, values, 0
    if rows == 1:
        keys, values = newest(cache, keys), newest(cache, values)
    return keys, values, int(cache.offset) - keys.shape[2]


def _filled(
    keys: mx.array, values: mx.array, seen: mx.array, before: int, after: int
) -> tuple[mx.array, mx.array, mx.array]:
    """The same with further positions before and after, which no row sees."""
    if before == after == 0:
        return keys, values, seen
    keys, values = (mx.pad(array, [(0, 0), (0, 0), (before, after), (0, 0)]) for array in (keys, values))
    return keys, values, mx.pad(seen, [(0, 0), (0, 0), (0, 0), (before, after)])


def _by_kernel(
    kernel: Rival,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    seen: mx.array,
    scale: float,
    start: int,
    tree: TreePass | None,
) -> mx.array:
    """Attention by a kernel, whose parts begin at multiples of their size."""
    keys, values, seen = _filled(keys, values, seen, start % kernel.part, 0)
    if tree is None:
        return kernel.attention(queries, keys, values, scale, seen)
    queries, keys, values, seen = _along_paths(queries, keys, values, seen, tree.order)
    return kernel.attention(queries, keys, values, scale, seen).transpose(2, 1, 0, 3)


def _over(
    queries: mx.array, keys: mx.array, values: mx.array, seen: mx.array, blocks: Blocks
) -> Iterator[list[mx.array]]:
    """What `_tile` gives for each 256 of the positions, for queries (B, heads, L, head_dim), as (B, heads, L, ...)."""
    batch, heads, rows, _ = queries.shape
    keys, values, seen = _filled(keys, values, seen, 0, -keys.shape[2] % _POSITIONS)
    count = -(-rows // blocks.rows)
    tiles = _in_tiles(queries, keys.shape[1], count, blocks.rows)
    missing = count * blocks.rows - rows
    seen = mx.pad(seen, [(0, 0), (0, 0), (0, missing), (0, 0)]).reshape(batch * count, blocks.rows, -1)
    answers = mx.repeat(mx.arange(batch), count)
    for first in range(0, keys.shape[2], _POSITIONS):
        end = first + _POSITIONS
        tile = partial(_tile_of, keys[:, :, first:end], values[:, :, first:end])
        part = in_blocks(tile, [answers, tiles, seen[:, :, first:end]], blocks.at_once)
        by_head = [array.reshape(batch, count, heads, blocks.rows, -1).swapaxes(1, 2) for array in part]
        yield [array.reshape(batch, heads, count * blocks.rows, -1)[:, :, :rows] for array in by_head]


def _over_paths(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    seen: mx.array,
    order: mx.array,
    length: mx.array,
    blocks: Blocks,
) -> Iterator[list[mx.array]]:
    """The same for the rows of a tree, which share the keys of whole parts that come before it.

    order: of the tree's pass, (R, S). length: so many positions come before the tree, (1,).
    """
    [before] = np.array(length).tolist()
    common = before // _POSITIONS * _POSITIONS
    # Where the context's first positions are is the same for all rows.
    first = order[0, :common]
    shared = mx.take(keys, first, axis=2), mx.take(values, first, axis=2), mx.take(seen, first, axis=-1)
    yield from _over(queries, *shared, blocks)
    for part in _over(*_along_paths(queries, keys, values, seen, order[:, common:]), blocks):
        yield [array.transpose(2, 1, 0, 3) for array in part]


def _along_paths(
    queries: mx.array, keys: mx.array, values: mx.array, seen: mx.array, order: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The rows of a tree as answers of one row each, with the keys at these places (R, S) in this order.

    So a row's keys lie where they would if the answer had taken its path.
    """
    keys, values = (mx.take(array[0], order, axis=1).swapaxes(0, 1) for array in (keys, values))
    seen = mx.take_along_axis(seen[0, 0], order, axis=-1)[:, None, None]
    return queries.transpose(2, 1, 0, 3), keys, values, seen


def _in_tiles(queries: mx.array, groups: int, count: int, rows: int) -> mx.array:
    """(B, heads, L, head_dim) -> blocks of rows, (B * count, key heads, query heads of each * rows, head_dim)."""
    batch, _, given, head_dim = queries.shape
    whole = mx.pad(queries, [(0, 0), (0, 0), (0, count * rows - given), (0, 0)])
    by_block = whole.reshape(batch, groups, -1, count, rows, head_dim).transpose(0, 3, 1, 2, 4, 5)
    return by_block.reshape(batch * count, groups, -1, head_dim)


def _tile_of(keys: mx.array, values: mx.array, answers: mx.array, queries: mx.array, seen: mx.array) -> list[mx.array]:
    """`_tile` for blocks of rows of some answers (T,), with the keys and values of all."""
    return _tile(queries, keys[answers].astype(mx.float32), values[answers].astype(mx.float32), seen)


def _tile(queries: mx.array, keys: mx.array, values: mx.array, seen: mx.array) -> list[mx.array]:
    """Blocks of rows over 256 positions: the highest score, the sum of the weights and the weighted sum of the values.

    queries (T, key heads, G * rows, head_dim), keys and values (T, key heads, 256, head_dim), seen (T, rows, 256).
    """
    scores = queries @ keys.swapaxes(-1, -2)
    by_row = scores.reshape(*scores.shape[:2], -1, *seen.shape[1:])
    scores = mx.where(seen[:, None, None], by_row, _NEVER).reshape(scores.shape)
    highest = mx.max(scores, axis=-1, keepdims=True)
    weights = mx.exp(scores - highest)
    return [highest, mx.sum(weights, axis=-1, keepdims=True), weights @ values]


def _together(one: Sequence[mx.array], other: Sequence[mx.array]) -> list[mx.array]:
    """Two results of `_tile` for the same rows, over other positions."""
    highest = mx.maximum(one[0], other[0])
    of_one, of_other = mx.exp(one[0] - highest), mx.exp(other[0] - highest)
    return [highest, *(mine * of_one + theirs * of_other for mine, theirs in zip(one[1:], other[1:], strict=True))]


def _of_sinks(sinks: mx.array, queries: Sequence[int], value_dim: int) -> list[mx.array]:
    """Scores of each head (heads,) that belong to no position, as a part for queries of this shape."""
    batch, heads, rows, _ = queries
    scores = mx.broadcast_to(sinks.astype(mx.float32)[None, :, None, None], (batch, heads, rows, 1))
    return [scores, mx.ones_like(scores), mx.zeros((batch, heads, rows, value_dim))]


def compare_attention(heads: int, groups: int, head_dim: int, value_dim: int, *, rows: int) -> tuple[Agreement, float]:
    """How many blocks of so many rows can be computed at once, and how much a row's place in its block changes."""
    rng, count = np.random.default_rng(0), max(SIZES)
    queries, keys, values = (
        mx.array(rng.standard_normal((count, groups, *shape), dtype=np.float32))
        for shape in ((heads // groups * rows, head_dim), (_POSITIONS, head_dim), (_POSITIONS, value_dim))
    )
    seen = mx.array(rng.random((count, rows, _POSITIONS)) < 0.7)
    agreement = compare_sizes(_tile, [queries, keys, values, seen], base=1)
    moved = mx.array([(row + MOVED) % rows for row in range(rows)])

    def elsewhere(array: mx.array) -> mx.array:
        """The same with the rows of each block at other places."""
        by_row = array.reshape(*array.shape[:-2], -1, rows, array.shape[-1])
        return mx.take(by_row, moved, axis=-2).reshape(array.shape)

    def tiles(*arrays: mx.array) -> Sequence[mx.array]:
        return in_blocks(_tile, arrays, agreement.sizes)

    expected = [elsewhere(array) for array in tiles(queries, keys, values, seen)]
    found = tiles(elsewhere(queries), keys, values, elsewhere(seen))
    return agreement, max(largest_difference(*pair) for pair in zip(found, expected, strict=True))
