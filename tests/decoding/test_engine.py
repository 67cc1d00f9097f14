"""The loop itself: rounds are launched ahead and change nothing by it, have room, copy nothing, and make way."""

import weakref
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import mlx.core as mx
import pytest
from tiny import FAMILIES, ScriptedDrafter, ends_of_writes, mostly_slow, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.decoding import batch as batches
from dflash_mlx.decoding import decode as one_answer
from dflash_mlx.decoding import engine as engines
from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.decode import decode, prefill
from dflash_mlx.decoding.engine import Engine
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.policies import Choice, Forecast
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters import dflash_state
from dflash_mlx.drafters.contract import Outlook
from dflash_mlx.drafters.with_ngram import WithNgram, WithNgramState
from dflash_mlx.policy.group import FixedGroup
from dflash_mlx.policy.width import FixedWidth


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def target(request):
    return tiny_target(request.param)


@pytest.fixture(scope="module")
def long_text(target):
    """A prompt of three tokens, and 400 of its plain answer."""
    return [3, 1, 4, *plain_tokens(target, [3, 1, 4], 400)]


def lane_of(target, drafter, prompt, max_tokens, width):
    session = Session(target, drafter)
    prefill(session, prompt[:-1])
    return Lane(
        session=session,
        prompt=prompt,
        strategy=Greedy(),
        policy=FixedWidth(width),
        max_tokens=max_tokens,
        eos_ids=set(),
    )


def run(target, drafter, prompts, max_tokens, width):
    """The answers' steps. All prompts are beginnings of one text, so that one script serves them all."""
    engine = Engine(target, drafter, policy=FixedGroup(width))
    lanes = [lane_of(target, drafter, prompt, max_tokens, width) for prompt in prompts]
    steps = {lane: [] for lane in lanes}
    for lane in lanes:
        engine.join(lane)
    while engine.lanes:
        for lane, step in engine.advance():
            steps[lane].append(step)
    for lane in lanes:
        assert lane.session.away is None
        assert all(cache.offset == len(lane.session.tokens) for cache in lane.session.target_cache)
    return list(steps.values())


@pytest.mark.parametrize(("lanes", "replays"), mostly_slow([(1, False), (3, False), (3, True)], (1, False)))
def test_rounds_are_launched_ahead_and_are_the_same_rounds(target, long_text, lanes, replays, monkeypatch, request):
    """Over more than one growth of the buffers, with drafts of which some are wrong."""
    request.addfinalizer(lambda: target.set_replays(False))
    target.set_replays(replays)
    # The drafter that knows the text reads it on the host.
    monkeypatch.setattr(dflash_state, "replayed", lambda body, on: body)
    script, wrong = dict(enumerate(long_text)), frozenset(range(5, 400, 9))
    starts = (3, 200, 11)[:lanes]
    launch, ahead = Engine._launch, []

    def counted(engine, *args, **options):
        ahead.append(options.get("ahead", False))
        return launch(engine, *args, **options)

    monkeypatch.setattr(Engine, "_launch", counted)
    runs = []
    for allowed in (True, False):
        if not allowed:
            assert sum(ahead) > 0.8 * len(ahead) > 30
            ahead.clear()
            monkeypatch.setattr(Engine, "_may_launch_ahead", lambda *_, **__: False)
        drafter = ScriptedDrafter(tiny_drafter(block_size=8).config, script, wrong)
        runs.append(run(target, drafter, [long_text[:n] for n in starts], 400 - max(starts), 7))
    assert not any(ahead)
    for start, first, second in zip(starts, *runs, strict=True):
        for steps in (first, second):
            tokens = [token for step in steps for token in step.tokens]
            assert tokens == long_text[start : start + len(tokens)]
            assert len(tokens) == 400 - max(starts)
        found, expected = ([(step.tokens, step.num_accepted) for step in steps] for steps in (first, second))
        # The last rounds may differ in width: one more is on its way when the limit is known.
        assert found[:-2] == expected[: len(found) - 2]


class Pausing(FixedWidth):
    """Drafts in a few rounds, and then pauses for a few."""

    listens_after = 1

    def __init__(self, width):
        super().__init__(width)
        self.left = 5

    def next_round(self, *, may_branch, told=0.0):
        self.left -= self.left > 0
        return super().next_round(may_branch=may_branch) if self.left == 0 else Choice(0)

    def observe(self, round):
        if round.drafted and self.left == 0 and round.num_accepted % 3 == 2:
            self.left = 5


def test_rounds_of_a_pause_are_launched_ahead_whatever_the_text_says(monkeypatch):
    """Where it repeats itself, drafts wait for the newest tokens; plain rounds need not."""
    target, drafter = tiny_target("llama"), WithNgram(tiny_drafter(block_size=6))
    launch, rounds = Engine._launch, []

    def noted(engine, drafts, **options):
        rounds.append((drafts is not None, engine.choosing.outlook is Outlook.HOST, options.get("ahead", False)))
        return launch(engine, drafts, **options)

    monkeypatch.setattr(Engine, "_launch", noted)
    monkeypatch.setattr(WithNgramState, "outlook", lambda state, writers: Outlook.HOST)
    prompt = [1, 2, 3] * 4
    lane = lane_of(target, drafter, prompt, 80, 5)
    lane.policy = Pausing(5)
    engine, tokens = Engine(target, drafter), []
    engine.join(lane)
    while engine.lanes:
        tokens += [token for _, step in engine.advance() for token in step.tokens]
    assert tokens == plain_tokens(target, prompt, 80)
    assert {True, False} <= {drafted for drafted, _, _ in rounds}
    assert all(host and not (drafted and ahead) for drafted, host, ahead in rounds)
    # A pause begins when the round before it is known.
    plain_after_plain = [ahead for (before, *_), (drafted, _, ahead) in pairwise(rounds) if not (before or drafted)]
    assert all(plain_after_plain)
    assert len(plain_after_plain) > 10


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize(
    "start", [pytest.param(at, marks=[] if at in (240, 255, 258) else pytest.mark.long) for at in range(225, 262, 3)]
)
def test_there_is_always_room(start, lanes, monkeypatch):
    """Whatever a round may keep, what it writes fits the buffers of both models: nothing checks that on the device."""
    target = tiny_target("llama")
    ends = ends_of_writes(monkeypatch)
    prompt = [i % 40 for i in range(225)]
    text = prompt + plain_tokens(target, prompt, 110)
    drafter = ScriptedDrafter(tiny_drafter(block_size=16).config, dict(enumerate(text)))
    prompts = [text[:n] for n in (start, 225, 240)[:lanes]]
    for own, steps in zip(prompts, run(target, drafter, prompts, 70, 15), strict=True):
        assert [token for step in steps for token in step.tokens] == text[len(own) :][:70]
    assert max(ends) > 256


@pytest.mark.parametrize("lanes", [1, 3])
def test_rejected_drafts_take_no_room(lanes):
    """150 tokens and their 2,000 rejected drafts fit into the first step of the buffers."""
    target, drafter = tiny_target("llama"), tiny_drafter(block_size=16)
    engine = Engine(target, drafter, policy=FixedGroup(15))
    joined = [lane_of(target, drafter, [5] * length, 150, 15) for length in (3, 1, 40)[:lanes]]
    for lane in joined:
        engine.join(lane)
    while engine.lanes:
        engine.advance()
    for lane in joined:
        caches = [*lane.session.target_cache, *lane.session.draft_cache]
        assert {cache.keys.shape[2] for cache in caches} == {256}


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_round_copies_no_buffer(lanes, replays):
    """Rows are written in place: beside the models, rounds of long contexts hold the buffers and little else."""
    target, drafter = tiny_target("qwen3", head_dim=64), tiny_drafter(head_dim=64)
    mx.eval(drafter.parameters())
    assert target.takes_rows()
    target.set_replays(replays)
    models = mx.get_active_memory()
    engine = Engine(target, drafter, policy=FixedGroup(2))
    for length in (2000, 1500, 1900)[:lanes]:
        engine.join(lane_of(target, drafter, [5] * length, 64, 2))
    for _ in range(3):
        engine.advance()
    mx.reset_peak_memory()
    for _ in range(3):
        engine.advance()
    layers = [*engine._batch.caches.rows.attention, *engine._batch.state.rows.attention]
    buffers = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert mx.get_peak_memory() - models < 1.15 * buffers


class Clock:
    """Time that passes where a test says so: `work` seconds while a round is waited for."""

    def __init__(self, monkeypatch, work):
        self.now, settle = 100, Engine._settle

        def waited(engine, *args):
            self.now += work
            return settle(engine, *args)

        monkeypatch.setattr(Engine, "_settle", waited)
        monkeypatch.setattr(engines, "time", SimpleNamespace(perf_counter=lambda: self.now))


class Draws(FixedWidth):
    """Drafts `drawn` places, verifies what a FixedWidth does of them, and notes what it hears, after each round."""

    listens_after = 1

    def __init__(self, width, drawn, **options):
        super().__init__(width, **options)
        self.drawn, self.heard = drawn, []

    def next_round(self, *, may_branch, told=0.0):
        return replace(super().next_round(may_branch=may_branch), places=self.drawn)

    def observe(self, round):
        self.heard.append(round)


class Together(Draws):
    """Listens after three rounds."""

    listens_after = 3


class Deaf(Draws):
    listens_after = 0


def begun(policy, max_tokens, target=None):
    """An engine with a lane that has this policy, and the lane."""
    engine = Engine(target or tiny_target("llama"), tiny_drafter())
    lane = lane_of(engine.target, engine.drafter, [3, 1], max_tokens, 0)
    lane.policy = policy
    engine.join(lane)
    return engine, lane


@pytest.mark.parametrize("tree", [False, True])
def test_a_round_that_was_read_is_let_go_before_the_policy_is_told_of_it(tree, monkeypatch):
    """Its arrays are not held until then."""
    engine, lane = begun(Together(3, 3, places=3 if tree else 0), 30)
    launched, launch = [], engine._launch

    def noted(*args, **how):
        round = launch(*args, **how)
        launched.append(weakref.ref(round))
        return round

    monkeypatch.setattr(engine, "_launch", noted)
    most_untold = 0
    while engine.lanes:
        engine.advance()
        assert sum(round() is not None for round in launched) <= 1
        most_untold = max(most_untold, len(engine.choosing._untold))
    assert most_untold == 2
    assert len(lane.policy.heard) >= 10


@pytest.mark.parametrize("kind", [Together, Deaf])
def test_the_host_reads_a_trees_outcome_and_chances_together(kind, monkeypatch):
    """The chances that a policy is told are those that were on the device, and nothing else is read for them. Of trees
    that it is told of together, one has them."""
    engine, _ = begun(kind(7, 3, places=3), 30)
    rounds, observe = [], engine.choosing.observe

    def noted(round, kept, seconds):
        rounds.append(round)
        observe(round, kept, seconds)

    monkeypatch.setattr(engine.choosing, "observe", noted)
    while engine.lanes:
        engine.advance()
    drafted = [round for round in rounds if round.chances is not None]
    assert len(drafted) > 5
    for number, round in enumerate(drafted, start=1):
        told, further = kind is Together and number % 3 == 0, round.verdict.outcome.further
        assert (further is round.chances.said) if told else further is None
        assert (round.chances.known is not None) == told
        if told:
            assert mx.array_equal(mx.array(round.chances.known), round.chances.said)


@pytest.mark.parametrize("leaves", [None, 4])
@pytest.mark.parametrize("kind", [Together, Deaf])
def test_a_policy_is_told_of_several_rounds_together(kind, leaves):
    """In their order, and of all: also of an answer's last ones, whether it comes to its end or is left before."""
    policy = kind(2, 5)
    engine, lane = begun(policy, 20)
    steps, heard = [], []
    while engine.lanes and len(steps) != leaves:
        steps += [step for _, step in engine.advance()]
        heard.append(len(policy.heard))
    engine.leave(lane)
    if kind is Deaf:
        assert not policy.heard
        return
    assert heard[:6] == [0, 0, 3, 3, 3, 6][: len(heard)]
    assert [(r.width, r.num_accepted, r.depth) for r in policy.heard] == [
        (step.width, step.num_accepted, step.depth) for step in steps
    ]


class Stops(FixedWidth):
    """Drafts trees in four rounds, and then no longer."""

    def __init__(self, *, rests):
        super().__init__(7, places=3)
        self.left, self.rests = 4, rests

    def next_round(self, *, may_branch, told=0.0):
        self.left -= 1
        return super().next_round(may_branch=may_branch) if self.left >= 0 else Choice(0, rests=self.rests)


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("rests", [False, True])
def test_positions_are_put_in_order_at_once_where_a_rest_begins(rests, replays):
    """Else after some single tokens. The answer is the same."""
    target = tiny_target("llama")
    target.set_replays(replays)
    engine, _ = begun(Stops(rests=rests), 30, target)
    tokens, ordered = [], []
    while engine.lanes:
        [(_, step)] = engine.advance()
        tokens += step.tokens
        if engine.lanes:
            ordered.append((step.width, engine._batch.caches.rows.lengths.placed is None))
    assert tokens == plain_tokens(target, [3, 1], 30)
    last = max(at for at, (width, _) in enumerate(ordered) if width)
    assert not any(order for width, order in ordered[1:last] if width)
    # With the last tree the first plain round is on its way.
    assert ordered.index((0, True), last) == last + (1 if rests else 8)
    assert ordered[last][1] == rests


def test_of_trees_told_of_together_one_has_a_forecast():
    """Of the others it is known what they kept, and what was promised of that."""
    engine, _ = begun(policy := Together(7, 3, places=3), 30)
    while engine.lanes:
        engine.advance()
    trees = [round for round in policy.heard if round.tree]
    assert [round.forecast is not None for round in trees[:6]] == [False, False, True] * 2
    assert all(round.branched == (round.forecast is not None) for round in trees)
    assert all(0 < round.promised <= round.num_accepted + 1 for round in trees)


@pytest.mark.parametrize("policy", [Draws(7, 3, places=3), Draws(2, 5, waits=True), Draws(2, 5), Draws(0, 0)])
@pytest.mark.parametrize(("pause", "seconds"), [(15, 31), (16, None)])
def test_a_policy_hears_of_each_round_of_its_answer(policy, pause, seconds, monkeypatch):
    """A round takes 16 seconds; its time is not told from the caller's where the caller takes as long."""
    target = tiny_target("llama")
    clock = Clock(monkeypatch, work=16)
    policy.heard.clear()
    answer = decode(
        Session(target, tiny_drafter()), [3, 1], strategy=Greedy(), policy=policy, max_tokens=20, eos_ids=set()
    )
    steps = []
    for step in answer:
        steps.append(step)
        clock.now += pause
    # The first round is a plain one, and nothing came before it; the last ones have fewer places than wished.
    assert len(policy.heard) == len(steps) > 5
    assert [round.drafted for round in policy.heard[:4]] == [0, *[policy.drawn] * 3]
    assert [round.seconds for round in policy.heard[1:]] == [seconds] * (len(steps) - 1)
    for step, round in zip(steps, policy.heard, strict=True):
        assert (round.width, round.num_accepted, round.seconds) == (step.width, step.num_accepted, step.seconds)
        assert round.branched == (policy.branches and step.width > 0)
        assert (round.forecast is not None) == (round.drafted > 0 and (policy.branches or policy.waits))
        assert 0 <= round.promised <= step.depth + 1e-3
        assert round.depth == step.depth
    # A tree holds the first guesses as far as it is deep, so it keeps no fewer drafts than their chain.
    assert all(0 <= round.firsts <= round.num_accepted for round in policy.heard[:-1])
    assert [step.width for step in steps[1:4]] == [policy.width] * 3


class Notes(FixedGroup):
    """Notes what it hears."""

    def observe(self, report):
        vars(self).setdefault("heard", []).append(report)


@pytest.mark.parametrize(("pause", "seconds"), [(15, 31), (16, None)])
def test_a_groups_policy_hears_of_each_round(pause, seconds, monkeypatch):
    """Two lanes, of which one has all its tokens early; the other goes on in two rows, and at once."""
    target, clock = tiny_target("llama"), Clock(monkeypatch, work=16)
    text = [3, *plain_tokens(target, [3], 80)]
    drafter = ScriptedDrafter(tiny_drafter().config, dict(enumerate(text)), frozenset(range(0, 80, 3)))
    engine = Engine(target, drafter, policy=Notes(4))
    lanes = [lane_of(target, drafter, text[:start], wanted, 4) for start, wanted in ((9, 8), (5, 40))]
    for lane in lanes:
        engine.join(lane)
    for expected in range(1, 9):
        results = engine.advance()
        clock.now += pause
        assert len(engine.choosing.group.heard) == expected
        report = engine.choosing.group.heard[-1]
        assert (report.rows, report.drafted, report.width) == (2, 4, 4)
        # The two have just joined.
        assert report.seconds == (seconds if expected > 1 else None)
        assert report.kept == [(lane, step.num_accepted) for lane, step in results]
    assert [lane for lane, _ in results] == lanes[1:]


@pytest.mark.parametrize("replays", [False, True])
def test_the_time_of_rounds_around_an_arrival_is_not_told(replays, monkeypatch):
    """Reading the prompt would count as the round's own, and where it is not waited for, as the next one's, too."""
    target, _ = tiny_target("llama"), Clock(monkeypatch, work=16)
    target.set_replays(replays)
    engine = Engine(target, tiny_drafter(), policy=Notes(4))
    for turn in range(8):
        if turn in (0, 4):
            engine.join(lane_of(target, engine.drafter, [3 + turn, 4], 40, 4))
            engine.join(lane_of(target, engine.drafter, [5 + turn, 6], 40, 4))
        engine.advance()
    seconds = [report.seconds for report in engine.choosing.group.heard]
    assert seconds == [None, 16, 16, 16, None, None if replays else 16, 16, 16]


class Watched:
    """Waits for its drafts, and notes how many of them it may choose from: of an answer alone, and of several."""

    branches = False
    listens_after = 1

    def __init__(self):
        self.offered = []

    def next_round(self, lanes=1, *, may_branch=False, told=0.0):
        return Choice(4)

    def choose(self, chances, *, rows=1):
        self.offered.append(len(chances.best) if isinstance(chances, Forecast) else chances.shape[1])
        return self.offered[-1]

    def observe(self, report):
        pass


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_is_chosen_where_no_answer_has_room_for_drafts(count):
    """A round that keeps all its drafts may leave room for one more token, and the next drafts are made by then."""
    target, offered = tiny_target("llama"), []
    text = [3, *plain_tokens(target, [3], 40)]
    drafter = ScriptedDrafter(tiny_drafter().config, dict(enumerate(text)), frozenset())
    for wanted in range(2, 16):
        engine, policy = Engine(target, drafter, policy=Watched()), Watched()
        lanes = [lane_of(target, drafter, text[:5], wanted, 4) for _ in range(count)]
        tokens = {lane: [] for lane in lanes}
        for lane in lanes:
            lane.policy = policy
            engine.join(lane)
        while engine.lanes:
            for lane, step in engine.advance():
                tokens[lane] += step.tokens
        assert list(tokens.values()) == [text[5 : 5 + wanted]] * count
        offered += policy.offered + engine.choosing.group.offered
    assert {1, 2, 3, 4} == set(offered)


def test_a_lane_that_is_left_alone_drafts_on(monkeypatch):
    """Only a lone answer's very first round is a plain one."""
    monkeypatch.setattr(batches, "_ROUNDS_UNUSED", 0)
    target, drafter = tiny_target("llama"), tiny_drafter()
    engine = Engine(target, drafter, policy=FixedGroup(3))
    short, long = (lane_of(target, drafter, [3, 1], wanted, 3) for wanted in (5, 40))
    engine.join(short)
    engine.join(long)
    widths, rows = [], []
    for _ in range(15):
        rows.append(len(engine._batch.rows))
        widths += [step.width for lane, step in engine.advance() if lane is long]
    assert widths == [3] * 15
    assert rows[1] == 2
    assert rows[-1] == 1


def test_prefill_tells_how_far_it_is(monkeypatch):
    """Of what the session does not hold yet, in chunks of four; it may be stopped between them."""
    monkeypatch.setattr(one_answer, "PREFILL_STEP", 4)
    session, seen = Session(tiny_target("llama"), None), []

    def stop(*at):
        seen.append(at)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill(session, [*range(1, 20)], stop)
    assert seen == [(4, 19), (8, 19)]
    assert session.tokens == [*range(1, 9)]
    prefill(session, [*range(1, 20)], lambda *at: seen.append(at))
    assert seen[2:] == [(4, 11), (8, 11), (11, 11)]
    assert session.tokens == [*range(1, 20)]


def test_an_answer_left_open_gives_way_to_the_next(target):
    prompt = [9, 8, 7]
    truth = plain_tokens(target, prompt, 60)
    drafter = ScriptedDrafter(tiny_drafter(block_size=8).config, {3 + i: token for i, token in enumerate(truth)})
    session = Session(target, drafter)

    def answer(history):
        return decode(session, history, strategy=Greedy(), policy=FixedWidth(5), max_tokens=30, eos_ids=set())

    left = answer(prompt)
    seen = [token for _, step in zip(range(3), left, strict=False) for token in step.tokens]
    assert session.away is not None
    history = prompt + seen
    session.rewind(len(history) - 1)
    assert session.away is None
    after = [token for step in answer(history) for token in step.tokens]
    left.close()
    assert seen + after == truth[: len(seen) + 30]
    assert all(cache.offset == len(session.tokens) for cache in session.target_cache)


@pytest.mark.parametrize("policy", [FixedWidth(3), FixedWidth(9, places=7), FixedWidth(9, places=7, waits=True)])
def test_what_the_host_reads_is_launched_with_its_round(policy, monkeypatch):
    """Anything else would be computed after the next round, for which the host would have to wait. A plain round's
    features are left to the drafter."""
    launched: set[int] = set()
    kept: list[object] = []
    async_eval, settle = mx.async_eval, Engine._settle

    def noting(*arrays):
        flat = [array for group in arrays for array in (group if isinstance(group, list) else [group])]
        kept.extend(flat)
        launched.update(map(id, flat))
        return async_eval(*arrays)

    def checking(engine, current, plan, idle):
        assert {id(array) for array in current.arrays} <= launched
        assert (id(current.verdict.features) in launched) == (current.width > 0)
        return settle(engine, current, plan, idle)

    monkeypatch.setattr(engines.mx, "async_eval", noting)
    monkeypatch.setattr(Engine, "_settle", checking)
    target, drafter = tiny_target("llama"), tiny_drafter()
    session = Session(target, drafter)
    steps = list(decode(session, [3, 1, 4], strategy=Greedy(), policy=policy, max_tokens=20, eos_ids=set()))
    assert [token for step in steps for token in step.tokens] == plain_tokens(target, [3, 1, 4], 20)
    assert kept
