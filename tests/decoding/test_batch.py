"""Lanes come and go in a batch: rows, books and sessions are in order, and one lane's trouble is its own."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from tiny import VOCAB, ScriptedDrafter, drafted_tokens, ends_of_writes, plain_tokens, tiny_drafter, tiny_target
from tiny_families import family_target, unavailable

from dflash_mlx import runtime
from dflash_mlx.caches.rows import Rows
from dflash_mlx.caches.target_caches import BatchCaches
from dflash_mlx.decoding import batch as batches
from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.batch import Batch
from dflash_mlx.decoding.decode import decode, prefill
from dflash_mlx.decoding.engine import Engine
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

    def join_read(self, batch):
        """Lanes whose prompts were read together."""
        self.engine.join_all(batch)
        self.tokens |= {lane: [] for lane in batch.lanes}

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


@pytest.mark.parametrize("replays", [True, False])
def test_what_arrives_is_computed_apart_from_a_pass_that_is_replayed(replays, target, text, monkeypatch):
    """MLX plans a pass anew on CUDA that begins with other operations than the one before."""
    batch, launched = Batch(target, None), []
    batch.arrange([Batch.of(lane_of(target, None, text[:5]), None)])
    monkeypatch.setattr(target, "replays", replays)
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: launched.append(arrays))
    batch.arrange([])
    assert launched == []
    batch.arrange([Batch.of(lane_of(target, None, text[:9]), None)])
    assert any(array is batch.at for arrays in launched for array in arrays) == replays
    assert batch.at.tolist() == [4, 8]


def test_rows_are_put_in_order(target, text, monkeypatch):
    monkeypatch.setattr(batches, "_ROUNDS_UNUSED", 0)
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
    assert not batch.is_arranged
    # One takes the free row and one a new row; what is returned are the rows that are left of those before.
    assert batch.arrange([Batch.of(lane, None) for lane in (d, e)]) == [0, 1, 2]
    check(a, d, c, e)
    batch.give_back(0)
    batch.give_back(2)
    # What the rows that are left were: the last one takes the free place.
    assert batch.arrange([]) == [3, 1]
    assert batch.is_arranged
    check(e, d)
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


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("family", ["llama", "llama, sliding", "gemma4, shared keys", "qwen3_next", "lfm2"])
def test_prompts_read_together_are_answered_as_alone(family, replays, request):
    """And the sessions that come out of it are like others: the conversations go on."""
    if reason := unavailable(family):
        pytest.skip(reason)
    target, drafter = family_target(family), tiny_drafter()
    request.addfinalizer(lambda: target.set_replays(False))
    target.set_replays(replays)
    prompts = [[(7 * i + 5 * length) % VOCAB for i in range(length)] for length in (9, 30, 2, 17)]
    batch, lanes = Batch.reading(target, drafter, prompts), []
    for prompt in prompts:
        session = Session(target, drafter)
        session.tokens = prompt[:-1]
        options = {"strategy": Greedy(), "policy": FixedWidth(WIDTH), "max_tokens": 12, "eos_ids": set()}
        lanes.append(Lane(session=session, prompt=prompt, **options))
    batch.begin(lanes)
    answers = Answers(target, drafter)
    answers.join_read(batch)
    answers.finish()
    for lane in lanes:
        assert answers.tokens[lane] == plain_tokens(target, lane.prompt, 12)
        further = [*lane.prompt, *answers.tokens[lane], 7, 8]
        lane.session.rewind(len(further) - 3)
        assert lane.session.tokens == further[:-3]
        assert answer_of(lane.session, further) == plain_tokens(target, further, 12)


def test_prompts_read_together_fit_the_room_they_are_given(target, monkeypatch):
    """What is written ends with the buffers, of 256 places: the device would write on beyond them."""
    ends = ends_of_writes(monkeypatch)
    Batch.reading(target, tiny_drafter(), [[5] * 257, [6] * 3])
    assert max(ends) == 256


def answer_of(session, prompt):
    steps = decode(session, prompt, strategy=Greedy(), policy=FixedWidth(WIDTH), max_tokens=12, eos_ids=set())
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize(("lanes", "rows"), [(1, 1), (3, 3), (4, 4), (5, 6), (8, 8), (9, 12), (16, 16), (17, 24)])
def test_where_new_shapes_are_dear_there_are_a_few_numbers_of_rows(lanes, rows, monkeypatch):
    monkeypatch.setattr(batches, "backend", lambda: replace(runtime.backend(), kind="cuda"))
    assert batches.rows_for(lanes) == rows
    monkeypatch.setattr(batches, "backend", lambda: replace(runtime.backend(), kind="metal"))
    assert batches.rows_for(lanes) == lanes


def test_where_new_shapes_are_dear_prompts_are_read_in_few_shapes(target, drafter, text, monkeypatch):
    monkeypatch.setattr(batches, "backend", lambda: replace(runtime.backend(), kind="cuda"))
    assert batches.reading_shape(5, 40) == (6, 64)
    assert batches.reading_shape(1, 64) == (1, 64)
    fed, read = [], BatchCaches.read
    monkeypatch.setattr(
        BatchCaches,
        "read",
        lambda self, model, tokens, *rest, **to: fed.append(tokens.shape) or read(self, model, tokens, *rest, **to),
    )
    lanes = [lane_of(target, drafter, text[:length]) for length in (2, 9, 33, 4, 21)]
    batch = Batch.reading(target, drafter, [lane.prompt for lane in lanes])
    for lane in lanes:
        lane.session.tokens = lane.prompt[:-1]
    batch.begin(lanes)
    assert fed == [(6, 64)]
    answers = Answers(target, drafter)
    answers.join_read(batch)
    answers.finish()
    assert not answers.errors
    for lane in lanes:
        assert answers.tokens[lane] == text[len(lane.prompt) :][: lane.max_tokens]
    monkeypatch.setattr(batches, "backend", lambda: replace(runtime.backend(), kind="metal"))
    assert batches.reading_shape(5, 40) == (5, 40)


def test_rows_whose_lanes_have_left_take_no_room_and_are_taken_again(target, drafter, text, monkeypatch):
    """Three of four lanes leave early, and their rows stay; others come into them."""
    monkeypatch.setattr(batches, "rows_for", lambda lanes: max(4, lanes) if lanes else 0)
    first, *short = [lane_of(target, drafter, text[:n], max_tokens=m) for n, m in ((3, 80), (40, 3), (5, 6), (9, 9))]
    answers = Answers(target, drafter, first, *short)
    while len(answers.engine.lanes) > 1:
        answers.advance()
    answers.advance(3)
    batch = answers.engine._batch
    assert batch.rows == [first, None, None, None]
    assert batch.at[1:].tolist() == [0, 0, 0]
    assert batch.caches.rows.lengths.capacity == 256
    late = [lane_of(target, drafter, text[:length]) for length in (20, 30)]
    answers.join(*late)
    answers.advance()
    assert batch.rows == [first, *late, None]
    answers.finish()
    for lane, tokens in answers.tokens.items():
        assert tokens == text[len(lane.prompt) :][: lane.max_tokens]


def test_a_row_stays_free_for_some_rounds(target, drafter, text, monkeypatch):
    """To move the others takes as long as some rounds, and on a server the next answer soon comes."""
    monkeypatch.setattr(batches, "_ROUNDS_UNUSED", 3)
    lanes = [lane_of(target, drafter, text[:length], max_tokens=most) for length, most in ((3, 60), (9, 60), (5, 3))]
    answers = Answers(target, drafter, *lanes)
    while len(answers.engine.lanes) > 2:
        answers.advance()
    batch, seen = answers.engine._batch, []
    while len(batch.rows) > 2:
        seen.append(list(batch.rows))
        answers.advance()
    assert all(rows == [*lanes[:2], None] for rows in seen)
    assert 3 <= len(seen) <= 4
    answers.finish()
    for lane, tokens in answers.tokens.items():
        assert tokens == text[len(lane.prompt) :][: lane.max_tokens]


class Asked(FixedGroup):
    """Notes how many answers' chances it was asked about last."""

    def choose(self, best, *, rows):
        self.asked = len(best)
        return super().choose(best, rows=rows)


def test_the_width_is_chosen_by_the_lanes_that_there_are(target, drafter, text, monkeypatch):
    monkeypatch.setattr(batches, "rows_for", lambda lanes: max(4, lanes) if lanes else 0)
    lanes = [lane_of(target, drafter, text[:length], max_tokens=limit) for length, limit in ((3, 40), (9, 40), (5, 3))]
    answers = Answers(target, drafter, *lanes)
    answers.engine.choosing.group = Asked(WIDTH, waits=True)
    while len(answers.engine.lanes) > 2:
        answers.advance()
    answers.advance()
    assert answers.engine._batch.rows.count(None) == 2
    assert answers.engine.choosing.group.asked == 2


def test_there_are_few_numbers_of_rows_where_each_has_to_be_compiled(target, drafter, text, monkeypatch):
    """Those beyond the lanes are free from the beginning, and lanes that join take them."""
    monkeypatch.setattr(batches, "rows_for", lambda lanes: -(-lanes // 4) * 4)
    lanes = [lane_of(target, drafter, text[: 3 + i], max_tokens=30 - i) for i in range(6)]
    answers, seen = Answers(target, drafter, *lanes[:3]), []
    for later in ([], lanes[3:4], lanes[4:], []):
        answers.join(*later)
        answers.advance(2)
        seen.append(len(answers.engine._batch.rows))
        assert answers.engine._batch.is_arranged
    assert seen == [4, 4, 8, 8]
    answers.finish()
    for lane, tokens in answers.tokens.items():
        assert tokens == text[len(lane.prompt) :][: lane.max_tokens]


class Guide:
    """Lets everything come, and fails once `most` tokens have: when it hears of them, or when it is asked."""

    def __init__(self, most, *, when_asked):
        self.most, self.when_asked, self.heard = most, when_asked, 0

    def advance(self, tokens):
        self.heard += len(tokens)
        if self.heard >= self.most and not self.when_asked:
            raise DFlashError("lost the way")

    done = False

    def allowed(self, drafts):
        if self.heard >= self.most and self.when_asked:
            raise DFlashError("lost the way")
        return len(drafts), np.full((len(drafts) + 1, -(-VOCAB // 32)), 0xFFFFFFFF, dtype=np.uint32)


class NoDrafts(Guide):
    """Lets no draft come, but any token in its place."""

    def allowed(self, drafts):
        return 0, super().allowed([])[1]


def test_a_guide_is_for_its_own_lane(target, drafter, text):
    """One that lets everything come changes nothing, and drafts that it does not let come are another lane's gain."""
    guides = None, Guide(10**6, when_asked=True), NoDrafts(10**6, when_asked=True)
    engine = Engine(target, drafter, policy=FixedGroup(WIDTH))
    lanes = [lane_of(target, drafter, text[:9], guide=guide) for guide in guides]
    for lane in lanes:
        engine.join(lane)
    steps = {lane: [] for lane in lanes}
    while engine.lanes:
        for lane, step in engine.advance():
            steps[lane].append(step)
    free, all_let, none_let = ([(step.tokens, step.num_accepted) for step in steps[lane]] for lane in lanes)
    assert all_let == free
    assert sum(accepted for _, accepted in free) > 15
    assert none_let == [([token], 0) for token in text[9:39]]


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


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("when_asked", [False, True])
@pytest.mark.parametrize("family", ["llama", "llama, sliding", "qwen3_next", "recurrent_gemma"])
def test_after_an_error_of_its_guide_a_session_is_whole(family, when_asked, others):
    """Its caches hold its tokens and no more, and a conversation can go on there."""
    target, drafter = family_target(family), tiny_drafter()
    if others and not target.takes_rows():
        pytest.skip("this family's answers are made one at a time")
    bad = lane_of(target, drafter, [5, 6, 7, 8], guide=Guide(7, when_asked=when_asked))
    answers = Answers(target, drafter, bad, *[lane_of(target, drafter, [5, 6, i]) for i in range(others)])
    answers.finish()
    assert isinstance(answers.errors[bad], DFlashError)
    history = [*bad.prompt, *plain_tokens(target, bad.prompt, 30)]
    assert len(bad.session.tokens) >= 10
    assert bad.session.tokens == history[: len(bad.session.tokens)]
    further = [*bad.session.tokens, 7, 8]
    assert answer_of(bad.session, further) == plain_tokens(target, further, 12)


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
    late = [lane_of(target, drafter, text[:length]) for length in (9, 1)]
    answers = Answers(target, drafter, *lanes)
    answers.advance(2)
    answers.join(*late)
    monkeypatch.setattr(Rows, "take_over", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        answers.finish()
    check_empty(answers.engine, [*lanes, *late])


def test_an_error_before_the_first_round_is_the_one_that_is_seen(target, drafter, monkeypatch):
    """A prompt of one token has caches that hold nothing: the model is run to know their shapes."""
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
