"""Replaying the kept part of a block leaves the states that feeding only that part leaves, without the weights."""

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache
from tiny import VOCAB, join, plain_tokens
from tiny_families import family_target, unavailable

from dflash_mlx.caches.recurrence import Recorder
from dflash_mlx.caches.rollback import ReplayRollback
from dflash_mlx.caches.rows import Rows
from dflash_mlx.caches.trimming import leaves

EXACT = ["qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "nemotron_h", "mamba2", "falcon_h1", "kimi_linear"]
# Not every version of mlx-lm counts each row's tokens in these.
UNCOUNTED = ("nemotron_h", "mamba2", "falcon_h1")
FED = 6


@pytest.fixture(params=[*EXACT, "recurrent_gemma", "rwkv7"])
def target(request):
    if reason := unavailable(request.param):
        pytest.skip(reason)
    return family_target(request.param)


def fed_cache(target, tokens):
    cache = target.make_cache()
    target.forward(mx.array([tokens]), cache)
    return cache


def arrays(cache):
    """What a cache holds, without the unused ends of its buffers."""
    found = []
    for layer_cache in leaves(cache):
        if isinstance(layer_cache, RotatingKVCache):
            kept = min(layer_cache.offset, layer_cache.max_size - 1)  # what the next token still sees
            found += [layer_cache._temporal_order(array)[..., -kept:, :] for array in layer_cache.state[:2]]
        elif hasattr(layer_cache, "keys"):
            found += [array[..., : layer_cache.offset, :] for array in (layer_cache.keys, layer_cache.values)]
        else:
            found += layer_cache.cache
    return found


def states(cache):
    return [leaf.cache for leaf in leaves(cache) if not hasattr(leaf, "keys")]


@pytest.mark.parametrize("keep", range(FED + 1))
def test_a_block_partly_kept_equals_that_part_fed_alone(target, keep):
    tokens = [random.Random(0).randrange(VOCAB) for _ in range(15 + FED)]
    cache = fed_cache(target, tokens[:15])
    rollback = ReplayRollback(target.layers, target.forward)
    block = mx.array([tokens[15:]])
    with rollback.feeding(cache, block, revocable=True):
        target.forward(block, cache)
    rollback.commit(cache, fed=FED, keep=keep)
    expected = fed_cache(target, tokens[: 15 + keep])
    for found, wanted in zip(arrays(cache), arrays(expected), strict=True):
        assert mx.allclose(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", EXACT)
def test_a_replay_reads_no_projection(family):
    """With every projection's weights spoilt after the block was fed, the replayed states are still the right ones."""
    if reason := unavailable(family):
        pytest.skip(reason)
    target = family_target(family)
    tokens = [random.Random(0).randrange(VOCAB) for _ in range(15 + FED)]
    expected = fed_cache(target, tokens[:17])
    cache = fed_cache(target, tokens[:15])
    rollback = ReplayRollback(target.layers, target.forward)
    block = mx.array([tokens[15:]])
    with rollback.feeding(cache, block, revocable=True):
        mx.eval(target.forward(block, cache), states(expected))
    for linear in Recorder(target.layers)._linears:
        linear.weight = linear.weight * float("nan")
    rollback.commit(cache, fed=FED, keep=2)
    for found, wanted in zip(states(cache), states(expected), strict=True):
        assert all(mx.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("family", EXACT)
def test_rows_that_keep_different_parts_equal_each_row_fed_alone(family):
    """Replayed with every projection's weights spoilt."""
    if reason := unavailable(family):
        pytest.skip(reason)
    target, rng = family_target(family), random.Random(1)
    if family in UNCOUNTED and not target.takes_rows():
        pytest.skip("this version of mlx-lm does not count each row's tokens")
    starts, kept = (15, 1, 4, 9), (FED, 2, 1, 5)
    texts = [[rng.randrange(VOCAB) for _ in range(start + FED)] for start in starts]
    expected = [fed_cache(target, text[: n + keep]) for text, n, keep in zip(texts, starts, kept, strict=True)]
    batch, *others = [Rows.of(fed_cache(target, text[:n]), n) for text, n in zip(texts, starts, strict=True)]
    join(batch, *others)
    before = [list(state.cache) for state in batch.states]
    recorder = Recorder(target.layers)
    with recorder.recording(batch.states) as recording:
        logits = target.forward(mx.array([text[-FED:] for text in texts]), batch.layers)
    assert recording.is_complete(batch.states, FED, answers=4)
    assert recorder.takes_rows(recording)
    mx.eval(logits, states(batch.layers), [states(cache) for cache in expected])
    for linear in recorder._linears:
        linear.weight = linear.weight * float("nan")
    for state, arrays_before in zip(batch.states, before, strict=True):
        state.cache, state.lengths = arrays_before, mx.array(kept)
    recorder.replay_rows(recording, mx.arange(FED) < mx.array(kept)[:, None])
    for row, cache in enumerate(expected):
        for state, wanted in zip(batch.states, states(cache), strict=True):
            for found, array in zip(state.cache, wanted, strict=True):
                assert mx.allclose(found[row : row + 1], array, rtol=1e-3, atol=1e-4)


def test_hooks_come_off(target):
    classes = [type(module) for module in target.model.modules()]
    answer = plain_tokens(target, [1, 2, 3], 5)
    rollback, cache = ReplayRollback(target.layers, target.forward), target.make_cache()
    with pytest.raises(ValueError, match="broken"), rollback.feeding(cache, mx.array([[1, 2]]), revocable=True):
        raise ValueError("broken")
    assert [type(module) for module in target.model.modules()] == classes
    assert plain_tokens(target, [1, 2, 3], 5) == answer


def test_forwards_that_are_not_committed_can_be_taken_out(target):
    """One or two plain rounds run ahead; both leave without a trace, half of a forward does not."""
    tokens = [3, 1, 4, 1, 5]  # windows have not moved on, from which only one step at a time could be taken back
    cache = fed_cache(target, tokens)
    before = [mx.array(value) for value in arrays(cache)]
    for ahead in (1, 2):
        rollback = ReplayRollback(target.layers, target.forward)
        for token in tokens[:ahead]:
            with rollback.feeding(cache, mx.array([[token]]), revocable=False):
                target.forward(mx.array([[token]]), cache)
        assert not rollback.trim(cache, ahead + 1)
        assert rollback.trim(cache, ahead)
        assert all(mx.array_equal(a, b) for a, b in zip(arrays(cache), before, strict=True))
