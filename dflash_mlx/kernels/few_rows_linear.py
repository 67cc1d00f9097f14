"""Products of a few rows with a linear layer, where one light kernel beats the library's product.

On CUDA, MLX prepares a cuBLAS product anew for each call with more than one row, which takes the computer longer than
it takes the GPU to multiply a small matrix; a single row goes through a light kernel instead. `gather_mm` runs that
kernel for several rows in one launch. It reads the matrix once a row, so it pays for small matrices and few rows only.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

# Larger matrices do not stay in a GPU's cache from one row to the next. With the kernel, the demo pair's vocabulary
# head (28 million weights) alone made a forward over 16 rows 0.6 ms slower on an H200.
_MOST_WEIGHTS = 8_000_000
_STATE = "_dflash_few_rows"


class _State(NamedTuple):
    """Up to how many rows the kernel is used, the layer's columns, its weight, and views of the weight.

    The views, (columns, rows) and (1, columns, rows), are made once, because each step that a call is spared counts.
    """

    most: int
    columns: int
    weight: mx.array
    transposed: mx.array
    stacked: mx.array


class FewRowsLinear(nn.Linear):
    """A linear layer that multiplies a few rows by the light kernel, and other numbers of rows as nn.Linear does."""

    def __call__(self, x: mx.array) -> mx.array:
        most, columns, weight, transposed, stacked = self.__dict__[_STATE]
        if weight is not self["weight"]:
            # The weight was replaced, by other numbers or by what a gradient is taken of.
            return super().__call__(x)
        rows = x.size // columns
        if not 1 < rows <= most:
            return mx.addmm(self["bias"], x, transposed) if "bias" in self else x @ transposed
        places, zeros = _indices(rows)
        product = mx.gather_mm(x.reshape(rows, 1, columns), stacked, places, zeros).reshape(*x.shape[:-1], -1)
        return product + self["bias"] if "bias" in self else product


@cache
def _indices(rows: int) -> tuple[mx.array, mx.array]:
    """For `gather_mm`: row i of the input for each i, and always the one matrix."""
    indices = mx.arange(rows, dtype=mx.uint32), mx.zeros(rows, dtype=mx.uint32)
    mx.eval(indices)
    return indices


def fitting_layers(model: nn.Module, *, without: Sequence[nn.Module] = ()) -> list[nn.Linear]:
    """A model's layers that the kernel can stand in for: plain ones, of a size that it is made for."""
    return [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear
        and layer.weight.shape[1] % 32 == 0
        and layer.weight.size <= _MOST_WEIGHTS
        and not any(layer is other for other in without)
    ]


def set_few_rows(layers: Sequence[nn.Linear], most: int) -> None:
    """Have 2 to `most` rows of these layers multiplied by the kernel; 0 makes them plain layers again."""
    for layer in layers:
        if most:
            transposed = layer.weight.T
            stacked = transposed[None]
            mx.eval(transposed, stacked)
            state = _State(most, layer.weight.shape[1], layer.weight, transposed, stacked)
            object.__setattr__(layer, _STATE, state)
            layer.__class__ = FewRowsLinear
        else:
            layer.__class__ = nn.Linear
            layer.__dict__.pop(_STATE, None)
