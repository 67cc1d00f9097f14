"""Trimmed caches show a query the keys that it would see had the trimmed positions never been fed."""

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from dflash_mlx.caches.trimming import can_trim, fill_window, held, is_trimmed, leaves, newest, trim

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


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
def test_a_window_trimmed_twice_is_right(first, second):
    """Both out of the newest block: its next query sees its window, and so do those after it."""
    for length in (3, WINDOW - 3, 2 * WINDOW):
        cache = RotatingKVCache(max_size=WINDOW)
        feed(cache, 0, length)
        feed(cache, length, 6)
        for count in (first, second):
            assert can_trim(cache, count)
            trim(cache, count)
        left = length + 6 - first - second
        assert cache.offset == left
        for at in range(left, left + 3):
            assert feed(cache, at, 1) == [window_of(at)]
        assert feed(cache, left + 3, 4) == [window_of(at) for at in range(left + 3, left + 7)]


def test_a_filler_is_not_counted():
    """One key short of a full ring: the place in front is taken, but nothing more is held, and nothing can go."""
    cache = RotatingKVCache(max_size=WINDOW)
    positions = mx.arange(20 - WINDOW + 1, 20, dtype=mx.float32).reshape(1, 1, WINDOW - 1, 1)
    fill_window(cache, positions, positions, 20)
    assert cache.keys.shape[2] == WINDOW
    assert held(cache) == WINDOW - 1
    assert newest(cache, cache.keys).reshape(-1).tolist() == positions.reshape(-1).tolist()
    assert not can_trim(cache, 1)
    assert feed(cache, 20, 1) == [window_of(20)]
    assert held(cache) == WINDOW
    assert newest(cache, cache.keys).reshape(-1).tolist() == window_of(20)
    # What was a filler's place now holds a position, which can be taken back out.
    assert can_trim(cache, 1)


@pytest.mark.parametrize("length", [3, WINDOW - 1, WINDOW, 20])
def test_only_a_window_one_key_short_is_filled(length):
    """A filler costs a copy of the window, so there is none where nothing would be overwritten."""
    for count in range(1, 4):
        cache = RotatingKVCache(max_size=WINDOW)
        feed(cache, 0, length)
        trim(cache, count)
        short = held(cache) == WINDOW - 1 and length - count > WINDOW - 1
        assert cache.keys is None or cache.keys.shape[2] == held(cache) + short


def test_only_what_keeps_positions_is_trimmed():
    windows = RotatingKVCache(max_size=WINDOW), RotatingKVCache(max_size=WINDOW, keep=4)
    caches = [KVCache(), ChunkedKVCache(WINDOW), *windows, ArraysCache(2)]
    assert [is_trimmed(cache) for cache in caches] == [True, True, True, False, False]


def test_an_empty_window_is_as_new():
    cache = RotatingKVCache(max_size=WINDOW)
    feed(cache, 0, 5)
    trim(cache, 5)
    assert held(cache) == 0
    assert feed(cache, 0, 3) == [window_of(at) for at in range(3)]


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
