"""Products of a few rows with a linear layer in one CUDA kernel.

MLX prepares a cuBLAS product anew for each call with more than one row, which takes the computer longer than it takes
the GPU to multiply a small matrix. This kernel is one plain launch. It reads the matrix once for every 16 rows and adds
in float32, always in the same order: what comes out for a row does not depend on the other rows, nor on their number.
It does not use the GPU's matrix units, so it pays for small matrices and up to some hundred rows only.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.rounding import TOLERANCE, relative_difference

# On a larger matrix the library's product is bound by memory, and faster.
_MOST_WEIGHTS = 8_000_000
_STATE = "_dflash_few_rows"
# Rows and columns of the product that a block of threads computes: its warps have four columns each.
_ROWS, _COLUMNS, _THREADS = 16, 16, 128

# A warp's lanes share the depth: four numbers each of every 128. In the end each has 64 sums over its own part, which
# are added up by exchanges in which a lane gives away half of its sums each time.
_SOURCE = """
    constexpr int OWN = 4;
    constexpr int DEPTH = 128;
    struct alignas(4 * sizeof(T)) Four { T at[4]; };
    struct alignas(16) Floats { float at[4]; };
    __shared__ Floats tile[ROWS][DEPTH / 4];

    int rows = 1;
    for (int i = 0; i + 1 < DIMENSIONS; i++) rows *= x_shape[i];
    const int columns = w_shape[0], depth = w_shape[1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first_row = blockIdx.y * ROWS;
    const int first_column = (blockIdx.x * (THREADS / 32) + warp) * OWN;

    auto load = [](const T* from) {
      const Four four = *reinterpret_cast<const Four*>(from);
      Floats floats;
      for (int j = 0; j < 4; j++) floats.at[j] = static_cast<float>(four.at[j]);
      return floats;
    };
    const Floats nothing = {{0, 0, 0, 0}};

    float sums[ROWS * OWN];
    #pragma unroll
    for (int i = 0; i < ROWS * OWN; i++) sums[i] = 0;
    for (int start = 0; start < depth; start += DEPTH) {
      __syncthreads();
      for (int i = threadIdx.x; i < ROWS * DEPTH / 4; i += THREADS) {
        const int row = first_row + i / (DEPTH / 4), at = start + 4 * (i % (DEPTH / 4));
        tile[i / (DEPTH / 4)][i % (DEPTH / 4)] =
            row < rows && at < depth ? load(x + static_cast<int64_t>(row) * depth + at) : nothing;
      }
      __syncthreads();
      const int at = start + 4 * lane;
      Floats weights[OWN];
      #pragma unroll
      for (int c = 0; c < OWN; c++)
        weights[c] = first_column + c < columns && at < depth
            ? load(w + static_cast<int64_t>(first_column + c) * depth + at) : nothing;
      #pragma unroll
      for (int row = 0; row < ROWS; row++) {
        const Floats numbers = tile[row][lane];
        #pragma unroll
        for (int c = 0; c < OWN; c++)
          #pragma unroll
          for (int j = 0; j < 4; j++) sums[row * OWN + c] += numbers.at[j] * weights[c].at[j];
      }
    }

    #pragma unroll
    for (int step = 0; step < 5; step++) {
      const int distance = 16 >> step, half = (ROWS * OWN / 2) >> step;
      const bool upper = lane & distance;
      #pragma unroll
      for (int i = 0; i < half; i++) {
        const float given = upper ? sums[i] : sums[i + half];
        const float kept = upper ? sums[i + half] : sums[i];
        sums[i] = kept + __shfl_xor_sync(0xffffffff, given, distance);
      }
    }
    const int row = first_row + lane / 2;
    for (int i = 0; i < 2; i++) {
      const int column = first_column + lane % 2 * 2 + i;
      if (row < rows && column < columns)
        out[static_cast<int64_t>(row) * columns + column] = static_cast<T>(sums[i]);
    }
"""


class _State(NamedTuple):
    """Up to how many rows the kernel is used, and the layer's weight, as it is and transposed.

    The view is made once, because each step that a call is spared counts.
    """

    most: int
    weight: mx.array
    transposed: mx.array


class FewRowsLinear(nn.Linear):
    """A linear layer that multiplies a few rows by the kernel, and other numbers of rows as nn.Linear does."""

    def __call__(self, x: mx.array) -> mx.array:
        most, weight, transposed = self.__dict__[_STATE]
        if weight is not self["weight"]:
            # The weight was replaced, by other numbers or by what a gradient is taken of.
            return super().__call__(x)
        if not 1 < x.size // weight.shape[1] <= most or x.dtype != weight.dtype:
            return mx.addmm(self["bias"], x, transposed) if "bias" in self else x @ transposed
        product = multiply(x, weight)
        return product + self["bias"] if "bias" in self else product


def multiply(x: mx.array, weight: mx.array) -> mx.array:
    """x: (..., K), weight: (N, K) of the same type, K a multiple of 4 -> x @ weight.T, (..., N), by the kernel."""
    columns, depth = weight.shape
    rows = x.size // depth
    (product,) = _kernel()(
        inputs=[x, weight],
        template=[("T", x.dtype), ("DIMENSIONS", x.ndim), ("ROWS", _ROWS), ("THREADS", _THREADS)],
        grid=(-(-columns // _COLUMNS) * _THREADS, -(-rows // _ROWS), 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(*x.shape[:-1], columns)],
        output_dtypes=[x.dtype],
    )
    return product


def products_work(dtype: mx.Dtype) -> bool:
    """Whether the kernel can be compiled here, and gives what MLX's product gives."""
    rng = np.random.default_rng(0)
    x, weight = (
        mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype) for shape in ((2, 9, 160), (35, 160))
    )
    try:
        return relative_difference(multiply(x, weight), x @ weight.T) <= TOLERANCE[dtype]
    except (RuntimeError, ValueError):  # no compiler, or one that refuses it
        return False


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
            mx.eval(transposed)
            object.__setattr__(layer, _STATE, _State(most, layer.weight, transposed))
            layer.__class__ = FewRowsLinear
        else:
            layer.__class__ = nn.Linear
            layer.__dict__.pop(_STATE, None)


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="dflash_few_rows_product",
        input_names=["x", "w"],
        output_names=["out"],
        source=_SOURCE,
        ensure_row_contiguous=True,
    )
