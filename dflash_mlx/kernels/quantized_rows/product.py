"""Launching the kernel for a few rows times a quantized matrix, and what it was made for."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.runtime import backend

# More rows than this are computed better by MLX's kernels, which have tiles of 32.
MOST_ROWS = 32
# Rows of a threadgroup: the matrix units take 8, and 16 share what was read and dequantized.
_FEW, _ALL = 8, 16


class Matrix(NamedTuple):
    """What decides how a product is computed, besides the number of rows: x (M, depth) times (columns, depth)."""

    columns: int
    depth: int
    bits: int
    group_size: int
    dtype: mx.Dtype


def fits(matrix: Matrix) -> bool:
    """Whether the kernel was made for products with this matrix."""
    return (
        matrix.bits in (4, 8)
        and matrix.group_size in (32, 64, 128)
        and matrix.dtype in (mx.float16, mx.bfloat16)
        and matrix.depth % matrix.group_size == 0
        and matrix.columns >= 8
        and matrix.columns * matrix.depth // matrix.group_size >= 8  # MLX passes shorter arrays in another way
    )


def tiles_and_split(columns: int, depth: int, bits: int) -> tuple[int, int]:
    """Columns of a threadgroup, in eights, and simdgroups that share its depth.

    A wide matrix has threadgroups enough to fill a GPU; of a narrow one each simdgroup takes less. This does not depend
    on the number of rows, so the sums of a row are always the same.
    """
    tiles, split = (4, 4) if columns >= 4096 else (2, 8)
    blocks = -(-depth * bits // 1024)
    while split > 1 and split > blocks:
        split //= 2
    return tiles, split


def multiply(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
) -> mx.array:
    """x (..., K) with up to `MOST_ROWS` rows, a matrix (N, K) as `mx.quantize` makes it -> (..., N), like twin.py.

    A row's numbers do not depend on the other rows, nor on how many there are.
    """
    columns, depth = weight.shape[0], x.shape[-1]
    rows = x.size // depth
    tiles, split = tiles_and_split(columns, depth, bits)
    most = _FEW if rows <= _FEW else _ALL
    (product,) = _kernel()(
        inputs=[x.reshape(rows, depth), weight, scales, biases],
        template=[
            ("T", x.dtype),
            ("BITS", bits),
            ("GROUP", group_size),
            ("ROWS", most),
            ("TILES", tiles),
            ("SPLIT", split),
        ],
        grid=(-(-rows // most) * 32 * split, -(-columns // (8 * tiles)), 1),
        threadgroup=(32 * split, 1, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[x.dtype],
    )
    return product.reshape(*x.shape[:-1], columns)


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel(
        name="dflash_quantized_rows",
        input_names=["x", "w", "scales", "biases"],
        output_names=["y"],
        source=source("kernel.metal"),
    )


def source(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
