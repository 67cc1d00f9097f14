"""Attention in plain MLX: what the kernels have to compute."""

import mlx.core as mx

from dflash_mlx.kernels.attention import Mask, as_array


def attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> mx.array:
    """queries (B, heads, L, D), keys and values (B, groups, S, D), masks as mlx-lm has them -> (B, heads, L, D).

    All is computed in float32 and rounded once, at the end, to the type of the queries. A row that sees nothing is 0.
    """
    rows = queries.shape[2]
    wide = queries.astype(mx.float32).reshape(len(queries), keys.shape[1], -1, *queries.shape[2:])
    scores = scale * wide @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2)
    seen = as_array(mask, rows, keys.shape[2])[:, None]
    weights = mx.where(seen, mx.exp(scores - mx.max(mx.where(seen, scores, -1e30), axis=-1, keepdims=True)), 0)
    total = mx.maximum(mx.sum(weights, axis=-1, keepdims=True), 1e-30)
    out = (weights / total) @ values.astype(mx.float32)[:, :, None]
    return out.reshape(queries.shape).astype(queries.dtype)
