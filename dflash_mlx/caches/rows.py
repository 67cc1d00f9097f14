"""Caches of several answers at once: a row for each, whose length only the device knows.

How many drafts a round keeps is decided on the device, and differs from row to row. With mlx-lm's own caches the host
would have to wait for those numbers, and every row would have to keep equally many. Here the lengths are an array
(B,): each row is written at its own positions, the rows after its length are masked, and nothing is ever trimmed,
rolled or padded. What was rejected is simply written over by the next round. The models' own code stays as it is,
since it takes `cache.offset` and `cache.make_mask` as they come (row_layers.py).

A tree of drafts leaves the kept rows between rejected ones. There they stay, out of order, and `RowLengths.placed` says
where each position is, until something needs them in order (`Rows.tidy`).
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from dflash_mlx.caches.row_layers import RowKVCache, RowLengths, RowStates
from dflash_mlx.caches.trimming import fill_window, held, leaves, newest
from dflash_mlx.runtime import backend
from dflash_mlx.tree_steps import NOWHERE

# Positions by which caches grow, how many more than they hold there is room for on CUDA, and by how many those that are
# looked at grow elsewhere.
_STEP, _AHEAD, _SEEN_STEP = 256, 256, 32
# Positions that a window keeps beyond those it needs, so that a conversation can go back a little.
_SPARE = 32
# Bytes of a layer's keys from which rows are put together layer by layer.
_LARGE = 2**24


class Rows:
    """A model's caches for B answers: `layers`, as the model takes them, and their common `lengths`."""

    def __init__(self, layers: list[Any], lengths: RowLengths, starts: list[int]) -> None:
        """starts: of each row, the first position that its windows hold."""
        self.layers, self.lengths, self.starts = layers, lengths, starts
        parts = leaves(layers)
        self.attention: list[RowKVCache] = [leaf for leaf in parts if isinstance(leaf, RowKVCache)]
        self.states: list[RowStates] = [leaf for leaf in parts if isinstance(leaf, RowStates)]
        # Rows that the buffers hold, some of which may no longer be in use.
        self._allocated = lengths.rows

    @classmethod
    def of(cls, caches: Sequence[Any], length: int) -> "Rows":
        """One row with what mlx-lm's caches of one answer hold, `length` positions. The arrays move over here."""
        parts = leaves(list(caches))
        buffers = [int(leaf.keys.shape[2]) for leaf in parts if type(leaf) is KVCache and leaf.keys is not None]
        windows = [held(leaf) for leaf in parts if isinstance(leaf, RotatingKVCache)]
        lengths = RowLengths(mx.array([length], dtype=mx.int32), max([*buffers, room_for(length)]))
        start = length - min([*windows, length])
        return cls([_to_row(cache, lengths, length) for cache in caches], lengths, [start])

    @classmethod
    def blank(cls, caches: Sequence[Any], rows: int, positions: int) -> "Rows":
        """So many rows without a position, and room for some, for a model with such caches (see `fill_blank`)."""
        lengths = RowLengths(mx.zeros((rows,), dtype=mx.int32), room_for(positions))
        return cls([_blank(cache, lengths) for cache in caches], lengths, [0] * rows)

    @property
    def count(self) -> int:
        return self.lengths.rows

    def take_arrays(self) -> list[mx.array]:
        """All keys and values, in the order of the layers; no reference to them stays here."""
        arrays: list[Any] = [array for leaf in self.attention for array in leaf.state]
        for leaf in self.attention:
            del leaf.keys, leaf.values
        return arrays

    def put_arrays(self, arrays: Sequence[mx.array]) -> None:
        """Set what `take_arrays` returns."""
        for leaf, keys, values in zip(self.attention, arrays[::2], arrays[1::2], strict=True):
            leaf.keys, leaf.values = keys, values

    def without_arrays(self) -> "Rows":
        """The form of these rows: layers whose arrays are still to be set."""
        lengths = RowLengths(self.lengths.value, self.lengths.capacity)
        return Rows([_form(layer, lengths) for layer in self.layers], lengths, [])

    def reserve(self, positions: int) -> None:
        """Make room for this many positions in each row: what the host knows that no length can exceed."""
        if self.lengths.placed is not None:
            self.lengths.used = positions = max(self.lengths.used, positions)
        if positions > self.lengths.capacity:
            self._grow(room_for(positions))
        self.lengths.seen = min(self.lengths.capacity, -(-positions // _SEEN_STEP) * _SEEN_STEP)
        if backend().kind == "cuda":
            # MLX compiles anew for each shape there, and a few more positions cost nothing.
            self.lengths.seen = self.lengths.capacity

    def scatter(self) -> None:
        """Let the only row's positions be out of order from now on."""
        lengths = self.lengths
        assert self.count == 1
        if lengths.placed is None:
            places = mx.arange(lengths.capacity)
            lengths.placed, lengths.used = mx.where(places < lengths.value, places, NOWHERE), lengths.seen

    def tidy(self) -> None:
        """Put positions in order again, if they are not."""
        lengths = self.lengths
        if lengths.placed is None:
            return
        order, arrays = mx.argsort(lengths.placed), self.take_arrays()
        for i in range(len(arrays)):
            # MLX gives what is taken an order in memory of its own, in which products take longer.
            arrays[i] = _computed(mx.contiguous(mx.take(arrays[i], order, axis=2)))
        mx.async_eval(arrays)
        self.put_arrays(arrays)
        lengths.placed = lengths.places = None

    def _grow(self, capacity: int) -> None:
        lengths = self.lengths
        lengths.capacity = lengths.seen = capacity
        if lengths.placed is not None:
            missing = capacity - lengths.placed.shape[0]
            lengths.placed = mx.pad(lengths.placed, (0, missing), constant_values=NOWHERE)
        arrays = self.take_arrays()
        for i in range(len(arrays)):
            arrays[i] = _computed(self._padded(arrays[i]))
        # By itself, not at the beginning of a pass, which MLX on CUDA would then plan anew.
        mx.async_eval(arrays)
        self.put_arrays(arrays)

    def _padded(self, array: mx.array) -> mx.array:
        missing = self.lengths.capacity - array.shape[2]
        return mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing > 0 else array

    def add(self, count: int) -> None:
        """Add this many rows that hold nothing."""
        self.tidy()

        def longer(array: mx.array) -> mx.array:
            return mx.pad(array, [(0, count), *[(0, 0)] * (array.ndim - 1)])

        arrays = self.take_arrays()
        for i in range(len(arrays)):
            arrays[i] = _computed(longer(arrays[i]))
        self.put_arrays(arrays)
        for state in self.states:
            state.cache = [longer(array) for array in state.cache]
        self.lengths.value = longer(self.lengths.value)
        self.starts += [0] * count
        self._allocated = max(self._allocated, len(self.starts))

    def repeat(self, times: int) -> None:
        """Have the only row so many times."""
        self.tidy()
        self.put_arrays([mx.repeat(array, times, axis=0) for array in self.take_arrays()])
        for state in self.states:
            state.cache = [mx.repeat(array, times, axis=0) for array in state.cache]
        self.lengths.value = mx.repeat(self.lengths.value, times)
        self.starts *= times
        self._allocated = max(self._allocated, len(self.starts))

    def take_over(self, other: "Rows", places: Sequence[int]) -> None:
        """Take the rows of another, each into the place of one that holds nothing."""
        self.tidy()
        other.tidy()
        held = other.lengths.capacity
        if held > self.lengths.capacity:
            # As large as theirs, which have room ahead already.
            self._grow(held)
        self.reserve(held)
        arrays, theirs = self.take_arrays(), other.take_arrays()
        for row, place in enumerate(places):
            for own, arriving in zip(arrays, theirs, strict=True):
                own[place : place + 1, :, :held] = arriving[row : row + 1]
            # Row by row: on CUDA, MLX plans operations together, and these are the same ones each time.
            mx.async_eval(arrays)
        self.put_arrays(arrays)
        index = mx.array(list(places))
        for state, new in zip(self.states, other.states, strict=True):
            state.cache = [mx.array(own) for own in state.cache]
            for own, arriving in zip(state.cache, new.cache, strict=True):
                own[index] = arriving
        self.lengths.value = mx.array(self.lengths.value)
        self.lengths.value[index] = other.lengths.value
        for place, start in zip(places, other.starts, strict=True):
            self.starts[place] = start

    def keep(self, rows: Sequence[int]) -> None:
        """Leave only these rows, in this order; cheap where few of them change their place."""
        self.tidy()
        index = mx.array(list(rows))
        arrays = self.take_arrays()
        moves = [(to, row) for to, row in enumerate(rows) if to != row]
        if 2 * len(rows) <= self._allocated:
            self._allocated = len(rows)
            arrays = [array[index] for array in arrays]
        else:
            # Read before they are written: otherwise MLX copies whole buffers. Row by row: see `take_over`.
            moved = []
            for _, row in moves:
                moved.append([mx.contiguous(array[row : row + 1]) for array in arrays])
                mx.async_eval(moved[-1])
            for (to, _), parts in zip(moves, moved, strict=True):
                for array, part in zip(arrays, parts, strict=True):
                    array[to : to + 1] = part
                mx.async_eval(arrays)
            arrays = [array[: len(rows)] for array in arrays]
        self.put_arrays(arrays)
        for state in self.states:
            state.cache = [array[index] for array in state.cache]
        self.lengths.value = self.lengths.value[index]
        self.starts = [self.starts[row] for row in rows]

    def give_back(self, row: int, length: int, caches: Sequence[Any], *, states: Sequence[list[mx.array]] = ()) -> None:
        """Put the first `length` positions of a row into mlx-lm's caches of one answer: those that `of` emptied.

        A single row's arrays move; others are copied, once. states: of each recurrent layer, those to be given back.
        """
        self.tidy()
        recurrent = iter(states)
        given: list[Any] = []
        for leaf, origin in zip(leaves(self.layers), leaves(list(caches)), strict=True):
            if isinstance(leaf, RowStates):
                origin.cache = [mx.contiguous(array[row : row + 1]) for array in next(recurrent)]
            else:
                _give(leaf, row, length, origin, self.starts[row])
            given.append(origin.state)
        # At once: while they are still to be read, MLX would copy whole buffers for what is written next.
        mx.async_eval(given)


def fits(caches: Sequence[Any]) -> bool:
    """Whether `Rows` knows caches of these kinds."""
    return bool(caches) and all(_kind_fits(leaf) for leaf in leaves(list(caches)))


def _kind_fits(leaf: Any) -> bool:
    return type(leaf) in (KVCache, ArraysCache) or (type(leaf) is RotatingKVCache and leaf.keep == 0)


def _form(layer: Any, lengths: RowLengths) -> Any:
    if isinstance(layer, CacheList):
        return CacheList(*[_form(part, lengths) for part in layer.caches])
    nothing = mx.array(0)
    return RowKVCache(nothing, nothing, lengths, layer.window)


def _to_row(cache: Any, lengths: RowLengths, length: int) -> Any:
    if isinstance(cache, CacheList):
        return CacheList(*[_to_row(part, lengths, length) for part in cache.caches])
    if isinstance(cache, ArraysCache):
        states = RowStates(len(cache.cache))
        states.cache, cache.cache = cache.cache, [None] * len(cache.cache)
        return states
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    arrays: tuple[Any, Any] = cache.keys, cache.values
    keys, values = (_placed(cache, array, lengths.capacity, length) for array in arrays)
    # A second reference would have every position copied when the first token is written.
    cache.keys = cache.values = None
    return RowKVCache(keys, values, lengths, window)


def _blank(cache: Any, lengths: RowLengths) -> Any:
    """A layer of rows that hold nothing, of the kind and sizes of one answer's `cache`."""
    rows = lengths.rows
    if isinstance(cache, CacheList):
        return CacheList(*[_blank(part, lengths) for part in cache.caches])
    if isinstance(cache, ArraysCache):
        states, arrays = RowStates(len(cache.cache)), list[Any](cache.cache)
        states.cache = [mx.zeros((rows, *array.shape[1:]), array.dtype) for array in arrays]
        return states
    held_arrays: tuple[Any, Any] = cache.keys, cache.values
    keys, values = (
        mx.zeros((rows, array.shape[1], lengths.capacity, array.shape[3]), array.dtype) for array in held_arrays
    )
    window = cache.max_size if isinstance(cache, RotatingKVCache) else None
    return RowKVCache(keys, values, lengths, window)


def _placed(cache: Any, array: mx.array, capacity: int, length: int) -> mx.array:
    """A cache's keys or values, each position at its own place in `capacity` places."""
    if isinstance(cache, RotatingKVCache):
        array = newest(cache, array)
        if array.shape[2] == 0:
            return mx.zeros((*array.shape[:2], capacity, array.shape[3]), array.dtype)
        return mx.pad(array, [(0, 0), (0, 0), (length - array.shape[2], capacity - length), (0, 0)])
    missing = capacity - array.shape[2]
    return mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else array


def _give(leaf: RowKVCache, row: int, length: int, origin: Any, start: int) -> None:
    arrays: tuple[mx.array, ...] = leaf.keys, leaf.values
    if isinstance(origin, RotatingKVCache):
        first = max(start, length - origin.max_size - _SPARE)
        keys, values = (mx.contiguous(array[row : row + 1, :, first:length]) for array in arrays)
        fill_window(origin, keys, values, length)
        return
    if leaf.keys.shape[0] > 1:
        arrays = tuple(mx.contiguous(array[row : row + 1, :, : room_for(length)]) for array in arrays)
    origin.keys, origin.values = arrays
    origin.offset = length


def _computed(array: mx.array) -> mx.array:
    """A large array is computed at once, so that one after the other is held twice, and not all of them."""
    if array.nbytes > _LARGE:
        mx.eval(array)
    return array


def room_for(positions: int) -> int:
    """Room for this many positions, in the steps by which caches grow.

    On CUDA, where each new size takes MLX a tenth of a second, there is room for an answer of some length, and larger
    caches grow in larger steps, up to half of their size.
    """
    step = _STEP
    if backend().kind == "cuda":
        positions += _AHEAD
        step = max(step, (1 << positions.bit_length()) // 4)
    return -(-max(positions, 1) // step) * step
