"""Attention of a few rows over a cache in CUDA kernels, on the matrix units.

Keys and values are read where they lie in the cache, once for 16 rows of the query heads that share them. A launch
takes the computer some 12 microseconds; what MLX strings together for more than three rows, or for a mask, takes 45.
Numbers are multiplied as they are, and added in float32; weights are split in two, so that nothing of them is lost.
"""

from functools import cache
from typing import Any

import mlx.core as mx

from dflash_mlx.kernels.attention import Mask
from dflash_mlx.kernels.cuda_modules import cuda_kernel
from dflash_mlx.kernels.rows_attention.masks import KINDS, settings_and_mask

# Threads of a block: of more, each would have too few registers. They compute so many rows of query heads.
_THREADS, _ROWS = 256, 16
# Positions that the warps of a block look at in turn, 32 each of small heads, 16 of larger ones.
POSITIONS = _THREADS // 32 * 32
# Positions for which a block notes at once what its rows see; and those that it has where there are blocks for parts.
_NOTED, IN_A_PART = 32 * POSITIONS, 2 * POSITIONS
_MOST_HEAD_DIM = 256


def made_for(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernels compute with such heads, of any numbers of rows and keys."""
    heads, head_dim = queries.shape[1], queries.shape[3]
    return (
        head_dim % 16 == 0
        and head_dim <= _MOST_HEAD_DIM
        and keys.shape == values.shape
        and keys.shape[3] == head_dim
        and heads % keys.shape[1] == 0
        and queries.dtype == keys.dtype == values.dtype
        and queries.dtype in (mx.float16, mx.bfloat16)
    )


def attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> mx.array:
    """queries (B, heads, L, D), keys and values (B, groups, S, D) that it was `made_for`, like twin.py; in one launch.

    mask: None, "causal", or boolean, (B, 1, L, S). What comes out for a row depends neither on other rows nor on keys
    that it does not see after those that it does, if those are numbers at all.
    """
    return _over(queries, keys, values, scale, mask, parts=0).transpose(0, 2, 1, 3)


def attention_in_parts(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> mx.array:
    """The same in two launches: a block has a part of the positions, so that a long context occupies the whole GPU."""
    batch, heads, rows, head_dim = queries.shape
    parts = -(-keys.shape[2] // IN_A_PART)
    (out,) = _putting_together()(
        inputs=[_over(queries, keys, values, scale, mask, parts=parts)],
        template=[("T", queries.dtype), ("D", head_dim)],
        grid=(rows * heads * head_dim, batch, 1),
        threadgroup=(head_dim, 1, 1),
        output_shapes=[(batch, rows, heads, head_dim)],
        output_dtypes=[queries.dtype],
    )
    return out.transpose(0, 2, 1, 3)


def _over(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask, *, parts: int) -> mx.array:
    """(B, L, heads, D); or what so many `parts` bring, float32 (B, parts, L * heads, D + 2)."""
    batch, heads, rows, head_dim = queries.shape
    groups = keys.shape[1]
    tiles = -(-(rows * heads // groups) // _ROWS)
    gives = mx.float32 if parts else queries.dtype
    constants = [("THREADS", _THREADS), ("IN_PARTS", parts > 0), ("PART", IN_A_PART if parts else _NOTED), *KINDS]
    (out,) = _kernel()(
        inputs=[queries, keys, values, *settings_and_mask(scale, mask)],
        template=[
            ("T", queries.dtype),
            ("OUT", gives),
            ("BRAIN", queries.dtype == mx.bfloat16),
            ("D", head_dim),
            *constants,
        ],
        grid=(tiles * _THREADS, groups, batch * (parts or 1)),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(batch, parts, rows * heads, head_dim + 2) if parts else (batch, rows, heads, head_dim)],
        output_dtypes=[gives],
    )
    return out


@cache
def _kernel() -> Any:
    return cuda_kernel(
        name="dflash_attention_on_matrix_units",
        input_names=["q", "k", "v", "settings", "mask"],
        output_names=["out"],
        file="rows_attention/on_matrix_units.cu",
        header="matrix_units.cu",
        # Keys and values are parts of larger arrays; a copy of them would cost more than the product.
        ensure_row_contiguous=False,
    )


@cache
def _putting_together() -> Any:
    return cuda_kernel(
        name="dflash_attention_put_together",
        input_names=["parts"],
        output_names=["out"],
        file="rows_attention/put_together.cu",
    )
