"""Lanes come and go in a batch: rows, books and sessions are in order, and one lane's trouble is its own."""

import mlx.core as mx
import numpy as np
import pytest
from tiny import VOCAB, ScriptedDrafter, drafted_tokens, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.batch import Batch
from dflash_mlx.decoding.engine import Engine, prefill
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.session import Session
from dflash_mlx.errors import DFlashError
from dflash_mlx.policy.group import FixedGroup
from dflash_mlx.policy.width import FixedWidth

WIDTH = 4


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def text(target):
    """A text of which every beginning is continued by the rest."""
    return [3, *plain_tokens(target, [3], 120)]


@pytest.fixture
def drafter(text):
    """Knows the text, but for every fifth token."""
    return ScriptedDrafter(tiny_drafter().config, dict(enumerate(text)), frozenset(range(0, 200, 5)))


def lane_of(target, drafter, prompt, *, max_tokens=30, **options):
    session = Session(target, drafter)
    prefill(session, prompt[:-1])
    return Lane(
        session=session,
        prompt=prompt,
        strategy=Greedy(),
        policy=FixedWidth(WIDTH),
        max_tokens=max_tokens,
        eos_ids=set(),
        **options,
    )


class Answers:
    """An engine and what its lanes have gained so far."""

    def __init__(self, target, drafter, *lanes):
        self.engine, self.tokens, self.errors = Engine(target, drafter, policy=FixedGroup(WIDTH)), {}, {}
        self.join(*lanes)

    def join(self, *lanes):
        for lane in lanes:
            self.engine.join(lane)
            self.tokens[lane] = []

    def advance(self, rounds=1):
        for _ in range(rounds):
            for lane, step in self.engine.advance():
                if isinstance(step, Exception):
                    self.errors[lane] = step
                else:
                    self.tokens[lane] += step.tokens

    def finish(self):
        while self.engine.lanes:
            self.advance()


def check_home(lane, tokens):
    """The session holds prompt and answer but for the newest token, in both caches, and answers go on from there."""
    session, history = lane.session, [*lane.prompt, *tokens]
    assert session.away is None
    assert session.tokens == history[:-1]
    assert all(cache.offset == len(history) - 1 for cache in [*session.target_cache, *session.draft_cache])
    alone = Session(session.target, session.drafter)
    prefill(alone, history[:-1])
    for found, expected in zip(
        [*session.target_cache, *session.draft_cache], [*alone.target_cache, *alone.draft_cache], strict=True
    ):
        length = len(history) - 1
        assert mx.allclose(found.keys[..., :length, :], expected.keys[..., :length, :], atol=1e-4).item()
        assert mx.allclose(found.values[..., :length, :], expected.values[..., :length, :], atol=1e-4).item()


def test_rows_are_put_in_order(target, text):
    batch = Batch(target, None)
    a, b, c, d, e = (lane_of(target, None, text[:length]) for length in (9, 2, 30, 5, 14))

    def check(*rows):
        assert batch.rows == list(rows)
        assert batch.at.tolist() == [len(lane.prompt) - 1 for lane in rows]
        assert batch.anchors.tolist() == [lane.prompt[-1] for lane in rows]
        assert batch.bounds == batch.at.tolist()

    assert batch.arrange([Batch.of(lane, None) for lane in (a, b, c)]) == []
    check(a, b, c)
    batch.give_back(1)
    assert batch.rows == [a, None, c]
    assert b.session.target_cache[0].offset == 1
    # One takes the free row and one a new row; what is returned are the rows that are left of those before.
    assert batch.arrange([Batch.of(lane, None) for lane in (d, e)]) == [0, 1, 2]
    check(a, d, c, e)
    batch.give_back(0)
    batch.give_back(2)
    assert batch.arrange([]) == [1, 3]
    check(d, e)
    batch.give_back(0)
    batch.give_back(1)
    assert (batch.rows, batch.caches) == ([], None)
    assert batch.arrange([]) == []


def test_lanes_join_and_leave_in_mid_answer(target, drafter, text):
    first, second, third = (lane_of(target, drafter, text[:length]) for length in (3, 20, 50))
    answers = Answers(target, drafter, first, second)
    answers.advance(3)
    answers.engine.leave(first)
    check_home(first, answers.tokens[first])
    answers.join(third)
    assert set(answers.engine.lanes) == {second, third}
    answers.advance(2)
    answers.engine.leave(third)
    answers.engine.leave(third)
    check_home(third, answers.tokens[third])
    answers.finish()
    check_home(second, answers.tokens[second])
    for lane, tokens in answers.tokens.items():
        assert tokens == text[len(lane.prompt) :][: len(tokens)]
    assert len(answers.tokens[first]) >= 3
    assert len(answers.tokens[second]) == 30


def test_a_lane_that_leaves_before_its_first_round_was_never_there(target, drafter, text):
    lane = lane_of(target, drafter, text[:9])
    answers = Answers(target, drafter, lane)
    answers.engine.leave(lane)
    assert lane.session.away is None
    assert lane.session.tokens == text[:8]
    assert answers.engine.advance() == []


def test_an_engine_is_as_new_when_all_have_left(target, drafter, text):
    answers = Answers(target, drafter)
    for lengths in ((3, 9), (20,), (1, 2, 30)):
        lanes = [lane_of(target, drafter, text[:length], max_tokens=12) for length in lengths]
        answers.join(*lanes)
        answers.finish()
        for lane in lanes:
            assert answers.tokens[lane] == text[len(lane.prompt) :][:12]


class Guide:
    """Lets everything come, and fails once `most` tokens have: when it hears of them, or when it is asked."""

    def __init__(self, most, *, when_asked):
        self.most, self.when_asked, self.heard = most, when_asked, 0

    def advance(self, tokens):
        self.heard += len(tokens)
        if self.heard >= self.most and not self.when_asked:
            raise DFlashError("lost the way")

    def allowed(self, drafts):
        if self.heard >= self.most and self.when_asked:
            raise DFlashError("lost the way")
        return len(drafts), np.full((len(drafts) + 1, -(-VOCAB // 32)), 0xFFFFFFFF, dtype=np.uint32)


@pytest.mark.parametrize("when_asked", [False, True])
def test_an_error_of_one_lanes_guide_leaves_the_others_going(target, drafter, text, when_asked):
    good = [lane_of(target, drafter, text[:length]) for length in (3, 40)]
    bad = lane_of(target, drafter, text[:20], guide=Guide(7, when_asked=when_asked))
    answers = Answers(target, drafter, good[0], bad, good[1])
    answers.finish()
    assert list(answers.errors) == [bad]
    assert isinstance(answers.errors[bad], DFlashError)
    assert bad.session.away is None
    for lane in good:
        assert answers.tokens[lane] == text[len(lane.prompt) :][:30]
        check_home(lane, answers.tokens[lane])


def failing(*_, **__):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_an_error_of_the_model_resets_all_sessions(target, drafter, text, rounds, monkeypatch):
    lanes = [lane_of(target, drafter, text[:length]) for length in (3, 20)]
    late = lane_of(target, drafter, text[:9])
    answers = Answers(target, drafter, *lanes)
    answers.advance(rounds)
    answers.join(late)
    with monkeypatch.context() as patch:
        patch.setattr(target, "forward_tapped", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            answers.finish()
    check_empty(answers.engine, [*lanes, late])
    # And what comes next is answered.
    again = lane_of(target, drafter, text[:9])
    answers.join(again)
    answers.finish()
    assert answers.tokens[again] == text[9:39]


def test_an_error_while_lanes_are_taken_in_resets_all_sessions(target, drafter, text, monkeypatch):
    """Those that were waiting to be taken in are among them."""
    lanes = [lane_of(target, drafter, text[:length]) for length in (3, 20)]
    late = [lane_of(target, drafter, text[:9]), lane_of(target, drafter, text[:1])]
    answers = Answers(target, drafter, *lanes)
    answers.advance(2)
    answers.join(*late)
    monkeypatch.setattr(Batch, "arrange", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        answers.finish()
    check_empty(answers.engine, [*lanes, *late])


def test_an_error_before_the_first_round_is_the_one_that_is_seen(target, drafter, monkeypatch):
    monkeypatch.setattr(target, "forward", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        drafted_tokens(target, drafter, [5], 10, FixedWidth(WIDTH))


def check_empty(engine, lanes):
    assert engine.lanes == []
    for lane in lanes:
        session = lane.session
        assert session.away is None
        assert session.tokens == []
        assert all(cache.keys is None for cache in [*session.target_cache, *session.draft_cache])
        engine.leave(lane)
