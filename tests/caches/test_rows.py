"""Caches whose length stays on the device: the same numbers as with mlx-lm's KVCache, in a model and in the loop."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from tiny import FAMILIES, ScriptedDrafter, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.caches.rows import DeviceCaches, works_with
from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.engine import decode
from dflash_mlx.decoding.session import Session
from dflash_mlx.policy.width import FixedWidth


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def target(request):
    return tiny_target(request.param)


def filled(target, prompt):
    cache = target.make_cache()
    target.forward(mx.array([prompt]), cache)
    return cache


def test_a_forward_continues_behind_the_length(target):
    """Rows behind the length are not seen, also when they hold what was rejected, and the buffers grow."""
    prompt = [i % 40 for i in range(250)]
    rejected, block = mx.array([[7, 8, 9]]), mx.array([[1, 2, 3, 4, 5, 6, 7, 8]])
    expected = target.forward(block, filled(target, prompt))

    caches = DeviceCaches.stand_in(filled(target, prompt))
    caches.length.value = mx.array(len(prompt))
    caches.reserve(len(prompt) + 8)
    target.forward(rejected, caches.layers)
    found = target.forward(block, caches.layers)

    assert caches.length.capacity == 512
    assert mx.allclose(found, expected, atol=1e-4).item()


def test_give_back_makes_usual_caches_again(target):
    prompt, block = [4, 5, 6, 7, 8], mx.array([[1, 2, 3]])
    usual = filled(target, prompt)
    caches = DeviceCaches.stand_in(usual)
    caches.length.value = mx.array(len(prompt))
    target.forward(block, caches.layers)
    caches.give_back(len(prompt) + 1)
    assert all(type(cache) is KVCache and cache.offset == len(prompt) + 1 for cache in usual)
    found = target.forward(block, usual)
    assert mx.allclose(found, target.forward(block, filled(target, [*prompt, 1])), atol=1e-4).item()


def test_a_sliding_mask_counts_from_the_length():
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 6, 4)), mx.zeros((1, 1, 6, 4)))
    device = DeviceCaches.stand_in([cache])
    device.length.value = mx.array(5)
    mask = device.layers[0].make_mask(2, window_size=3)
    seen = [[i for i in range(device.length.capacity) if row[i]] for row in mask.tolist()]
    assert seen == [[3, 4, 5], [4, 5, 6]]


class NeedsNumbers:
    """A model that computes with the cache's length in Python."""

    def __call__(self, tokens, cache):
        assert isinstance(cache[0].offset, int)
        cache[0].update_and_fetch(mx.zeros((1, 1, tokens.shape[1], 4)), mx.zeros((1, 1, tokens.shape[1], 4)))
        return mx.zeros((1, tokens.shape[1], 8))


def test_works_with_finds_out_by_running(target):
    assert target.takes_device_lengths()
    assert not works_with(NeedsNumbers(), 8, [KVCache()])
    assert not works_with(target.model, target.vocab_size, [object()])
    assert not works_with(target.model, target.vocab_size, [])


def test_rounds_are_queued_before_the_last_one_is_read(target, monkeypatch):
    """The real loop over more than one growth of the buffers, with and without queueing: the same rounds."""
    prompt = [3, 1, 4]
    truth = plain_tokens(target, prompt, 400)
    script = {3 + i: token for i, token in enumerate(truth)}
    queued = []
    to_device = Session.to_device
    monkeypatch.setattr(
        Session, "to_device", lambda self, length: (queued.append(self.in_flight), to_device(self, length))
    )
    runs = []
    for device in (True, False):
        monkeypatch.setattr(target, "_device_lengths", device)
        drafter = ScriptedDrafter(tiny_drafter(block_size=8).config, script, frozenset(range(5, 400, 9)))
        session = Session(target, drafter)
        steps = decode(session, prompt, strategy=Greedy(), policy=FixedWidth(7), max_tokens=400, eos_ids=set())
        runs.append([(step.tokens, step.num_accepted) for step in steps])
        assert session.device is None
        assert session.tokens == (prompt + truth)[: len(session.tokens)]
    assert [token for tokens, _ in runs[0] for token in tokens] == truth
    # The last rounds may differ in width: one more round is in flight when the limit is known.
    assert runs[0][:-2] == runs[1][: len(runs[0]) - 2]
    assert len(queued) > 40


@pytest.mark.parametrize("start", range(225, 262, 3))
def test_there_is_always_room(target, monkeypatch, start):
    """Whatever a round may keep, what it writes fits the buffers of both models: nothing checks that on the device."""
    written = []

    def checked(method, last_row, which):
        def call(session, *args, **kwargs):
            if session.device is None:
                return method(session, *args, **kwargs)
            written.append(last_row(session, *args, **kwargs))
            outputs = method(session, *args, **kwargs)
            assert written[-1] <= session.device[which].layers[0].keys.shape[2]
            return outputs

        return call

    def verified(session, tokens, **_):
        return int(session.device[0].length.value.item()) + tokens.shape[1]

    def drafted(session, features, block, *, end):
        return int(mx.array(end).item()) + block.shape[0]

    monkeypatch.setattr(Session, "forward", checked(Session.forward, verified, 0))
    monkeypatch.setattr(Session, "draft", checked(Session.draft, drafted, 1))
    prompt = [i % 40 for i in range(start)]
    truth = plain_tokens(target, prompt, 70)
    script = {start + i: token for i, token in enumerate(truth)}
    session = Session(target, ScriptedDrafter(tiny_drafter(block_size=16).config, script))
    steps = decode(session, prompt, strategy=Greedy(), policy=FixedWidth(15), max_tokens=70, eos_ids=set())
    assert [token for step in steps for token in step.tokens] == truth
    assert max(written) > 256


def test_an_answer_left_open_gives_way_to_the_next(target, monkeypatch):
    monkeypatch.setattr(target, "_device_lengths", True)
    prompt = [9, 8, 7]
    truth = plain_tokens(target, prompt, 60)
    session = Session(
        target, ScriptedDrafter(tiny_drafter(block_size=8).config, {3 + i: t for i, t in enumerate(truth)})
    )

    def answer(history):
        return decode(session, history, strategy=Greedy(), policy=FixedWidth(5), max_tokens=30, eos_ids=set())

    left = answer(prompt)
    seen = [token for _, step in zip(range(3), left, strict=False) for token in step.tokens]
    assert session.device is not None
    history = prompt + seen
    session.rewind(len(history) - 1)
    after = [token for step in answer(history) for token in step.tokens]
    left.close()
    assert seen + after == truth[: len(seen) + 30]
    assert all(cache.offset == len(session.tokens) for cache in session.target_cache)
