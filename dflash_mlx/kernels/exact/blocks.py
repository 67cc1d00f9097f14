"""Computing many rows in blocks of a few fixed sizes, so that a row's numbers do not depend on the others.

MLX chooses how to compute a product by its shape, and each way adds in an order of its own. Of one shape the way is
always the same. So rows are computed in blocks of a fixed size, the last one filled up with zeros. Several sizes are
used where they give the same bits; that is found out by computing numbers whose sum consists of rounding alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

# Rows in a block: the numbers that are tried.
SIZES = (1, 2, 4, 8, 16, 32, 64)
# How far rows are moved to find out whether their place counts: no multiple of any tile's size.
MOVED = 5
# The fewest rows by which sizes are compared.
_COMPARED = 4

# Takes arrays with equally many rows, (R, ...), and gives such arrays.
Function = Callable[..., Sequence[mx.array]]


def in_blocks(function: Function, arrays: Sequence[mx.array], sizes: Sequence[int]) -> Sequence[mx.array]:
    """What a function gives for all rows of the arrays (R, ...), called with blocks of these sizes (rising) alone."""
    count, first = int(arrays[0].shape[0]), 0
    arrays, parts = [in_order(array) for array in arrays], []
    while first < count:
        left = count - first
        size = next((size for size in sizes if size >= left), sizes[-1])
        block = [_filled(array[first : first + size], size) for array in arrays]
        found = function(*block)
        parts.append([array[:left] for array in found] if left < size else found)
        first += size
    return parts[0] if len(parts) == 1 else [mx.concatenate(list(column)) for column in zip(*parts, strict=True)]


def in_order(array: mx.array) -> mx.array:
    """The same numbers, row after row in memory: MLX chooses how to multiply by that, too.

    Flattened, it loses the strides that it may have along axes of length 1.
    """
    return mx.contiguous(array).flatten().reshape(array.shape)


def _filled(array: mx.array, rows: int) -> mx.array:
    missing = rows - array.shape[0]
    return mx.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)]) if missing else array


@dataclass(frozen=True)
class Agreement:
    """Which sizes of blocks give the same rows as blocks of `base` rows do.

    differences: by size, the largest difference of any number; of the base, between rows at different places.
    """

    base: int
    differences: dict[int, float]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that can be used together, rising."""
        return tuple(sorted(size for size, difference in self.differences.items() if difference == 0))


def compare_sizes(function: Function, arrays: Sequence[mx.array], *, base: int = 16) -> Agreement:
    """Call a function with blocks of each of `SIZES`, whose rows lie at other places than among all.

    arrays: (R, ...) with as many rows as the largest size. Where even the rows of blocks of `base` rows depend on their
    places, blocks of one row are the base.
    """
    expected = in_blocks(function, arrays, (base,))
    found = {size: _difference(function, arrays, expected, size) for size in SIZES}
    return Agreement(base, found) if found[base] == 0 or base == 1 else compare_sizes(function, arrays, base=1)


def _difference(function: Function, arrays: Sequence[mx.array], expected: Sequence[mx.array], size: int) -> float:
    """The most by which rows in blocks of a size differ from the expected ones."""
    rows = max(size, _COMPARED)
    moved = mx.array([(row + MOVED) % rows for row in range(rows)])
    found = in_blocks(function, [array[moved] for array in arrays], (size,))
    wanted = [array[moved] for array in expected]
    return max(largest_difference(*pair) for pair in zip(found, wanted, strict=True))


def largest_difference(one: mx.array, other: mx.array) -> float:
    """The most by which two numbers at the same place differ; infinite where one is not a number."""
    difference = float(mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max())
    return difference if difference == difference else float("inf")
