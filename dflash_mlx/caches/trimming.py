"""Taking the newest positions out of one layer's key and value cache, exactly: as if they had never been fed.

mlx-lm's own `trim` is right for caches that keep everything. A sliding window (`RotatingKVCache`) can go back further
than mlx-lm allows: feeding a block of S tokens leaves `max_size - 1 + S` keys in order of time, so that each of the S
queries has its whole window, and with the last n <= S keys cut off, the next query still finds the
`max_size - 1` keys before it. So a rejected block never costs a key that is still needed.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

# Notes on a window at which of its lengths it has a filler (`fill_window`).
_FILLER_AT = "_dflash_filler_at"
_FULL = (KVCache, QuantizedKVCache, ConcatenateKVCache)


def leaves(caches: list[Any]) -> list[Any]:
    """The caches themselves, with each `CacheList` taken apart."""
    found: list[Any] = []
    for layer_cache in caches:
        found += leaves(list(layer_cache.caches)) if isinstance(layer_cache, CacheList) else [layer_cache]
    return found


def is_trimmed(leaf: Any) -> bool:
    """Whether positions leave a cache by `trim`; other caches (recurrent states) are saved and restored instead."""
    kind = type(leaf)
    return kind in (*_FULL, ChunkedKVCache) or (kind is RotatingKVCache and leaf.keep == 0)


def can_trim(leaf: Any, count: int) -> bool:
    """Whether the cache still holds every key that is needed once its last `count` positions are gone."""
    if count == 0:
        return True
    length = int(leaf.offset) - count
    if length < 0:
        return False
    if type(leaf) is RotatingKVCache:
        return held(leaf) - count >= min(length, leaf.max_size - 1)
    if type(leaf) is ChunkedKVCache:
        # A query may look back to the beginning of its chunk.
        return bool(leaf.start_position == 0 or length - leaf.chunk_size >= leaf.start_position)
    return True


def trim(leaf: Any, count: int) -> None:
    """Take the last `count` positions out of a cache for which `can_trim` holds."""
    if count == 0:
        return
    if type(leaf) is RotatingKVCache:
        _trim_window(leaf, count)
        return
    trimmed = leaf.trim(count)
    assert trimmed == count, f"asked a cache to trim {count} positions, it trimmed {trimmed}"


def held(window: RotatingKVCache) -> int:
    """How many of the newest positions a sliding window holds, those that are no longer needed included."""
    if window.keys is None:
        return 0
    filler = getattr(window, _FILLER_AT, None) == window.offset
    return min(int(window.offset), int(window.keys.shape[2]) - filler)


def newest(window: RotatingKVCache, array: mx.array) -> mx.array:
    """A window's keys or values, (1, heads, held, head_dim), in order of time."""
    ordered = window._temporal_order(array)
    return ordered[..., ordered.shape[2] - held(window) :, :]


def _trim_window(window: RotatingKVCache, count: int) -> None:
    """Put a window in order of time and cut its end off."""
    left = held(window) - count
    arrays: tuple[Any, Any] = window.keys, window.values
    keys, values = (newest(window, array)[..., :left, :] for array in arrays)
    fill_window(window, keys, values, window.offset - count)


def fill_window(window: RotatingKVCache, keys: mx.array, values: mx.array, length: int) -> None:
    """Have a window hold these newest positions (1, heads, n, head_dim), in order of time, of `length` in all.

    One key short of a full ring, mlx-lm's next step would write over the oldest key, which is still needed; a filler
    before it takes that place, until the next step.
    """
    window.offset = length
    setattr(window, _FILLER_AT, None)
    if keys.shape[2] == 0:
        window.keys, window.values, window._idx = None, None, 0
        return
    if keys.shape[2] == window.max_size - 1 and length > keys.shape[2]:
        keys, values = (mx.concatenate([array[..., :1, :], array], axis=2) for array in (keys, values))
        setattr(window, _FILLER_AT, length)
    window.keys, window.values, window._idx = keys, values, keys.shape[2]
