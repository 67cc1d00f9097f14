"""Blocks are fed, kept in part and given back as if what was rejected had never been there; models say how they can."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from tiny import FAMILIES, VOCAB, join, tiny_target
from tiny_families import family_target, unavailable

from dflash_mlx.caches.rows import Rows
from dflash_mlx.caches.target_caches import BatchCaches, SingleCaches, works_with
from dflash_mlx.decoding.batch import open_caches
from dflash_mlx.decoding.session import Session

IN_ROWS = ["llama", "llama, sliding", "qwen3_next", "kimi_linear", "lfm2"]
ALONE = ["recurrent_gemma", "rwkv7"]
PROMPTS = [[(7 * i + 3 * length) % VOCAB for i in range(length)] for length in (6, 20, 1)]
BLOCK, KEPT, MORE = [1, 2, 3, 4, 5, 6], (2, 6, 1), [7, 8]


@pytest.fixture(scope="module")
def target(request):
    if reason := unavailable(request.param):
        pytest.skip(reason)
    return family_target(request.param)


def session_with(target, prompt):
    session = Session(target, None)
    session.feed(prompt)
    return session


def feed(target, caches, *blocks, at):
    return caches.feed(target.pass_for(()), mx.array(blocks), at=mx.array(at), room=64)[0]


def alone(target, *pieces):
    """What mlx-lm computes for the last piece after the others."""
    *before, last = pieces
    session = Session(target, None)
    for tokens in before:
        session.feed(tokens)
    return target.forward(mx.array([last]), session.target_cache)


def assert_close(found, expected):
    assert mx.allclose(found, expected, rtol=1e-3, atol=1e-4).item()


@pytest.mark.parametrize("target", IN_ROWS, indirect=True)
def test_each_row_keeps_its_own_part_of_a_block(target):
    batch, *others = [open_caches(session_with(target, prompt)) for prompt in PROMPTS]
    join(batch, *others)
    at = [len(prompt) for prompt in PROMPTS]
    feed(target, batch, *[BLOCK] * 3, at=at)
    batch.commit(len(BLOCK), KEPT)
    found = feed(target, batch, *[MORE] * 3, at=[a + kept for a, kept in zip(at, KEPT, strict=True)])
    for row, (prompt, kept) in enumerate(zip(PROMPTS, KEPT, strict=True)):
        assert_close(found[row : row + 1], alone(target, prompt, BLOCK[:kept], MORE))


@pytest.mark.parametrize("target", IN_ROWS + ALONE, indirect=True)
@pytest.mark.parametrize("kept", [1, 4, 6])
def test_what_is_given_back_is_what_was_committed(target, kept):
    """A plain round has been launched ahead where a block need not be committed first, and leaves no trace."""
    session = session_with(target, PROMPTS[0])
    caches = open_caches(session)
    assert isinstance(caches, BatchCaches if target.takes_rows() else SingleCaches)
    feed(target, caches, BLOCK, at=[6])
    if not caches.commits_on_host:
        feed(target, caches, [9], at=[6 + kept])
    caches.commit(len(BLOCK), [kept])
    if caches.commits_on_host:
        feed(target, caches, [9], at=[6 + kept])
    caches.give_back(0, 6 + kept, session.target_cache)
    found = target.forward(mx.array([MORE]), session.target_cache)
    assert_close(found, alone(target, PROMPTS[0], BLOCK[:kept], MORE))


def test_more_than_one_round_must_not_follow_a_block_of_a_recurrent_model():
    target = family_target("qwen3_next")
    caches = open_caches(session_with(target, PROMPTS[0]))
    assert caches.commits_on_host
    feed(target, caches, BLOCK, at=[6])
    feed(target, caches, [9], at=[8])
    with pytest.raises(AssertionError, match="more had been fed after it"):
        caches.commit(len(BLOCK), [2])


class Zeros:
    """A model that says the same of everything; `counts`: it computes with the caches' length in Python."""

    def __init__(self, *, counts):
        self.counts = counts

    def __call__(self, tokens, cache):
        assert not self.counts or int(cache[0].offset) >= 0
        block = mx.zeros((tokens.shape[0], 1, tokens.shape[1], 4))
        cache[0].update_and_fetch(block, block)
        return mx.zeros((*tokens.shape, 8))


class OnePosition:
    """A model that takes the first row's position for all."""

    def __init__(self, model):
        self.model = model

    def __call__(self, tokens, cache):
        if not isinstance(cache[0].offset, mx.array):
            return self.model(tokens, cache=cache)
        rows = Rows(cache, cache[0].lengths, [0] * tokens.shape[0])
        kept, rows.lengths.value = rows.lengths.value, mx.broadcast_to(rows.lengths.value[:1], (tokens.shape[0],))
        logits = self.model(tokens, cache=cache)
        rows.lengths.value = kept
        return logits


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_works_with_finds_out_by_running(family):
    target = tiny_target(family)
    assert target.takes_rows()
    assert works_with(Zeros(counts=False), [], VOCAB, lambda: [KVCache()])
    for model, make_cache in (
        (Zeros(counts=True), lambda: [KVCache()]),
        (OnePosition(target.model), target.make_cache),
        (target.model, lambda: [object()]),
        (target.model, list),
    ):
        assert not works_with(model, target.layers, VOCAB, make_cache)


@pytest.mark.parametrize(("family", "works"), [("qwen3_next", True), ("recurrent_gemma", False), ("rwkv7", False)])
def test_a_recurrent_mixer_has_to_take_a_mask(family, works):
    """Parts of different lengths are kept by masking the others; recurrent_gemma's and rwkv7's take no mask."""
    if reason := unavailable(family):
        pytest.skip(reason)
    assert family_target(family).takes_rows() == works
