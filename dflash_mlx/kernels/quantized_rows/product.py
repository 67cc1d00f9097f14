"""Launching the kernel for a few rows times a quantized matrix, and what it was made for."""

from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx

from dflash_mlx.kernels.cuda_modules import cuda_kernel
from dflash_mlx.kernels.sources import source
from dflash_mlx.runtime import backend

# More rows than this are computed better by MLX's kernels, which have tiles of 32.
MOST_ROWS = 32
_NAMES: dict[str, Any] = {
    "name": "dflash_quantized_rows",
    "input_names": ["x", "w", "scales", "biases"],
    "output_names": ["y"],
}


class Matrix(NamedTuple):
    """What decides how a product is computed, besides the number of rows: x (M, depth) times (columns, depth)."""

    columns: int
    depth: int
    bits: int
    group_size: int
    dtype: mx.Dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).rpartition(".")[2]
        return f"{self.columns}x{self.depth} {self.bits}-bit, groups of {self.group_size}, {dtype}"


class Tiles(NamedTuple):
    """Of a threadgroup: its rows, its columns in eights, and how many simdgroups (warps) share the depth."""

    rows: int
    columns: int
    split: int


def fits(matrix: Matrix) -> bool:
    """Whether the kernel was made for products with this matrix."""
    return (
        matrix.bits in (4, 8)
        and matrix.group_size in (32, 64, 128)
        and matrix.dtype in (mx.float16, mx.bfloat16)
        and matrix.depth % matrix.group_size == 0
        # MLX hands over shorter arrays in another way.
        and matrix.columns * matrix.depth >= 8 * matrix.group_size
    )


def tiles(rows: int, columns: int, depth: int, bits: int) -> Tiles:
    """How a product is divided.

    A wide matrix has threadgroups enough to fill a GPU; of a narrow one more simdgroups share the depth. How depth and
    columns are divided does not depend on the number of rows, so the sums of a row are always the same.
    """
    if backend().kind == "cuda":
        high, wide, split, block = 16, 2, 8 if columns >= 8192 else 16, 512 // bits
    else:
        high, block = 8 if rows <= 8 else 16, 1024 // bits
        wide, split = (4, 4) if columns >= 4096 else (2, 8)
    while split > 1 and split * block >= 2 * depth:
        split //= 2
    return Tiles(high, wide, split)


def multiply(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
) -> mx.array:
    """x (..., K) with up to `MOST_ROWS` rows, a matrix (N, K) as `mx.quantize` makes it -> (..., N), like twin.py.

    A row's numbers do not depend on the other rows, nor on how many there are.
    """
    columns, depth = weight.shape[0], x.shape[-1]
    rows = x.size // depth
    high, wide, split = tiles(rows, columns, depth, bits)
    cuda = backend().kind == "cuda"
    (product,) = (_cuda_kernel if cuda else _metal_kernel)()(
        inputs=[x.reshape(rows, depth), weight, scales, biases],
        template=[
            ("T", x.dtype),
            ("BITS", bits),
            ("GROUP", group_size),
            ("BRAIN", x.dtype == mx.bfloat16) if cuda else ("ROWS", high),
            ("TILES", wide),
            ("SPLIT", split),
        ],
        grid=(-(-rows // high) * 32 * split, -(-columns // (8 * wide)), 1),
        threadgroup=(32 * split, 1, 1),
        output_shapes=[(rows, columns)],
        output_dtypes=[x.dtype],
    )
    return product.reshape(*x.shape[:-1], columns)


@cache
def _metal_kernel() -> Any:
    return mx.fast.metal_kernel(**_NAMES, source=source("quantized_rows/kernel.metal"))


@cache
def _cuda_kernel() -> Any:
    return cuda_kernel(**_NAMES, file="quantized_rows/kernel.cu", header="matrix_units.cu")
