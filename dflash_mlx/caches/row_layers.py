"""A layer's cache of several answers at once, as the models take it; rows.py puts those of all layers together.

- Full attention and sliding windows: `RowKVCache`. A window is a mask over the same buffers.
- Recurrent layers: `RowStates`. A state cannot be masked; `target_caches.py` replays it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from dflash_mlx.runtime import backend
from dflash_mlx.tree_steps import NOWHERE


@dataclass(frozen=True)
class TreePass:
    """A pass over the rows of a tree: their positions (R,), the mask (R, seen), the position that each place in the
    buffers has then (seen,), and the places (R,) at which the rows are written; None: those after the length."""

    row_positions: mx.array
    mask: mx.array
    positions: mx.array
    places: mx.array | None = None

    @cached_property
    def order(self) -> mx.array:
        """For each row all places, (R, seen): first those that it sees without a window, by their positions."""
        return mx.argsort(mx.where(self.mask, self.positions, NOWHERE), axis=-1)


class RowLengths:
    """How many positions of each of B rows count, `value` (B,) int32 on the device, and the room that rows have.

    tree: while the rows of a tree are fed; B is 1. placed: (capacity,) int32, which position each place of the only
    row's buffers holds, where they are out of order; positions that do not count are none.
    """

    def __init__(self, value: mx.array, capacity: int) -> None:
        self.capacity, self.value = capacity, value
        # How many positions of the buffers are looked at; no row has more.
        self.seen = capacity
        self.tree: TreePass | None = None
        self.placed: mx.array | None = None
        # Where the newest tree's rows are, (R,), how many places may have been used since they were in order, and how
        # many single tokens have come since the newest tree.
        self.places: mx.array | None = None
        self.used = self.alone = 0
        # What `index` has said of the lengths, or of the tree's places, by the shape.
        self._indexed: mx.array | None = None
        self._indices: dict[tuple[int, ...], mx.array] = {}

    @property
    def rows(self) -> int:
        return int(self.value.shape[0])

    @property
    def positions(self) -> mx.array:
        """What rotary embeddings take: the position of each row's first token (B,), or of each of a tree's (R,)."""
        return self.value if self.tree is None else self.tree.row_positions

    def index(self, shape: Sequence[int]) -> mx.array:
        """Where the next tokens of each row, or the rows of a tree, are written, for arrays (B, heads, count, size)."""
        places = self.tree.places if self.tree is not None else None
        given = self.value if places is None else places
        # Once for all layers, since on a fast GPU every operation shows.
        if self._indexed is not given:
            self._indexed, self._indices = given, {}
        found = self._indices.get(tuple(shape))
        if found is None:
            at = self.value[:, None] + mx.arange(shape[2]) if places is None else places[None]
            found = self._indices[tuple(shape)] = mx.broadcast_to(at[:, None, :, None], shape)
        return found

    def mask(self, count: int, window: int | None) -> mx.array:
        """Which positions each of the next `count` tokens may see: boolean, (B, 1, count, seen)."""
        if self.tree is not None:
            own, mask, positions = self.tree.row_positions[:, None], self.tree.mask[None, None], self.tree.positions
        else:
            positions = mx.arange(self.seen)
            own = self.value[:, None, None, None] + mx.arange(count)[:, None]
            mask = positions <= own
        return mask if window is None else mask & (own < positions + window)


class RowKVCache:
    """One layer's keys and values, (B, heads, capacity, head_dim), of which each row's first positions count.

    Every layer of a model shares one `lengths`, which does not move by itself when tokens are written. `window`: how
    many positions a token sees, itself included, where the layer slides.
    """

    def __init__(self, keys: mx.array, values: mx.array, lengths: RowLengths, window: int | None = None) -> None:
        self.keys, self.values, self.lengths, self.window = keys, values, lengths, window

    @property
    def offset(self) -> mx.array:
        return self.lengths.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the next L tokens of each row, (B, heads, L, head_dim); returns the positions that are seen.

        There must be room (`Rows.reserve`): the device does not check, and writes beyond its memory.
        """
        self.write(keys, values)
        return self.keys_and_values()

    def write(self, keys: mx.array, values: mx.array) -> None:
        """Write tokens after each row's length, or at a tree's places, (B, heads, L, head_dim)."""
        self.keys, self.values = self._written(self.keys, keys), self._written(self.values, values)

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """What is computed when the cache is."""
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """As the last `update_and_fetch` returned them: for layers that share another's."""
        seen = self.lengths.seen
        if seen == self.lengths.capacity:
            return self.keys, self.values
        return self.keys[:, :, :seen], self.values[:, :, :seen]

    def _written(self, array: mx.array, tokens: mx.array) -> mx.array:
        lengths = self.lengths
        follows = lengths.tree is None or lengths.tree.places is None
        # On CUDA a place that only the device knows takes MLX a launch of its own, for each array.
        if follows and array.shape[0] == 1 and backend().kind != "cuda":
            return mx.slice_update(array, tokens, lengths.value, axes=(2,))
        return mx.put_along_axis(array, lengths.index(tokens.shape), tokens.astype(array.dtype), axis=2)

    def in_order(self, array: mx.array, length: int) -> mx.array:
        """The first `length` positions of every row of these keys or values."""
        if self.lengths.placed is None:
            return array[:, :, :length]
        return mx.take(array, mx.argsort(self.lengths.placed)[:length], axis=2)

    def make_mask(self, count: int, *, window_size: int | None = None, return_array: bool = False) -> mx.array:
        return self.lengths.mask(count, window_size or self.window)


class RowStates(ArraysCache):
    """One recurrent layer's states of B rows; `lengths` (B,), while set, says how many of the tokens fed count."""

    cache: Any  # list[mx.array]
    lengths: Any  # mx.array | None
