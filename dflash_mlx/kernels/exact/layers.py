"""Linear layers and output heads, plain or quantized, whose products are computed in blocks of fixed sizes."""

import copy
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.kernels.exact.blocks import SIZES, Agreement, compare_sizes, in_blocks

_SIZES = "_dflash_exact_sizes"
# Columns of the matrix by which sizes of blocks are compared that differ; the others repeat them.
_SIGNS = 64


# By the classes of layers that can be made exact, the method that multiplies.
EXACT_KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "__call__",
    nn.QuantizedLinear: "__call__",
    nn.Embedding: "as_linear",
    nn.QuantizedEmbedding: "as_linear",
}


@cache
def _exact(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Exact{kind.__name__}", (kind,), {EXACT_KINDS[kind]: _multiply_in_blocks})


def set_exact(layer: nn.Module, sizes: tuple[int, ...]) -> None:
    """Have a layer of one of these classes compute its products in blocks of these sizes."""
    object.__setattr__(layer, _SIZES, sizes)
    layer.__class__ = _exact(type(layer))


def _multiply_in_blocks(layer: Any, x: mx.array) -> mx.array:
    """What a layer of one of these classes gives for x (..., K): (..., N)."""
    rows = x.reshape(-1, x.shape[-1])
    (product,) = in_blocks(lambda rows: multiply(layer, rows), [rows], layer.__dict__[_SIZES])
    product = product.reshape(*x.shape[:-1], product.shape[-1])
    return product + layer["bias"] if "bias" in layer else product


def multiply(layer: Any, rows: mx.array) -> list[mx.array]:
    """A layer's product with rows (R, K), (R, N); its bias is left out."""
    if "scales" not in layer:
        return [rows @ layer["weight"].T]
    return [
        mx.quantized_matmul(
            rows,
            layer["weight"],
            scales=layer["scales"],
            biases=layer.get("biases"),
            transpose=True,
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )
    ]


def kind_of_product(layer: Any, dtype: mx.Dtype) -> tuple[Any, ...]:
    """What decides how MLX multiplies rows of a type by a layer's matrix, besides their number."""
    kind = layer["weight"].shape, layer["weight"].dtype, dtype
    return kind if "scales" not in layer else (*kind, layer["scales"].dtype, layer.group_size, layer.bits, layer.mode)


def compare_products(layer: Any, dtype: mx.Dtype) -> Agreement:
    """Which sizes of blocks give the same rows of a type in products with a matrix like this layer's."""
    columns, depth = layer["weight"].shape
    if "scales" in layer:
        depth = depth * 32 // layer.bits
    rows, signs = cancelling(max(SIZES), depth)
    parts = {"weight": signs.astype(layer["weight"].dtype)}
    if "scales" in layer:
        found = mx.quantize(
            signs.astype(layer["scales"].dtype) if layer.mode == "affine" else signs,
            group_size=layer.group_size,
            bits=layer.bits,
            mode=layer.mode,
        )
        parts = dict(zip(("weight", "scales", "biases"), found, strict=False))
    twin = copy.copy(layer)
    for name, array in parts.items():
        twin[name] = mx.tile(array, (-(-columns // len(array)), 1))[:columns]
    return compare_sizes(partial(multiply, twin), [rows.astype(dtype)])


def cancelling(rows: int, depth: int) -> tuple[mx.array, mx.array]:
    """Rows (R, K) and signs (64, K) whose products are 0, float32.

    For each number there is one of the other sign at another place, under the same sign. The numbers differ so much in
    size that what comes out is the rounding of the sums on the way, which another order of adding changes.
    """
    rng = np.random.default_rng(0)
    half, places = depth // 2, rng.permutation(depth)
    numbers = rng.standard_normal((rows, half)) * 2.0 ** rng.integers(-10, 11, (rows, half))
    signs = rng.choice([-1.0, 1.0], (_SIGNS, half))
    # An odd depth has a number without a partner, which is 0.
    lone = [(0, 0), (0, depth - 2 * half)]
    found = np.pad(np.hstack([numbers, -numbers]), lone), np.pad(np.hstack([signs, signs]), lone, constant_values=1)
    whole, twice = (mx.array(array[:, places].astype(np.float32)) for array in found)
    return whole, twice
