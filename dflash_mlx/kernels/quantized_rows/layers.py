"""Quantized layers that multiply a few rows by the kernel, where it won its race on this machine."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.kernels.quantized_rows.product import MOST_ROWS, Matrix, fits, multiply
from dflash_mlx.kernels.race import Report, Verdict, Verdicts, in_words, one_by_one, race, repeats
from dflash_mlx.kernels.sources import source
from dflash_mlx.runtime import backend

_STATE = "_dflash_quantized_rows"
# Matrices of common models (columns, depth) that `doctor --kernels` races: attention's, feed-forward, a vocabulary.
_TYPICAL = ((1024, 4096), (4096, 4096), (12288, 4096), (4096, 12288), (151936, 2560))

# weight, scales, biases
Weights = tuple[mx.array, mx.array, mx.array]


class QuantizedRowsLinear(nn.QuantizedLinear):
    """A quantized linear layer that multiplies some numbers of rows by the kernel, others as its own class does."""

    def __call__(self, x: mx.array) -> mx.array:
        product = _product(self, x)
        if product is None:
            return super().__call__(x)
        return product + self["bias"] if "bias" in self else product


class QuantizedRowsEmbedding(nn.QuantizedEmbedding):
    """The same for an embedding that is the output head, too."""

    def as_linear(self, x: mx.array) -> mx.array:
        product = _product(self, x)
        return super().as_linear(x) if product is None else product


_PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    QuantizedRowsLinear: nn.QuantizedLinear,
    QuantizedRowsEmbedding: nn.QuantizedEmbedding,
}
_OWN = {plain: own for own, plain in _PLAIN.items()}


def _product(layer: Any, x: mx.array) -> mx.array | None:
    used: tuple[bool, ...] = layer.__dict__[_STATE]
    rows = x.size // x.shape[-1]
    if rows >= len(used) or not used[rows] or x.dtype != layer["scales"].dtype:
        return None
    return multiply(x, layer["weight"], layer["scales"], layer["biases"], group_size=layer.group_size, bits=layer.bits)


def matrices(models: Iterable[nn.Module], *, head: nn.Module | None = None) -> dict[Matrix, list[Any]]:
    """The layers that the kernel can stand in for, by their matrix. Of embeddings only the output `head` is one."""
    found: dict[Matrix, list[Any]] = {}
    for model in models:
        for layer in model.modules():
            kind: Any = _PLAIN.get(type(layer), type(layer))
            if kind not in _OWN or layer.mode != "affine" or (kind is nn.QuantizedEmbedding and layer is not head):
                continue
            columns, words = layer.weight.shape
            matrix = Matrix(columns, words * 32 // layer.bits, layer.bits, layer.group_size, layer.scales.dtype)
            if fits(matrix):
                found.setdefault(matrix, []).append(layer)
    return found


def use(layers: Sequence[Any], used: tuple[bool, ...]) -> None:
    """Have these layers use the kernel for the numbers of rows that `used` says; for none, make them plain again."""
    for layer in layers:
        kind = type(layer)
        if any(used):
            object.__setattr__(layer, _STATE, used)
            layer.__class__ = _OWN.get(kind, kind)
        else:
            layer.__class__ = _PLAIN.get(kind, kind)
            layer.__dict__.pop(_STATE, None)


def use_where_faster(
    models: Iterable[nn.Module], *, head: nn.Module | None = None, report: Report | None = None
) -> tuple[str, list[str]]:
    """Race the kernel for each matrix of these models that has not been raced on this machine, and use it where it won.

    Returns what is used, in words that change with it, and notes on races that something odd ended.
    """
    found, words = matrices(models, head=head), []
    races = {str(matrix): partial(race_matrix, matrix, list(map(_weights, found[matrix]))) for matrix in found}
    verdicts, notes = known_verdicts().complete(races, report)
    for matrix, layers in found.items():
        used = verdicts[str(matrix)].used_for()
        use(layers, used)
        if any(used):
            words.append(in_words(str(matrix), (rows for rows, on in enumerate(used) if on)))
    return "; ".join(words), notes


def races_typical() -> dict[str, Callable[[], Verdict]]:
    """Races for matrices of common models, by what they are about."""
    matrices = [
        Matrix(columns, depth, bits, 64, dtype)
        for dtype in (mx.bfloat16, mx.float16)
        for bits in (4, 8)
        for columns, depth in _TYPICAL
    ]
    return {str(matrix): partial(_race_random, matrix) for matrix in matrices}


def _race_random(matrix: Matrix) -> Verdict:
    return race_matrix(matrix, [random_weights(matrix, seed) for seed in range(_needed(matrix))])


def race_matrix(matrix: Matrix, weights: Sequence[Weights]) -> Verdict:
    """The kernel against MLX's own operation, with several matrices of one kind."""
    weights = list(weights)[: _needed(matrix)]
    options: dict[str, Any] = {"group_size": matrix.group_size, "bits": matrix.bits}

    def ordinary(x: mx.array) -> list[mx.array]:
        return one_by_one(partial(mx.quantized_matmul, transpose=True, **options), x, weights)

    def own(x: mx.array) -> list[mx.array]:
        return one_by_one(partial(multiply, **options), x, weights)

    def inputs(rows: int) -> mx.array:
        assert rows <= MOST_ROWS
        x = mx.random.normal((rows, matrix.depth), key=mx.random.key(rows)).astype(matrix.dtype)
        mx.eval(x)
        return x

    return race(ordinary, own, inputs)


def random_weights(matrix: Matrix, seed: int) -> Weights:
    """Weights of a matrix of this kind, about as large as a model's."""
    keys = mx.random.split(mx.random.key(seed), 2)
    groups = (matrix.columns, matrix.depth // matrix.group_size)
    shape = (matrix.columns, matrix.depth * matrix.bits // 32)
    weight = mx.random.randint(-(2**31), 2**31 - 1, shape, key=keys[0]).view(mx.uint32)
    scales = (mx.random.uniform(0.5, 1.5, groups, key=keys[1]) * 2.0 ** (-4 - matrix.bits)).astype(matrix.dtype)
    parts = weight, scales, scales * -(2.0 ** (matrix.bits - 1))
    mx.eval(parts)
    return parts


def known_verdicts() -> Verdicts:
    cuda = "quantized_rows/kernel.cu", "matrix_units.cu"
    files = cuda if backend().kind == "cuda" else ("quantized_rows/kernel.metal",)
    return Verdicts("quantized_rows", "".join(map(source, files)))


def _weights(layer: Any) -> Weights:
    return layer["weight"], layer["scales"], layer["biases"]


def _needed(matrix: Matrix) -> int:
    return repeats(matrix.columns * matrix.depth * matrix.bits // 8)
