"""Mirrored calls within one process: a second set of objects gets the messages, and must end up with the same."""

import gc
import json
import random
import signal

import mlx.core as mx
import pytest
from tiny import VOCAB, plain_tokens, tiny_drafter, tiny_target
from tiny_families import family_target
from tiny_pair import LetterTokenizer

from dflash_mlx.decoding.fork import fork
from dflash_mlx.errors import GroupError, UsageError
from dflash_mlx.generation import generate, generate_many, stream_generate
from dflash_mlx.pair import ModelPair
from dflash_mlx.ranks import mirror
from dflash_mlx.ranks.mirror import Leader, Mirrored, guard, mirrored
from dflash_mlx.rounding import TOLERANCE, relative_difference
from dflash_mlx.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


class Recorded:
    """A group that sends to nobody: the messages as they would arrive, and the arrays that go with them."""

    ranks = None

    def __init__(self, monkeypatch):
        self.messages, self.arrays = [], []
        monkeypatch.setattr(mirror, "_shared", self._share)

    def wait_for_news(self, error):
        pass

    def send(self, message):
        self.messages.append(json.loads(json.dumps(message)))

    def _share(self, group, shapes, arrays):
        if arrays is None:
            return self.arrays.pop(0)
        assert [list(array.shape) for array in arrays] == shapes
        self.arrays.append([array.astype(mx.int32) for array in arrays])
        return self.arrays[-1]

    def follow(self, root):
        """The objects of a rank that gets all messages, by number."""
        objects, last = {0: root}, 0
        for message in self.messages:
            for number in message["dropped"]:
                del objects[number]
            _, made = mirror.run(self, message, objects.__getitem__, None)
            for new in made:
                last += 1
                new.number, objects[last] = last, new
        return objects


def pair_of(target):
    return ModelPair("tiny", target, tiny_drafter(), LetterTokenizer(), mx.float32, 8)


def converse(pair, prompts):
    """All kinds of things that happen to caches; returns the sessions that are left, and the answers."""
    answers = [generate(pair, prompt, GREEDY, width=4).token_ids for prompt in prompts]
    assert [a.token_ids for a in generate_many(pair, prompts, GREEDY, width=3)] == answers
    session = pair.new_session()
    first = generate(pair, prompts[0], GREEDY, session=session, width=4).token_ids
    assert first == answers[0]
    stream = stream_generate(pair, [*prompts[0], *first[:4], 7, 8, 9], GREEDY, session=session, width=2)
    next(stream)
    stream.close()
    return [session, fork(session, len(session.tokens))], answers


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "recurrent_gemma"])
def test_another_rank_ends_up_with_the_same_caches(family, monkeypatch):
    target, twin = family_target(family), family_target(family)
    group = Recorded(monkeypatch)
    leader = Leader(group, target)
    rng = random.Random(0)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in (9, 4, 1)]
    left, answers = converse(pair_of(target), prompts)
    assert answers == [plain_tokens(twin, prompt, 12) for prompt in prompts]
    gc.collect()
    target.make_cache()  # takes with it which objects are gone
    objects = group.follow(twin)
    assert not group.arrays
    kept = {session.target_cache.number: session.target_cache for session in left}
    assert set(kept) < set(objects)
    # Nothing else is held but what rank 0 itself still holds.
    assert len(objects) <= len(leader._objects) + 2
    for number, cache in kept.items():
        assert cache.arrays()
        for own, other in zip(cache.arrays(), objects[number].arrays(), strict=True):
            assert relative_difference(other, own) <= TOLERANCE[own.dtype]


class Counter(Mirrored):
    def __init__(self):
        self.count = 0

    @mirrored
    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        self.count += 1

    @mirrored
    def fail(self):
        raise ValueError("no memory")


def test_ctrl_c_waits_until_a_call_is_whole(monkeypatch):
    counter = Counter()
    Leader(Recorded(monkeypatch), counter)
    with pytest.raises(KeyboardInterrupt):
        counter.interrupted()
    assert counter.count == 1


def test_after_an_error_nothing_more_is_sent(monkeypatch):
    counter, group = Counter(), Recorded(monkeypatch)
    Leader(group, counter)
    with pytest.raises(ValueError, match="no memory"):
        counter.fail()
    with pytest.raises(GroupError, match="no memory"):
        counter.fail()
    assert len(group.messages) == 1


def test_nothing_but_mirrored_calls_runs_a_guarded_model(monkeypatch):
    target = tiny_target("llama")
    guard(target.model, Leader(Recorded(monkeypatch), target))
    logits = target.forward(mx.array([[5, 6]]), target.make_cache())
    assert logits.shape == (1, 2, VOCAB)
    with pytest.raises(UsageError, match="on one machine"):
        plain_tokens(target, [5, 6], 3)
