"""Launching the two passes of attention of a few rows over a cache (Metal), and what they were made for."""

from functools import cache
from typing import Any

import mlx.core as mx

from dflash_mlx.kernels.attention import Mask, as_array
from dflash_mlx.kernels.rows_attention.masks import KINDS, settings_and_mask
from dflash_mlx.kernels.sources import source

# Rows of each sequence at once: what is computed of them for each part of the cache takes memory.
MOST_ROWS = 64
# A threadgroup computes a part of the cache of this many positions. The parts are the same for any number of rows, so
# a row's numbers are, too.
POSITIONS = 256
HEAD_DIMS = (64, 80, 96, 128, 256)
# Rows of query heads that a simdgroup computes, and the most simdgroups of a threadgroup. Their sums are held in
# registers, of which 256 threads can have as many as there are for a thread, on all chips.
_ROWS, _MOST_GROUPS = 8, 8
# Bytes of keys, and as many of values, in threadgroup memory (padding aside).
_TILE_BYTES = 8192


def made_for(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether the kernel computes with such heads, for any number of rows and keys."""
    return (
        queries.shape[3] in HEAD_DIMS
        and keys.shape == values.shape
        and keys.shape[3] == queries.shape[3]
        and queries.shape[1] % keys.shape[1] == 0
        and queries.dtype == keys.dtype == values.dtype
        and queries.dtype in (mx.float16, mx.bfloat16, mx.float32)
    )


def attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> mx.array:
    """queries (B, heads, L, D), keys and values (B, groups, S, D) that it was `made_for`, like twin.py.

    mask: None, "causal", or boolean, (B, 1, L, S). A row's numbers depend neither on other rows, nor on how many there
    are, nor on keys that it does not see, if those are numbers at all.
    """
    batch, heads, rows, head_dim = queries.shape
    groups, length = keys.shape[1:3]
    if rows > MOST_ROWS:
        seen = mx.broadcast_to(as_array(mask, rows, length), (batch, 1, rows, length))
        turns = [slice(first, first + MOST_ROWS) for first in range(0, rows, MOST_ROWS)]
        parts = [attention(queries[:, :, turn], keys, values, scale, seen[:, :, turn]) for turn in turns]
        return mx.concatenate(parts, axis=2)
    splits = -(-length // POSITIONS)
    tiles, threads = _division(rows * heads // groups)
    first, second = _kernels()
    sums, marks = first(
        inputs=[queries, keys, values, *settings_and_mask(scale, mask)],
        template=[
            ("T", queries.dtype),
            ("D", head_dim),
            ("KEYS", _keys(head_dim, queries.dtype)),
            ("POSITIONS", POSITIONS),
            *KINDS,
        ],
        grid=(tiles * threads, splits, batch * groups),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, rows, heads, splits, head_dim), (batch, rows, heads, splits, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    (out,) = second(
        inputs=[sums, marks],
        template=[("T", queries.dtype), ("D", head_dim)],
        grid=(batch * rows * heads * head_dim, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[(batch, rows, heads, head_dim)],
        output_dtypes=[queries.dtype],
    )
    return out.transpose(0, 2, 1, 3)


def _division(rows: int) -> tuple[int, int]:
    """How many threadgroups share the rows of a head of keys, evenly, and the threads of each."""
    needed = -(-rows // _ROWS)
    tiles = -(-needed // _MOST_GROUPS)
    return tiles, 32 * -(-needed // tiles)


def _keys(head_dim: int, dtype: mx.Dtype) -> int:
    """How many keys are held in threadgroup memory at once: a power of two, so that a part is a multiple of it."""
    return 1 << (_TILE_BYTES // (head_dim * dtype.size)).bit_length() - 1


@cache
def _kernels() -> tuple[Any, Any]:
    return mx.fast.metal_kernel(**_first()), mx.fast.metal_kernel(**_second())


def _first() -> dict[str, Any]:
    return {
        "name": "dflash_rows_attention",
        "input_names": ["q", "k", "v", "settings", "mask"],
        "output_names": ["sums", "marks"],
        "source": source("rows_attention/first_pass.metal"),
        "header": source("rows_attention/loading.metal"),
        # Keys and values are parts of larger arrays, of which a copy would cost more than the product.
        "ensure_row_contiguous": False,
    }


def _second() -> dict[str, Any]:
    return {
        "name": "dflash_rows_attention_parts",
        "input_names": ["sums", "marks"],
        "output_names": ["out"],
        "source": source("rows_attention/second_pass.metal"),
    }
