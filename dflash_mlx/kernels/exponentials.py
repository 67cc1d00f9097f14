"""Attention and gated activations on a CPU, where MLX takes most of the time for exponentials.

MLX's exponential works on one number at a time on CPUs other than Apple's: 17 ns each, while a product or a sum takes
0.2 (2 cores, x86-64). In attention over some hundred positions, and in the feed-forward layers, that is half of all the
time. Here the exponential is put together from operations that are quick: `exp(x) = 2^n * exp(f)` with |f| < 0.35, a
polynomial for the second, to whose exponent n is added. It is nearer to the true value than MLX's own
(1.2e-7 instead of 3.8e-6 at the most, relative), and takes a seventh of the time.

Like the kernels for CUDA, these take the place of mlx-lm's functions in single layers (`hooks.renamed`); for float32.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu as ordinary_swiglu
from mlx_lm.models.base import scaled_dot_product_attention

from dflash_mlx.hooks import means, renamed
from dflash_mlx.kernels.attention import Mask, instead_of_ordinary
from dflash_mlx.kernels.race import take_turns
from dflash_mlx.rounding import relative_difference

# Added to a number below 2^22 in size, this leaves it rounded in the last bits of the sum.
_ROUND = 12582912.0
# ln 2 in two parts, so that n times the first is exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Of exp(f) = 1 + f + f^2 * (...), the highest power first (Cephes, expf).
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# Beyond this, exp(x) is no longer a normal number.
_MOST = 87.0
# What a score that is masked becomes.
_NEVER = -1e30
# Scores that are computed at once, so that they stay in the processor's cache, and the fewest rows then.
_AT_ONCE, _FEWEST_ROWS = 300_000, 16
# For fewer scores than this MLX's way, which has fewer steps, is faster.
_FEWEST = 12_000
# The functions must be this much faster to be used.
_GAIN, _TIMED = 1.2, 5


def exponential(x: mx.array) -> mx.array:
    """exp(x) of float32 numbers from -87 to 87."""
    shifted = x * 1.4426950408889634 + _ROUND
    n = shifted - _ROUND
    f = x - n * _LN2_HIGH - n * _LN2_LOW
    squared, (a, b, c, d, e, g) = f * f, _POLYNOMIAL
    # In pairs: MLX compiles what is not nested too deeply into one loop.
    p = (e * f + g) + squared * ((c * f + d) + squared * (a * f + b))
    # n is added to the exponent of a number between 0.7 and 1.42.
    bits = mx.view((f + 1.0) + squared * p, mx.int32) + (mx.view(shifted, mx.int32) << 23)
    return mx.view(bits, mx.float32)


@mx.compile
def _gated(gate: mx.array, x: mx.array) -> mx.array:
    return x * gate / (1.0 + exponential(mx.clip(-gate, -_MOST, _MOST)))


@mx.compile
def _weights(scores: mx.array, highest: mx.array) -> mx.array:
    return exponential(mx.maximum(scores - highest, -_MOST))


def log_sum(scores: mx.array) -> mx.array:
    """The logarithm of the sum of each row's exponentials: scores (..., V), float32 -> (..., 1)."""
    highest = mx.max(scores, axis=-1, keepdims=True)
    return highest + mx.log(mx.sum(_weights(scores, highest), axis=-1, keepdims=True))


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """mlx-lm's `swiglu`: silu(gate) * x."""
    if gate.dtype != mx.float32 or x.dtype != mx.float32:
        return ordinary_swiglu(gate, x)
    return _gated(gate, x)


@instead_of_ordinary
def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> mx.array | None:
    """mlx-lm's `scaled_dot_product_attention`; queries (B, heads, L, head_dim)."""
    if not _fits(queries, keys, values, mask):
        return None
    batch, heads, rows, _ = queries.shape
    length = keys.shape[2]
    step = max(_FEWEST_ROWS, _AT_ONCE // (batch * heads * length))
    parts = []
    for first in range(0, rows, step):
        part = queries[:, :, first : first + step]
        end = first + part.shape[2]
        # What none of these rows sees is left out.
        seen = length - rows + end if isinstance(mask, str) else length
        bias = _bias(mask if mask is None or isinstance(mask, str) else _rows_of(mask, first, end), part.shape[2], seen)
        parts.append(_attend(part, keys[:, :, :seen], values[:, :, :seen], scale, bias))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _fits(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> bool:
    batch, heads, rows, _ = queries.shape
    return (
        batch * heads * rows * keys.shape[2] >= _FEWEST
        and queries.dtype == keys.dtype == values.dtype == mx.float32
        and heads % keys.shape[1] == 0
        and (mask == "causal" if isinstance(mask, str) else mask is None or _is_for_all_heads(mask))
    )


def _is_for_all_heads(mask: mx.array) -> bool:
    return mask.dtype == mx.bool_ and (mask.ndim == 2 or (mask.ndim == 4 and mask.shape[1] == 1))


def _rows_of(mask: mx.array, first: int, end: int) -> mx.array:
    return mask if mask.shape[-2] == 1 else mask[..., first:end, :]


def _bias(mask: mx.array | str | None, rows: int, length: int) -> mx.array | None:
    """What is added to scores (B, heads of keys, queries of each, L, length), so that only what a row sees counts."""
    if mask is None:
        return None
    if isinstance(mask, str):
        mask = mx.arange(length) <= mx.arange(length - rows, length)[:, None]
    bias = mx.where(mask, 0.0, _NEVER)
    return bias[:, :, None] if bias.ndim == 4 else bias


def _attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float, bias: mx.array | None) -> mx.array:
    batch, heads, rows, head_dim = queries.shape
    kv_heads = keys.shape[1]
    # The query heads of a key head are rows of one product.
    scores = (queries * scale).reshape(batch, kv_heads, -1, head_dim) @ keys.swapaxes(-1, -2)
    if bias is not None:
        by_head = scores.reshape(batch, kv_heads, heads // kv_heads, rows, -1)
        scores = (by_head + bias).reshape(scores.shape)
    weights = _weights(scores, mx.max(scores, axis=-1, keepdims=True))
    out = (weights @ values) / mx.sum(weights, axis=-1, keepdims=True)
    return out.reshape(batch, heads, rows, -1)


# What takes the place of which of mlx-lm's functions, by the name under which its layers know it.
_FUNCTIONS: dict[str, tuple[Callable[..., mx.array], Callable[..., mx.array]]] = {
    "scaled_dot_product_attention": (scaled_dot_product_attention, attend),
    "swiglu": (ordinary_swiglu, swiglu),
}


def use_where_faster(models: Sequence[nn.Module]) -> bool:
    """Have layers of these models that call mlx-lm's functions call those here, if they are faster on this machine.

    Returns whether they are.
    """
    if not _is_faster():
        return False
    for model in models:
        for layer in model.modules():
            for name, (ordinary, own) in _FUNCTIONS.items():
                kind: Any = type(layer)
                if means(kind, name, ordinary):
                    layer.__class__ = renamed(kind, name, own)
    return True


def _is_faster() -> bool:
    """Whether they are right and faster, at the size of a block of a small model."""
    gate = mx.random.normal((16, 1536), key=mx.random.key(0))

    def seconds(function: Callable[[mx.array, mx.array], mx.array]) -> float:
        started = time.perf_counter()
        mx.eval(function(gate, gate))
        return time.perf_counter() - started

    try:
        if relative_difference(swiglu(gate, gate), ordinary_swiglu(gate, gate)) > 1e-5:
            return False
        times = take_turns((ordinary_swiglu, swiglu), seconds, times=_TIMED)
    except (RuntimeError, ValueError):  # no compiler
        return False
    return statistics.median(times[swiglu]) * _GAIN <= statistics.median(times[ordinary_swiglu])
