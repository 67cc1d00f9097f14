"""Key-value caches whose length only the device knows.

How many drafts a round keeps is decided on the device. With mlx-lm's KVCache the host must wait for that number before
it can build the next round, and the device waits for the host in turn. Here the length is an array: a round is written
behind whatever the last one kept, so the next round can be queued before the last one has run. Rows behind the length
are masked; the model's own code stays as it is, since it takes `cache.offset` and `cache.make_mask` as they come.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from dflash_mlx.targets.rounding import TOLERANCE, relative_difference

_STEP = 256


class DeviceLength:
    """The number of valid positions in a model's caches, () int32 on the device, and the room they have."""

    def __init__(self, capacity: int, value: mx.array) -> None:
        self.capacity, self.value = capacity, value

    def mask(self, rows: int) -> mx.array:
        """Which positions each of the next `rows` tokens may see: boolean (rows, capacity)."""
        return mx.arange(self.capacity)[None] <= self.value + mx.arange(rows)[:, None]


class DeviceKVCache:
    """Keys and values, (1, heads, capacity, head_dim), of which the first `length` rows count.

    Every layer of a model shares one `length`, which does not move by itself when rows are written.
    """

    def __init__(self, keys: mx.array, values: mx.array, length: DeviceLength) -> None:
        self.keys, self.values, self.length = keys, values, length

    @property
    def offset(self) -> mx.array:
        return self.length.value

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write rows (1, heads, L, head_dim) behind the length; returns all rows."""
        return self.write(keys, values, at=self.length.value)

    def write(self, keys: mx.array, values: mx.array, *, at: mx.array) -> tuple[mx.array, mx.array]:
        """Write rows (1, heads, L, head_dim) at a position; returns all rows.

        There must be room (`DeviceCaches.reserve`): the device does not check, and writes beyond its memory.
        """
        start = at.reshape(1)
        self.keys = mx.slice_update(self.keys, keys, start, axes=(2,))
        self.values = mx.slice_update(self.values, values, start, axes=(2,))
        return self.keys, self.values

    def grow(self) -> None:
        """Make as many rows as the length has room for."""
        missing = self.length.capacity - self.keys.shape[2]
        if missing > 0:
            padding = [(0, 0), (0, 0), (0, missing), (0, 0)]
            self.keys, self.values = mx.pad(self.keys, padding), mx.pad(self.values, padding)

    def make_mask(self, rows: int, *, window_size: int | None = None, return_array: bool = False) -> mx.array:
        mask = self.length.mask(rows)
        if window_size is None:
            return mask
        positions = self.length.value + mx.arange(rows)[:, None]
        return mask & (positions < mx.arange(self.length.capacity)[None] + window_size)


class DeviceCaches:
    """The caches of a model, `layers`, and their common `length`, to be set before they are used."""

    def __init__(self, layers: list[DeviceKVCache], length: DeviceLength, origins: Sequence[KVCache] = ()) -> None:
        self.layers, self.length, self.origins = layers, length, list(origins)

    @classmethod
    def stand_in(cls, caches: Sequence[KVCache]) -> "DeviceCaches":
        """In the place of filled caches of mlx-lm, which `give_back` returns."""
        keys = [cache.keys for cache in caches if cache.keys is not None]
        values = [cache.values for cache in caches if cache.values is not None]
        made = cls.of_arrays(mx.array(0, dtype=mx.int32), keys, values)
        made.origins = list(caches)
        for cache in caches:
            # A second reference would have every row copied when the first is written.
            cache.keys = cache.values = None
        return made

    @classmethod
    def of_arrays(cls, length: mx.array, keys: Sequence[mx.array], values: Sequence[mx.array]) -> "DeviceCaches":
        """Over arrays (1, heads, capacity, head_dim), of which the first `length`, (), rows count."""
        common = DeviceLength(keys[0].shape[2], length)
        return cls([DeviceKVCache(k, v, common) for k, v in zip(keys, values, strict=True)], common)

    def reserve(self, positions: int) -> None:
        """Make room for this many positions in all: what the host knows that the length cannot exceed."""
        if positions > self.length.capacity:
            self.length.capacity = -(-positions // _STEP) * _STEP
            for layer in self.layers:
                layer.grow()

    def give_back(self, length: int) -> None:
        """Put the first `length` positions back into the caches that these stand in for."""
        for origin, layer in zip(self.origins, self.layers, strict=True):
            origin.keys, origin.values, origin.offset = layer.keys, layer.values, length


def works_with(model: Any, vocab_size: int, caches: list[Any]) -> bool:
    """Whether a model of mlx-lm computes the same with device caches; `caches` are new ones of its own. Runs it."""
    if not caches or any(type(cache) is not KVCache for cache in caches):
        return False
    tokens = mx.array(np.random.default_rng(0).integers(0, vocab_size, (1, 9)))
    try:
        model(tokens[:, :5], cache=caches)
        device = DeviceCaches.stand_in(caches)
        device.length.value = mx.array(5)
        found = model(tokens[:, 5:], cache=device.layers)
        device.give_back(5)
        expected = model(tokens[:, 5:], cache=caches)
    except Exception:  # model code that wants a number for the length may fail in any way
        return False
    return relative_difference(found, expected) <= TOLERANCE[expected.dtype]
