"""Products of a few rows with linear layers in one CUDA kernel.

MLX prepares a cuBLAS product anew for each call with more than one row, which takes the computer longer than it takes
the GPU to multiply a small matrix. This kernel is one plain launch. It reads a matrix once for every 32 rows, or 64 of
many, multiplies on the matrix units and adds in float32, always in the same order: what comes out for a row does not
depend on the other rows, nor on their number.

Layers that are called one after the other with the same rows, such as those for queries, keys and values, share a
launch: the first one computes the products of all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.hooks import subclassed
from dflash_mlx.kernels.cuda_modules import cuda_kernel
from dflash_mlx.rounding import TOLERANCE, relative_difference


@dataclass(frozen=True)
class _Block:
    """What a block of threads computes: `tiles` of 16 rows and 8 columns, down and across; once, by eight warps that
    share the depth (split), or in each of two by two warps."""

    split: bool
    tiles: tuple[int, int]

    @cached_property
    def rows(self) -> int:
        return 16 * self.tiles[0] * (1 if self.split else 2)

    @cached_property
    def columns(self) -> int:
        return 8 * self.tiles[1] * (1 if self.split else 2)

    @cached_property
    def threads(self) -> int:
        return 32 * (8 if self.split else 4)

    @cached_property
    def stages(self) -> int:
        """For how many turns of the depth there is room in the block's memory (few_rows_linear.cu)."""
        return min(4, _MOST_MEMORY // self._turn)

    @cached_property
    def memory(self) -> int:
        """Bytes that the block's threads share, where they share the depth."""
        return self.stages * self._turn if self.split else 0

    @property
    def _turn(self) -> int:
        """Bytes of a turn: each thread reads 16 of each tile's columns, and 16 of two rows of each."""
        down, across = self.tiles
        return 16 * (2 * down + across) * self.threads


_TYPES = (mx.float16, mx.bfloat16)
# With so many bytes two blocks fit into what a GPU's processor has.
_MOST_MEMORY = 98_304
# To read a larger matrix more than once takes longer than to have the library prepare its product.
_MOST_WEIGHTS = 8_000_000
_STATE, _CALLS = "_dflash_few_rows", "_dflash_calls"
# The most products of a launch.
_MOST_PRODUCTS = 16
# Up to so many rows are multiplied by blocks that read a matrix as fast as can be, at most so many in each; more by
# blocks that read it fewer times.
_FEW_ROWS, _BLOCK_ROWS = 64, 32
# From so many columns on, blocks can be wide and still be enough for all of a GPU. Wide ones read the rows fewer times.
_MANY_COLUMNS = 4096
# Made once, with their numbers, as each call asks for them.
_FOR_MANY_ROWS = _Block(split=False, tiles=(2, 4))
_FOR_FEW_ROWS = {(down, across): _Block(split=True, tiles=(down, across)) for down in (1, 2) for across in (2, 4)}


def _block(rows: int, columns: int) -> _Block:
    """What reads matrices of so many columns together fastest."""
    if rows > _FEW_ROWS:
        return _FOR_MANY_ROWS
    return _FOR_FEW_ROWS[1 if rows <= _BLOCK_ROWS // 2 else 2, 4 if columns >= _MANY_COLUMNS else 2]


class _State:
    """How a layer computes few rows.

    most: up to how many the kernel takes. weight: the layer's, and as it is multiplied without the kernel; this view is
    made once, because each step that a call is spared counts. followers: layers whose products it computes along.
    ready: rows, and the product of this layer with them that another layer has computed.
    """

    def __init__(self, most: int, weight: mx.array, followers: Sequence[nn.Linear]) -> None:
        self.most, self.weight, self.transposed = most, weight, weight.T
        self.followers = [follower.__dict__ for follower in followers]
        self.weights = [weight, *(follower.weight for follower in followers)]
        self.ready: tuple[mx.array, mx.array] | None = None


class FewRowsLinear(nn.Linear):
    """A linear layer that multiplies a few rows by the kernel, and other numbers of rows as nn.Linear does."""

    def __call__(self, x: mx.array) -> mx.array:
        state: _State = self.__dict__[_STATE]
        weight = state.weight
        if weight is not self["weight"]:
            # The weight was replaced, by other numbers or by what a gradient is taken of.
            return super().__call__(x)
        ready, state.ready = state.ready, None
        if ready is not None and ready[0] is x:
            product = ready[1]
        elif not 1 < x.size // weight.shape[1] <= state.most or x.dtype != weight.dtype:
            return mx.addmm(self["bias"], x, state.transposed) if "bias" in self else x @ state.transposed
        else:
            product, *others = multiply(x, state.weights)
            for follower, other in zip(state.followers, others, strict=True):
                follower[_STATE].ready = x, other
        return product + self["bias"] if "bias" in self else product


def multiply(x: mx.array, weights: Sequence[mx.array]) -> list[mx.array]:
    """x: (..., K), each weight: (N, K), all of the same type, float16 or bfloat16, K a multiple of 32
    -> x @ weight.T, (..., N), of each, by the kernel."""
    columns = [weight.shape[0] for weight in weights]
    rows = x.size // x.shape[-1]
    block = _block(rows, sum(columns))
    found: list[mx.array] = _kernel(len(weights), block.memory)(
        inputs=[x, *weights],
        template=[
            ("T", x.dtype),
            ("BRAIN", x.dtype == mx.bfloat16),
            ("DIMENSIONS", x.ndim),
            ("SPLIT", block.split),
            ("ROW_TILES", block.tiles[0]),
            ("COLUMN_TILES", block.tiles[1]),
            ("STAGES", block.stages),
        ],
        grid=(sum(-(-count // block.columns) for count in columns) * block.threads, -(-rows // block.rows), 1),
        threadgroup=(block.threads, 1, 1),
        output_shapes=[(*x.shape[:-1], count) for count in columns],
        output_dtypes=[x.dtype] * len(columns),
    )
    return found


def products_work(dtype: mx.Dtype, *, together: bool = True) -> bool:
    """Whether the kernel can be compiled here, takes this type, and gives what MLX's products give.

    together: also where it computes two products at once.
    """
    if dtype not in _TYPES:
        return False
    rng = np.random.default_rng(0)
    few, some, many, *weights = (
        mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
        for shape in ((9, 416), (2, 9, 416), (2, 40, 416), (35, 416), (_MANY_COLUMNS, 416))
    )
    try:
        for x in (few, some, many):
            for matrices in (weights[:1], weights[1:], *([weights] if together else [])):
                expected = [x @ weight.T for weight in matrices]
                for pair in zip(multiply(x, matrices), expected, strict=True):
                    if not relative_difference(*pair) <= TOLERANCE[dtype]:  # NaN is refused, too
                        return False
        return True
    except (RuntimeError, ValueError):  # no compiler, or one that refuses it
        return False


def is_large(layer: nn.Linear) -> bool:
    """Whether a layer's matrix is so large that the kernel is for no more rows than it reads it once for."""
    return bool(layer.weight.size > _MOST_WEIGHTS)


def fitting_layers(model: nn.Module, *, without: Sequence[nn.Module] = ()) -> list[nn.Linear]:
    """A model's layers that the kernel can stand in for: plain ones, of a type that it is made for."""
    return [
        layer
        for layer in model.modules()
        if type(layer) is nn.Linear
        and layer.weight.dtype in _TYPES
        and layer.weight.shape[1] % 32 == 0
        and not any(layer is other for other in without)
    ]


def called_together(layers: Sequence[nn.Linear], run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Those of these layers that are called one after the other with the same rows, while something runs.

    Of each group the first layer comes first; a layer can be in several groups, but is first in one at most.
    """
    calls: list[tuple[nn.Linear, mx.array]] = []
    with subclassed(layers, _noting, notes={_CALLS: [calls] * len(layers)}):
        run()
    groups: dict[int, list[nn.Linear]] = {}
    group: list[nn.Linear] = []
    rows = None
    for layer, x in calls:
        first = group[0] if group and rows is x else None
        if (
            first is None
            or len(group) == _MOST_PRODUCTS
            or any(layer is other for other in group)
            or layer.weight.dtype != first.weight.dtype
        ):
            group, rows = [], x
            if id(layer) not in groups:
                groups[id(layer)] = group
        group.append(layer)
    return [group for group in groups.values() if len(group) > 1]


@cache
def _noting(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, x: mx.array) -> mx.array:
        self.__dict__[_CALLS].append((self, x))
        product: mx.array = kind.__call__(self, x)
        return product

    return type(f"Noting{kind.__name__}", (kind,), {"__call__": call})


def set_few_rows(layers: Sequence[nn.Linear], most: int, groups: Sequence[Sequence[nn.Linear]] = ()) -> None:
    """Have 2 to `most` rows of these layers multiplied by the kernel, of large ones no more than it reads them once
    for; 0 makes them plain layers again.

    groups: of the layers, those that share a launch (`called_together`).
    """
    followers = {id(first): others for first, *others in groups}
    for layer in layers:
        if most:
            others = followers.get(id(layer), [])
            fitting = min(most, _BLOCK_ROWS) if any(map(is_large, [layer, *others])) else most
            state = _State(fitting, layer.weight, others)
            mx.eval(state.transposed)
            object.__setattr__(layer, _STATE, state)
            layer.__class__ = FewRowsLinear
        else:
            layer.__class__ = nn.Linear
            layer.__dict__.pop(_STATE, None)


@cache
def _kernel(count: int, memory: int) -> Any:
    """The kernel for so many products with the same rows, by blocks whose threads share so many bytes."""
    matrices, products = [f"w{i}" for i in range(count)], [f"product{i}" for i in range(count)]
    lists = {
        "const int sizes": [f"{name}_shape[0]" for name in matrices],
        "const T* const matrices": matrices,
        "T* const products": products,
    }
    return cuda_kernel(
        name=f"dflash_few_rows_{count}_products",
        input_names=["x", *matrices],
        output_names=products,
        file="few_rows_linear.cu",
        beginning="".join(f"{name}[] = {{{', '.join(items)}}};\n" for name, items in lists.items()),
        header="matrix_units.cu",
        shared_memory=memory,
    )
