"""Feeding a tree of tokens to a model of mlx-lm in one forward, its code as it is.

A row of a tree sees the cached positions, the rows that it continues and itself, and its position is that of its depth.
The first is a mask, which model code takes from its cache. The second is the cache's `offset`, here an array with a
position for each row, and rotary embeddings have to take it: their instances get a subclass of their own class for the
length of one forward, as taps do. Which models compute the same that way is found out by running them (`works_with`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from dflash_mlx.targets.rounding import TOLERANCE, relative_difference


def find_ropes(model: nn.Module) -> list[nn.Module]:
    """Every rotary embedding in a model, whatever its kind is called."""
    return [module for module in model.modules() if "rope" in type(module).__name__.lower()]


class BranchedCache:
    """One layer's KVCache for a forward over the rows of a tree behind its `base` positions."""

    def __init__(self, inner: KVCache, positions: mx.array, mask: mx.array) -> None:
        self.inner, self.offset, self._mask = inner, positions, mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self.inner.update_and_fetch(keys, values)

    def make_mask(self, rows: int, *, window_size: int | None = None, return_array: bool = False) -> mx.array:
        """Boolean (rows, base + rows). A window counts positions, of which rows of one depth share one."""
        if window_size is None:
            return self._mask
        base = self._mask.shape[1] - rows
        positions = mx.concatenate([mx.arange(base), self.offset])
        return self._mask & (positions[None] > self.offset[:, None] - window_size)


@contextmanager
def branched(
    ropes: Sequence[nn.Module], caches: Sequence[KVCache], depths: list[int], visible: np.ndarray
) -> Iterator[list[BranchedCache]]:
    """Caches for one forward over a tree, (1, N + 1) tokens, the anchor first, of the model with these `find_ropes`.

    depths: of each row, (N + 1,), behind the anchor; visible: which rows each row sees, boolean (N + 1, N + 1). The
    rows' keys and values go into `caches` in the order of the rows; `keep_path` then leaves one path there.
    """
    base = caches[0].offset
    positions = mx.array(depths, dtype=mx.int32) + base
    mask = mx.concatenate([mx.ones((len(depths), base), dtype=mx.bool_), mx.array(visible)], axis=1)
    kinds = [type(rope) for rope in ropes]
    try:
        for rope, kind in zip(ropes, kinds, strict=True):
            rope.__class__ = _by_row(kind)
        yield [BranchedCache(layer_cache, positions, mask) for layer_cache in caches]
    finally:
        for rope, kind in zip(ropes, kinds, strict=True):
            rope.__class__ = kind


def keep_path(caches: Sequence[KVCache], base: int, path: Sequence[int]) -> None:
    """Move the rows of `path`, in rising order, to the front of what was fed behind `base` positions.

    They are read before any is written: MLX copies a whole array that is written while a read of it is on its way.
    """
    first = next((i for i, row in enumerate(path) if row != i), None)
    if first is None:
        return
    rows = mx.array(list(path[first:])) + base
    arrays = [array for layer_cache in caches for array in (layer_cache.keys, layer_cache.values) if array is not None]
    moved = [mx.take(array, rows, axis=-2) for array in arrays]
    mx.eval(moved)
    for array, part in zip(arrays, moved, strict=True):
        array[..., base + first : base + len(path), :] = part


def works_with(model: nn.Module, vocab_size: int, make_cache: Callable[[], list[Any]]) -> bool:
    """Whether a model of mlx-lm computes for the rows of a tree what it computes for each path by itself. Runs it."""
    caches = make_cache()
    ropes = find_ropes(model)
    if not caches or any(type(layer_cache) is not KVCache for layer_cache in caches) or not ropes:
        return False
    tokens = np.random.default_rng(0).integers(0, vocab_size, 11)
    context, rows, more = tokens[None, :5], tokens[None, 5:10], mx.array(tokens[None, 10:])
    # Two paths behind the anchor: rows 1 and 2, and rows 3 and 4.
    visible = np.tril(np.ones((5, 5), dtype=bool))
    visible[3:, 1:3] = False
    path = [0, 3, 4]
    try:
        model(mx.array(context), cache=caches)
        with branched(ropes, caches, [0, 1, 2, 1, 2], visible) as tree_caches:
            found = model(mx.array(rows), cache=tree_caches)
        keep_path(caches, 5, path)
        for layer_cache in caches:
            layer_cache.trim(5 - len(path))
        found = mx.concatenate([found, model(more, cache=caches)], axis=1)
        expected = []
        for chain in (rows[:, :3], rows[:, path]):
            fresh = make_cache()
            model(mx.array(context), cache=fresh)
            expected.append(model(mx.array(chain), cache=fresh))
        expected = [expected[0], expected[1][:, 1:], model(more, cache=fresh)]
        return relative_difference(found, mx.concatenate(expected, axis=1)) <= TOLERANCE[found.dtype]
    except Exception:  # model code that wants a number for the offset may fail in any way
        return False


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
