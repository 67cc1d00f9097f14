"""Key-value caches whose length only the device knows.

How many drafts a round keeps is decided on the device. With mlx-lm's KVCache the host must wait for that number before
it can build the next round, and the device waits for the host in turn. Here the length is an array: a round is written
behind whatever the last one kept, so the next round can be queued before the last one has run. Rows behind the length
are masked; the model's own code stays as it is, since it takes `cache.offset` and `cache.make_mask` as they come.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from dflash_mlx.targets.rounding import TOLERANCE, relative_difference

_STEP = 256


class DeviceLength:
    """The number of valid positions in a model's caches, () int32 on the device, and the room they have."""

    def __init__(self, capacity: int) -> None:
        self.value = mx.array(0, dtype=mx.int32)
        self.capacity = capacity

    def set(self, length: int | mx.array) -> None:
        self.value = mx.array(length, dtype=mx.int32)

    def reserve(self, positions: int) -> None:
        """Make room for this many positions in all: what the host knows that the length cannot exceed."""
        if positions > self.capacity:
            self.capacity = -(-positions // _STEP) * _STEP

    def mask(self, rows: int) -> mx.array:
        """Which positions each of the next `rows` tokens may see: boolean (rows, capacity)."""
        return mx.arange(self.capacity)[None] <= self.value + mx.arange(rows)[:, None]


class DeviceKVCache:
    """Stands in for a filled KVCache; `give_back` returns what it holds to it.

    Every layer of a model shares one `length`, which does not move by itself when keys are written.
    """

    def __init__(self, cache: KVCache, length: DeviceLength) -> None:
        assert cache.keys is not None
        assert cache.values is not None
        self.origin, self.length = cache, length
        self.keys, self.values = cache.keys, cache.values

    @property
    def offset(self) -> mx.array:
        return self.length.value

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (1, heads, L, head_dim) behind the length; returns all rows, (1, heads, capacity, head_dim)."""
        start = self.length.value.reshape(1)
        self.keys = mx.slice_update(self._grown(self.keys), keys, start, axes=(2,))
        self.values = mx.slice_update(self._grown(self.values), values, start, axes=(2,))
        return self.keys, self.values

    def make_mask(self, rows: int, *, window_size: int | None = None, return_array: bool = False) -> mx.array:
        mask = self.length.mask(rows)
        if window_size is None:
            return mask
        positions = self.length.value + mx.arange(rows)[:, None]
        return mask & (positions < mx.arange(self.length.capacity)[None] + window_size)

    def give_back(self, length: int) -> KVCache:
        """The cache that this one stands in for, holding the first `length` positions."""
        self.origin.keys, self.origin.values, self.origin.offset = self.keys, self.values, length
        return self.origin

    def _grown(self, rows: mx.array) -> mx.array:
        missing = self.length.capacity - rows.shape[2]
        return mx.pad(rows, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing > 0 else rows


def held_rows(cache: KVCache | DeviceKVCache) -> tuple[mx.array, mx.array] | None:
    """Keys and values in a cache, (1, heads, rows, head_dim); a device cache's include rows behind its length."""
    if isinstance(cache, DeviceKVCache):
        return cache.keys, cache.values
    if cache.keys is None or cache.values is None:
        return None
    return cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]


def stand_in(caches: Sequence[Any]) -> tuple[list[DeviceKVCache], DeviceLength]:
    """Device caches for filled KVCaches, with the length that they share (to be set)."""
    length = DeviceLength(caches[0].keys.shape[2])
    return [DeviceKVCache(cache, length) for cache in caches], length


def works_with(model: Any, vocab_size: int, caches: list[Any]) -> bool:
    """Whether a model of mlx-lm computes the same with device caches; `caches` are new ones of its own. Runs it."""
    if not caches or any(type(cache) is not KVCache for cache in caches):
        return False
    tokens = mx.arange(8)[None] % vocab_size
    try:
        model(tokens[:, :5], cache=caches)
        device_caches, length = stand_in(caches)
        length.set(5)
        length.reserve(8)
        found = model(tokens[:, 5:], cache=device_caches)
        for cache in device_caches:
            cache.give_back(5)
        expected = model(tokens[:, 5:], cache=caches)
    except Exception:  # model code that wants a number for the length may fail in any way
        return False
    return relative_difference(found, expected) <= TOLERANCE[expected.dtype]
