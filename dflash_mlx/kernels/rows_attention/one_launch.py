"""Attention of a few rows over a cache in one CUDA kernel: the fewest launches, for short contexts.

MLX computes the attention of up to three rows in one launch. A round has more, and a tree's rows have a mask of their
own: for those MLX strings together products, a selection and a softmax, which take the computer some 45 microseconds a
layer. Here they are one launch, too (12 microseconds), over keys and values where they lie in the cache, and in float32
throughout, like MLX's kernel for a single row. Keys are read for each head and every two rows, so it pays for contexts
that are not too long.
"""

from functools import cache
from typing import Any

import mlx.core as mx

from dflash_mlx.kernels.attention import Mask
from dflash_mlx.kernels.cuda_modules import cuda_kernel
from dflash_mlx.kernels.rows_attention.masks import KINDS, settings_and_mask

# The kernel keeps a number for each key of a part in the GPU's shared memory, 8 KB for a row. It computes any number of
# parts, one after the other.
MOST_KEYS = 2048
# Threads of a block, and keys that each of them asks memory for at once.
_THREADS, _AT_ONCE = 512, 4
_CONSTANTS = [("THREADS", _THREADS), ("AT_ONCE", _AT_ONCE), ("MOST_KEYS", MOST_KEYS), *KINDS]
# A block computes two rows, with keys that are read once for both, where a GPU still has so many blocks to compute.
_ENOUGH_BLOCKS = 64


def made_for(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernel computes with such heads, of any numbers of rows and keys."""
    heads, head_dim = queries.shape[1], queries.shape[3]
    return (
        # A power of two, of which a warp of 32 threads holds at least one.
        16 <= head_dim <= 256
        and head_dim & (head_dim - 1) == 0
        and keys.shape == values.shape
        and keys.shape[3] == head_dim
        and heads % keys.shape[1] == 0
        and queries.dtype == keys.dtype == values.dtype
    )


def attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> mx.array:
    """queries (B, heads, L, D), keys and values (B, groups, S, D) that it was `made_for`, like twin.py.

    mask: None, "causal", or boolean, (B, 1, L, S). What comes out for a row depends neither on other rows nor on keys
    that it does not see after those that it does.
    """
    batch, heads, rows, head_dim = queries.shape
    together = 2 if batch * heads * (rows // 2) >= _ENOUGH_BLOCKS else 1
    (out,) = _kernel()(
        inputs=[queries, keys, values, *settings_and_mask(scale, mask)],
        template=[("T", queries.dtype), ("D", head_dim), ("ROWS", together), *_CONSTANTS],
        grid=(heads * _THREADS, -(-rows // together), batch),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(batch, rows, heads, head_dim)],
        output_dtypes=[queries.dtype],
    )
    return out.transpose(0, 2, 1, 3)


@cache
def _kernel() -> Any:
    return cuda_kernel(
        name="dflash_few_rows_attention",
        input_names=["q", "k", "v", "settings", "mask"],
        output_names=["out"],
        file="rows_attention/one_launch.cu",
        # Keys and values are parts of larger arrays; a copy of them would cost more than the product.
        ensure_row_contiguous=False,
    )
