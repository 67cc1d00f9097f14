"""What blocks see: against the rule written out position by position, and with rejected rows still in the caches."""

import mlx.core as mx
import pytest
from tiny import HIDDEN, context_rows, join, tiny_drafter

from dflash_mlx.drafters.attention_mask import block_mask

WINDOW, BLOCK = 5, 7


def visible(at, *, causal, window):
    """The official rule, for each row of a block written at position `at`: which positions it sees."""
    seen = []
    for row in range(BLOCK):
        own = at + row
        context = {p for p in range(at) if window is None or own - p < window}
        inside = {at + r for r in range(BLOCK) if window is None or abs(r - row) < window}
        seen.append(context | {p for p in inside if not causal or p <= own})
    return seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, WINDOW, 100])
@pytest.mark.parametrize(
    ("positions", "at"),
    [(7, [0]), (12, [3]), (40, [33]), (40, [9]), (7, [0, 0]), (40, [33, 0, 9]), (64, [4, 57, 5, 30]), (300, [3, 256])],
)
def test_each_block_sees_by_the_rule(positions, at, window, causal):
    seen = block_mask(BLOCK, positions, mx.array(at), causal=causal, window=window)
    numbers = mx.broadcast_to(mx.arange(positions)[:, None], (len(at), 1, positions, 1))
    read = seen.read(numbers)[:, 0, :, 0].tolist()
    assert seen.mask.shape == (len(at), 1, BLOCK, len(read[0]))
    for start, own, mask in zip(at, read, seen.mask[:, 0].tolist(), strict=True):
        found = [{p for p, sees in zip(own, row, strict=True) if sees} for row in mask]
        assert found == visible(start, causal=causal, window=window)


def test_what_no_row_sees_is_not_read():
    for at in ([900], [3, 900]):
        seen = block_mask(BLOCK, 1024, mx.array(at), causal=False, window=WINDOW)
        assert seen.read(mx.zeros((len(at), 2, 1024, 4))).shape == (len(at), 2, WINDOW - 1 + BLOCK, 4)


KINDS = {
    "full": {},
    "causal": {"is_causal": True},
    "all sliding": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6, "is_causal": False},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
}


@pytest.fixture(params=KINDS)
def drafter(request):
    return tiny_drafter(**KINDS[request.param])


def cache_of(drafter, features):
    cache = drafter.make_cache()
    if features.shape[1]:
        drafter.extend_context(features, cache)
    return cache


def test_rejected_rows_are_not_seen(drafter):
    """Caches with rejected rows at their end draft what caches without them draft."""
    features = mx.random.normal((1, 20, 2 * HIDDEN), key=mx.random.key(0))
    block = mx.random.normal((1, 5, HIDDEN), key=mx.random.key(1))
    clean, dirty = cache_of(drafter, features[:, :16]), cache_of(drafter, features)
    expected = drafter(block, context_rows(drafter, clean, 5))
    found = drafter(block, context_rows(drafter, dirty, 5, length=16))
    assert mx.allclose(found, expected, atol=1e-5).item()


def test_several_blocks_are_drafted_as_each_alone(drafter):
    """Rows of different lengths, an empty one and one with rejected rows among them."""
    features = mx.random.normal((4, 30, 2 * HIDDEN), key=mx.random.key(0))
    blocks = mx.random.normal((4, 5, HIDDEN), key=mx.random.key(1))
    lengths = [13, 0, 30, 22]
    caches = [cache_of(drafter, features[i : i + 1, :n]) for i, n in enumerate([13, 0, 30, 27])]

    def rows(i):
        return context_rows(drafter, caches[i], 5, length=lengths[i])

    batch = rows(0)
    join(batch, rows(1), rows(2), rows(3))
    found = drafter(blocks, batch)
    for i in range(4):
        assert mx.allclose(found[i : i + 1], drafter(blocks[i : i + 1], rows(i)), atol=1e-5).item()
