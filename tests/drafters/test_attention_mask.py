"""What a block sees: against the rule written out position by position, and with rejected rows still in the cache."""

import mlx.core as mx
import pytest
from tiny import HIDDEN, tiny_drafter

from dflash_mlx.caches.rows import DeviceCaches
from dflash_mlx.drafters.attention_mask import look, look_in_place

WINDOW = 5


def visible(block, valid, *, causal, window):
    """The official rule, for each row: the context positions and the block's rows that it sees."""
    seen = []
    for row in range(block):
        at = valid + row
        context = {p for p in range(valid) if window is None or at - p < window}
        inside = {r for r in range(block) if window is None or abs(r - row) < window}
        seen.append((context, {r for r in inside if not causal or r <= row}))
    return seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, WINDOW, 100])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("held", "valid"), [(0, 0), (3, 3), (9, 9), (9, 4), (30, 29), (64, 7)])
def test_sight_is_the_rule(held, valid, on_device, window, causal):
    block = 7
    sight = look(block, held, mx.array(valid) if on_device else valid, causal=causal, window=window)
    positions = mx.arange(held).reshape(1, 1, held, 1)
    read = sight.read(positions).reshape(-1).tolist()
    assert sight.mask.shape == (block, len(read) + block)
    for mask, (context, inside) in zip(
        sight.mask.tolist(), visible(block, valid, causal=causal, window=window), strict=True
    ):
        assert {p for p, sees in zip(read, mask, strict=False) if sees} == context
        assert {r for r, sees in enumerate(mask[len(read) :]) if sees} == inside
    if window is not None:
        assert len(read) <= max(held, window)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, WINDOW, 100])
@pytest.mark.parametrize(("rows", "valid"), [(7, 0), (12, 3), (40, 33), (40, 9)])
def test_sight_of_a_block_written_into_the_cache(rows, valid, window, causal):
    block = 7
    sight = look_in_place(block, rows, mx.array(valid), causal=causal, window=window)
    read = sight.read(mx.arange(rows).reshape(1, 1, rows, 1)).reshape(-1).tolist()
    expected = visible(block, valid, causal=causal, window=window)
    for mask, (context, inside) in zip(sight.mask.tolist(), expected, strict=True):
        assert {p for p, sees in zip(read, mask, strict=True) if sees} == context | {valid + r for r in inside}
    if window is not None:
        assert len(read) <= window - 1 + block


def test_all_is_seen_without_a_mask():
    assert look(4, 9, None, causal=False, window=None).mask is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6, "is_causal": False},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    ],
    ids=["full", "all sliding", "mixed"],
)
@pytest.mark.parametrize("device", [False, True])
def test_rejected_rows_are_not_seen(changes, device):
    """A cache with rejected rows at its end drafts what a cache without them drafts."""
    drafter = tiny_drafter(**changes)
    features = mx.random.normal((1, 20, 2 * HIDDEN), key=mx.random.key(0))
    block = mx.random.normal((1, 5, HIDDEN), key=mx.random.key(1))
    clean, dirty = drafter.make_cache(), drafter.make_cache()
    drafter.extend_context(features[:, :16], clean)
    drafter.extend_context(features, dirty)
    if device:
        caches = DeviceCaches.stand_in(dirty)
        caches.length.value = mx.array(16)
        caches.reserve(40)
        dirty = caches.layers
    found = drafter(block, dirty, context_length=mx.array(16))
    assert mx.allclose(found, drafter(block, clean), atol=1e-5).item()
