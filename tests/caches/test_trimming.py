"""Trimmed caches show a query the keys that it would see had the trimmed positions never been fed."""

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from dflash_mlx.caches.trimming import can_trim, leaves, trim

WINDOW = 8


def feed(cache, start, count):
    """Feed keys that carry their own position; return the positions that each of the `count` queries may see."""
    positions = mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, count, 1)
    mask = cache.make_mask(count, window_size=WINDOW, return_array=True) if count > 1 else None
    keys, values = cache.update_and_fetch(positions, positions)
    assert mx.array_equal(keys, values)
    shown = keys.reshape(-1).tolist()
    if mask is None:
        return [sorted(shown)]
    assert mask.shape == (count, len(shown))
    return [sorted(key for key, seen in zip(shown, row, strict=True) if seen) for row in mask.tolist()]


def window_of(position):
    return [float(p) for p in range(max(0, position - WINDOW + 1), position + 1)]


def test_a_sliding_window_after_any_feeding_and_trimming():
    rng = random.Random(0)
    refused = filled = 0
    for _ in range(300):
        cache, length, newest = RotatingKVCache(max_size=WINDOW), 0, 0
        cache.step = rng.choice([3, 256])  # the buffer grows by so many positions
        for _ in range(12):
            count = rng.choice([1, 1, 1, 2, 5, WINDOW, 20])
            assert feed(cache, length, count) == [window_of(p) for p in range(length, length + count)]
            length, newest = length + count, count
            drop = rng.randint(0, newest + 2)
            if can_trim(cache, drop):
                trim(cache, drop)
                length -= drop
                assert cache.offset == length
                filled += length >= WINDOW and drop > 0
            else:
                refused += 1
                assert drop > newest, "the newest block can always be taken back"
    assert refused > 50
    assert filled > 300


def test_a_chunked_cache_keeps_the_chunk_of_the_next_query():
    cache = ChunkedKVCache(WINDOW)
    keys = mx.zeros((1, 1, 30, 1))
    cache.update_and_fetch(keys, keys)
    cache.start_position = 30 - WINDOW  # what lies before it is gone
    cache.offset += 5
    assert can_trim(cache, 5)
    assert not can_trim(cache, 6)


def test_parts_of_a_cache_list():
    inner = [KVCache(), KVCache(), RotatingKVCache(max_size=WINDOW)]
    assert leaves([inner[0], CacheList(inner[1], CacheList(inner[2]))]) == inner


def test_more_than_is_there():
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 3, 1)), mx.zeros((1, 1, 3, 1)))
    assert can_trim(cache, 3)
    assert not can_trim(cache, 4)
    with pytest.raises(AssertionError, match="asked a cache to trim 4"):
        trim(cache, 4)
