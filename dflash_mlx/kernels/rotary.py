"""Rotary embeddings on a CPU: angles that all layers have in common are computed once.

On a CPU, MLX puts them together from some twenty operations, in every layer, for queries and keys: cosines and sines
of all positions first, then products. All layers of a pass are at the same positions, so here the first one computes
cosines and sines, and the others take them. The numbers are those of MLX's own formula (`mx.fast.rope`).

These take the place of MLX's module in single instances (`hooks.py`); for float32.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels.race import take_turns
from dflash_mlx.rounding import relative_difference

# It must be this much faster to be used, in so many layers of a pass over so many rows.
_GAIN, _TIMED = 1.2, 5
_LAYERS, _ROWS = 16, 16

# Of each kind of embedding, by its settings: where the newest pass is and over how many tokens, cosines and sines.
_newest: dict[tuple[int, float, float], tuple[int | mx.array, int, mx.array, mx.array]] = {}


def use_where_faster(models: Sequence[nn.Module]) -> None:
    """Have these models' rotary embeddings share their angles, if that is faster on this machine."""
    if not _is_faster():
        return
    for model in models:
        for module in model.modules():
            if type(module) is nn.RoPE and not module.traditional:
                module.__class__ = SharedRoPE


class SharedRoPE(nn.RoPE):
    """A rotary embedding that shares its angles with others of the same settings."""

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        """x: (B, heads, L, head_dim); offset: a number, or (B,)."""
        if x.ndim != 4 or x.dtype != mx.float32 or x.shape[-1] != self.dims:
            return super().__call__(x, offset=offset)
        half = self.dims // 2
        cosines, sines = _angles((self.dims, self.base, self.scale), offset, x.shape[2])
        return _rotated(x, mx.concatenate([x[..., half:], x[..., :half]], axis=-1), cosines, sines)


@mx.compile
def _rotated(x: mx.array, swapped: mx.array, cosines: mx.array, sines: mx.array) -> mx.array:
    return x * cosines + swapped * sines


def _angles(settings: tuple[int, float, float], offset: int | mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Cosines and sines for `count` positions from the offsets on, (B, 1, count, dims) or (1, 1, count, dims)."""
    newest = _newest.get(settings)
    if newest is not None and newest[1] == count and _is_same(newest[0], offset):
        return newest[2:]
    dims, base, scale = settings
    slowing = mx.log(mx.array(float(base))) / (dims // 2)
    starts = offset.reshape(-1, 1) if isinstance(offset, mx.array) else mx.array([[offset]])
    positions = (starts.astype(mx.float32) + mx.arange(count, dtype=mx.float32)) * scale
    angles = positions[:, None, :, None] * mx.exp(mx.arange(0, -(dims // 2), -1, dtype=mx.float32) * slowing)
    cosines, sines = mx.cos(angles), mx.sin(angles)
    found = mx.concatenate([cosines, cosines], axis=-1), mx.concatenate([-sines, sines], axis=-1)
    _newest[settings] = offset, count, *found
    return found


def _is_same(one: int | mx.array, other: int | mx.array) -> bool:
    """Whether two offsets are known to be alike: the same number, or the same array."""
    return one is other or (isinstance(one, int) and isinstance(other, int) and one == other)


def _is_faster() -> bool:
    """Whether it is right and faster, for a block of a small model."""
    queries = mx.random.normal((1, 8, _ROWS, 64), key=mx.random.key(0))
    ropes = {kind.__name__: kind(64) for kind in (nn.RoPE, SharedRoPE)}

    def turned(name: str) -> list[mx.array]:
        offset: Any = mx.array([1000])
        return [ropes[name](queries, offset=offset) for _ in range(_LAYERS)]

    def seconds(name: str) -> float:
        started = time.perf_counter()
        mx.eval(turned(name))
        return time.perf_counter() - started

    ordinary, own = ropes
    try:
        if relative_difference(turned(own)[0], turned(ordinary)[0]) > 1e-5:
            return False
        times = take_turns((ordinary, own), seconds, times=_TIMED)
    except (RuntimeError, ValueError):  # no compiler
        return False
    return statistics.median(times[own]) * _GAIN <= statistics.median(times[ordinary])
