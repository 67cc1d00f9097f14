"""Layers whose products are computed in blocks of fixed sizes: linear ones, output heads, experts; quantized, too."""

import copy
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from dflash_mlx.kernels.exact.blocks import SIZES, Agreement, compare_sizes, in_blocks, in_order
from dflash_mlx.kernels.few_rows_linear import multiply

_SIZES = "_dflash_exact_sizes"
# Columns of the matrix by which sizes of blocks are compared that differ; the others repeat them.
_SIGNS = 64
# By the classes of layers that can be made exact, the method that multiplies. Those with experts take indices, too.
EXACT_KINDS: dict[type[nn.Module], str] = {
    nn.Linear: "__call__",
    nn.QuantizedLinear: "__call__",
    nn.Embedding: "as_linear",
    nn.QuantizedEmbedding: "as_linear",
    SwitchLinear: "__call__",
    QuantizedSwitchLinear: "__call__",
}
_MATRIX = ("weight", "scales", "biases")
_WITH_EXPERTS = (SwitchLinear, QuantizedSwitchLinear)


class KernelLinear(nn.Linear):
    """A linear layer that multiplies any number of rows by the CUDA kernel for few, which computes each row alike."""

    def __call__(self, x: mx.array) -> mx.array:
        [product] = multiply(x, [self["weight"]])
        return product + self["bias"] if "bias" in self else product


def set_exact(layer: nn.Module, sizes: tuple[int, ...]) -> None:
    """Have a layer of one of these classes compute its products in blocks of these sizes."""
    for name in _MATRIX:
        if layer.get(name) is not None:
            layer[name] = in_order(layer[name])
    object.__setattr__(layer, _SIZES, sizes)
    layer.__class__ = _exact(type(layer))


@cache
def _exact(kind: type[nn.Module]) -> type[nn.Module]:
    def product(self: Any, x: mx.array) -> mx.array:
        """x (..., K) -> (..., N)."""
        rows = x.reshape(-1, x.shape[-1])
        (found,) = in_blocks(partial(_multiply, kind, self), [rows], self.__dict__[_SIZES])
        return found.reshape(*x.shape[:-1], found.shape[-1])

    def of_experts(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x (..., 1, K), by the experts `indices` (...) -> (..., 1, N)."""
        rows = mx.broadcast_to(x, (*indices.shape, *x.shape[-2:])).reshape(-1, 1, x.shape[-1])
        (found,) = in_blocks(partial(_multiply, kind, self), [rows, indices.reshape(-1)], self.__dict__[_SIZES])
        return found.reshape(*indices.shape, 1, found.shape[-1])

    method = of_experts if kind in _WITH_EXPERTS else product
    return type(f"Exact{kind.__name__}", (kind,), {EXACT_KINDS[kind]: method})


def _multiply(kind: type[nn.Module], layer: nn.Module, *arrays: mx.array) -> list[mx.array]:
    """What a layer of a kind gives for rows (R, K), or for rows (R, 1, K) and the experts (R,) for them."""
    return [getattr(kind, EXACT_KINDS[kind])(layer, *arrays)]


def kind_of_product(layer: Any, dtype: mx.Dtype) -> tuple[Any, ...]:
    """What decides how MLX multiplies rows of a type by a layer's matrix, besides their number."""
    kind = type(layer), layer["weight"].shape, layer["weight"].dtype, dtype, "bias" in layer
    return kind if "scales" not in layer else (*kind, layer["scales"].dtype, layer.group_size, layer.bits, layer.mode)


def compare_products(layer: Any, dtype: mx.Dtype) -> Agreement:
    """Which sizes of blocks give the same rows of a type in products with a matrix like this layer's."""
    *experts, columns, depth = layer["weight"].shape
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
        parts = dict(zip(_MATRIX, found, strict=False))
    twin = copy.copy(layer)
    for name, part in parts.items():
        whole = mx.tile(part, (-(-columns // _SIGNS), 1))[:columns]
        twin[name] = in_order(mx.broadcast_to(whole, (*experts, *whole.shape)))
    if "bias" in layer:
        twin["bias"] = mx.zeros_like(layer["bias"])
    arrays = [rows.astype(dtype)]
    if experts:
        arrays = [arrays[0][:, None], mx.arange(len(rows)) % experts[0]]
    return compare_sizes(partial(_multiply, type(layer), twin), arrays)


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
    whole, twice = (mx.array(np.ascontiguousarray(array[:, places], dtype=np.float32)) for array in found)
    return whole, twice
