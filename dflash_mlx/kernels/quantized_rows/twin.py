"""A few rows times a quantized matrix in plain MLX: what the kernels have to compute."""

import mlx.core as mx


def product(
    x: mx.array, weight: mx.array, scales: mx.array, biases: mx.array, *, group_size: int, bits: int
) -> mx.array:
    """x (..., K), a matrix (N, K) as `mx.quantize` makes it -> x @ matrix.T, (..., N), of the type of x.

    Weights are dequantized and summed up in float32, and rounded once, at the end.
    """
    wide = mx.dequantize(weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=group_size, bits=bits)
    return (x.astype(mx.float32) @ wide.T).astype(x.dtype)
