"""Attention of a few rows over a cache in one CUDA kernel.

MLX computes the attention of up to three rows in one launch. A round has more, and a tree's rows have a mask of their
own: for those MLX strings together products, a selection and a softmax, which take the computer some 45 microseconds a
layer. Here they are one launch, too (12 microseconds), over keys and values where they lie in the cache, and in float32
throughout, like MLX's kernel for a single row.

The models' own code runs as it is: attention *instances* get a subclass of their own class in which the name
`scaled_dot_product_attention` means `attend`. Whether that is faster is measured (few_rows.py).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import scaled_dot_product_attention

from dflash_mlx.hooks import means, renamed
from dflash_mlx.kernels.attention import Mask, instead_of_ordinary
from dflash_mlx.rounding import relative_difference

# The kernel keeps a number for each key of a part in the GPU's shared memory, 16 KB in all. It computes any number of
# parts, one after the other, but more than one takes longer than products.
MOST_KEYS = 4096
# It reads the keys once for each row, so much work is better done by products. Rows, and numbers multiplied for the
# scores; on an H200 a launch of this many takes about as long as the products.
MOST_ROWS = 64
_MOST_WORK = 160_000_000
_NAME = "scaled_dot_product_attention"
# What two ways to compute attention may differ by, relative to its spread.
_ROUNDING = 0.02
_THREADS = 256

# A block of threads computes one query head of one row of one sequence. Threads in groups of D / 8 share a key: 8
# numbers each. One kernel serves all kinds of masks, because compiling one takes seconds the first time.
_SOURCE = """
    constexpr int LANES = D / 8;
    constexpr int GROUPS = THREADS / LANES;
    constexpr int WARPS = THREADS / 32;
    struct alignas(16) Eight { T at[8]; };
    __shared__ float weights[MOST_KEYS];
    __shared__ float warp_values[WARPS];
    __shared__ float warp_outputs[WARPS][D];

    const int head = blockIdx.x, row = blockIdx.y, sequence = blockIdx.z;
    const int rows = q_shape[2], keys = k_shape[2];
    const int kind = static_cast<int>(settings[1]);
    const int last = kind == CAUSAL ? keys - rows + row : keys - 1;
    const int kv_head = head / (q_shape[1] / k_shape[1]);
    const int part = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    auto load = [](const T* from, int64_t step, float (&to)[8]) {
      if (step == 1 && (reinterpret_cast<size_t>(from) & 15) == 0) {
        const Eight eight = *reinterpret_cast<const Eight*>(from);
        for (int j = 0; j < 8; j++) to[j] = static_cast<float>(eight.at[j]);
      } else {
        for (int j = 0; j < 8; j++) to[j] = static_cast<float>(from[j * step]);
      }
    };

    float query[8], numbers[8];
    load(q + sequence * q_strides[0] + head * q_strides[1] + row * q_strides[2] + 8 * part * q_strides[3],
         q_strides[3], query);
    const T* all_keys = k + sequence * k_strides[0] + kv_head * k_strides[1] + 8 * part * k_strides[3];
    const T* all_values = v + sequence * v_strides[0] + kv_head * v_strides[1] + 8 * part * v_strides[3];
    const bool* all_sees = mask + sequence * mask_strides[0] + row * mask_strides[2];

    constexpr float NEVER = -3e38f;
    float highest_of_all = NEVER, total_of_all = 0, sums_of_all[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int begin = 0; begin < keys; begin += MOST_KEYS) {
      const int count = keys - begin < MOST_KEYS ? keys - begin : MOST_KEYS;
      const T* from_keys = all_keys + begin * k_strides[2];
      const T* from_values = all_values + begin * v_strides[2];
      const bool* sees = all_sees + begin * mask_strides[3];

      // Scores, in base 2, and the highest of them.
      float highest = NEVER;
      for (int first = 0; first < count; first += GROUPS) {
        const int i = first + group;
        const bool seen = i < count && begin + i <= last && (kind != MASK || sees[i * mask_strides[3]]);
        float score = 0;
        if (seen) {
          load(from_keys + i * k_strides[2], k_strides[3], numbers);
          for (int j = 0; j < 8; j++) score += query[j] * numbers[j];
        }
        for (int distance = LANES / 2; distance > 0; distance /= 2)
          score += __shfl_xor_sync(0xffffffff, score, distance);
        score = seen ? score * settings[0] * 1.44269504089f : NEVER;
        if (part == 0 && i < count) weights[i] = score;
        highest = max(highest, score);
      }
      for (int distance = 16; distance > 0; distance /= 2)
        highest = max(highest, __shfl_xor_sync(0xffffffff, highest, distance));
      if (lane == 0) warp_values[warp] = highest;
      __syncthreads();
      for (int i = 0; i < WARPS; i++) highest = max(highest, warp_values[i]);
      __syncthreads();

      float total = 0;
      for (int i = threadIdx.x; i < count; i += THREADS) {
        weights[i] = exp2f(weights[i] - highest);
        total += weights[i];
      }
      for (int distance = 16; distance > 0; distance /= 2) total += __shfl_xor_sync(0xffffffff, total, distance);
      if (lane == 0) warp_values[warp] = total;
      __syncthreads();
      total = 0;
      for (int i = 0; i < WARPS; i++) total += warp_values[i];

      float sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      for (int i = group; i < count; i += GROUPS) {
        const float weight = weights[i];
        if (weight == 0) continue;
        load(from_values + i * v_strides[2], v_strides[3], numbers);
        for (int j = 0; j < 8; j++) sums[j] += weight * numbers[j];
      }
      // Together with the parts before, whose weights were relative to another highest score.
      const float top = max(highest_of_all, highest);
      const float before = exp2f(highest_of_all - top), now = exp2f(highest - top);
      total_of_all = total_of_all * before + total * now;
      for (int j = 0; j < 8; j++) sums_of_all[j] = sums_of_all[j] * before + sums[j] * now;
      highest_of_all = top;
      __syncthreads();
    }
    for (int j = 0; j < 8; j++) {
      for (int distance = LANES; distance < 32; distance *= 2)
        sums_of_all[j] += __shfl_xor_sync(0xffffffff, sums_of_all[j], distance);
      if (lane < LANES) warp_outputs[warp][8 * part + j] = sums_of_all[j];
    }
    __syncthreads();
    for (int d = threadIdx.x; d < D; d += THREADS) {
      float sum = 0;
      for (int i = 0; i < WARPS; i++) sum += warp_outputs[i][d];
      out[((static_cast<int64_t>(sequence) * rows + row) * q_shape[1] + head) * D + d] =
          static_cast<T>(sum / total_of_all);
    }
"""
# What a row sees, as the kernel is told: everything, what comes before it, or what a mask says.
_ALL, _CAUSAL, _MASK = 0, 1, 2
_CONSTANTS = [("THREADS", _THREADS), ("MOST_KEYS", MOST_KEYS), ("CAUSAL", _CAUSAL), ("MASK", _MASK)]


@instead_of_ordinary
def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> mx.array | None:
    """mlx-lm's `scaled_dot_product_attention`, by the kernel where it fits; queries (B, heads, L, head_dim)."""
    return compute(queries, keys, values, scale, mask) if fits(queries, keys, values, mask) else None


def compute(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> mx.array:
    """Attention by the kernel, where it was `made_for` it. masks: (B, 1, L, S), boolean.

    What comes out for a row depends neither on other rows nor on keys that it does not see after those that it does.
    """
    batch, heads, rows, head_dim = queries.shape
    kind = _ALL if mask is None else _CAUSAL if isinstance(mask, str) else _MASK
    settings, no_mask = _settings(scale, kind)
    (out,) = _kernel()(
        inputs=[queries, keys, values, settings, mask if kind == _MASK else no_mask],
        template=[("T", queries.dtype), ("D", head_dim), *_CONSTANTS],
        grid=(heads * _THREADS, rows, batch),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(batch, rows, heads, head_dim)],
        output_dtypes=[queries.dtype],
    )
    return out.transpose(0, 2, 1, 3)


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


def fits(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None) -> bool:
    """Whether the kernel is meant for this: a few rows of each sequence, and a mask that says which keys a row sees."""
    batch, heads, rows, head_dim = queries.shape
    length = keys.shape[2]
    return (
        rows <= MOST_ROWS
        # Of a single row without a mask MLX makes one launch, too.
        and (rows > 1 or isinstance(mask, mx.array))
        and rows <= length <= MOST_KEYS
        and batch * heads * rows * length * head_dim <= _MOST_WORK
        and made_for(queries, keys, values)
        and (
            mask is None
            or (isinstance(mask, str) and mask == "causal")
            or (isinstance(mask, mx.array) and mask.dtype == mx.bool_ and mask.shape == (batch, 1, rows, length))
        )
    )


def attention_works(dtype: mx.Dtype, head_dim: int) -> bool:
    """Whether the kernel can be compiled here and gives what MLX's attention gives; True where it would not be used."""
    rng = np.random.default_rng(0)
    batch, rows, length = 2, 5, 70
    queries, keys, values = (
        mx.array(rng.standard_normal((batch, heads, count, head_dim), dtype=np.float32)).astype(dtype)
        for heads, count in ((4, rows), (2, length), (2, length))
    )
    tree = mx.array((rng.random((batch, 1, rows, length)) > 0.5) | np.eye(rows, length, dtype=bool))
    try:
        for mask in (None, "causal", tree):
            call: Any = {"cache": None, "scale": head_dim**-0.5, "mask": mask}
            found = attend(queries, keys, values, **call)
            if relative_difference(found, scaled_dot_product_attention(queries, keys, values, **call)) > _ROUNDING:
                return False
    except (RuntimeError, ValueError):  # no compiler, or one that refuses it
        return False
    return True


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model whose code calls mlx-lm's attention."""
    return [layer for layer in model.modules() if means(type(layer), _NAME, scaled_dot_product_attention, attend)]


def set_attention(layers: Sequence[nn.Module], *, kernel: bool) -> None:
    """Have these `attention_layers` use the kernel, or make them plain again."""
    for layer in layers:
        kind = type(layer)
        if means(kind, _NAME, attend) != kernel:
            layer.__class__ = renamed(kind, _NAME, attend) if kernel else kind.__bases__[0]


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="dflash_few_rows_attention",
        input_names=["q", "k", "v", "settings", "mask"],
        output_names=["out"],
        source=_SOURCE,
        # Keys and values are parts of larger arrays; a copy of them would cost more than the product.
        ensure_row_contiguous=False,
    )


@cache
def _settings(scale: float, kind: int) -> tuple[mx.array, mx.array]:
    """What the kernel is told, and what stands for a mask where there is none."""
    settings, no_mask = mx.array([scale, kind], dtype=mx.float32), mx.ones((1, 1, 1, 1), dtype=mx.bool_)
    mx.eval(settings, no_mask)
    return settings, no_mask
