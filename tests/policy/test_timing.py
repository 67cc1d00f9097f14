"""How rounds are timed: which of them count, and to which width a time belongs."""

import math
import random
from types import SimpleNamespace

import mlx.core as mx
import pytest
from policy.simulated import SharedComputer
from tiny import mostly_slow, tiny_drafter, tiny_eagle3, tiny_target
from tiny_families import FAMILY_CONFIGS, family_target, unavailable

from dflash_mlx.policy import timing
from dflash_mlx.policy.timing import PLAIN, Rounds, Timer, compared
from dflash_mlx.policy.width import FixedWidth


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))


def engine_of(monkeypatch, advance):
    """Have timers use an engine whose rounds `advance(policy)` makes."""
    make = lambda self, policy, depth: SimpleNamespace(advance=lambda: advance(policy), lanes=[])  # noqa: E731
    monkeypatch.setattr(Timer, "_engine", make)


@pytest.fixture
def timer():
    return Timer(tiny_target("llama"), tiny_drafter())


@pytest.mark.parametrize(("kind", "warm_up"), [("cpu", 1), ("metal", 3)])
@pytest.mark.parametrize(
    ("seconds", "turns", "timed"),
    [
        (1.0, 1, 1),  # very slow rounds: one
        (0.4, 3, 1),  # slow ones: three
        (0.03, 4, 2),  # quick ones: until a fifth of a second is full
        (0.001, 10, 5),  # and fifty in all at the most
    ],
)
def test_as_many_rounds_are_timed_as_are_telling(seconds, turns, timed, kind, warm_up, timer, monkeypatch):
    """The first ones are slower and do not count, nor those that nothing was launched ahead for."""
    clock, rounds = Clock(monkeypatch), {1: 0, 3: 0}

    def advance(policy):
        count = rounds[policy.width] = rounds[policy.width] + 1
        counts = count > 1 + warm_up and (count - 2 - warm_up) % (1 + timed) > 0
        clock.now += policy.width * seconds if counts else 0.001 * seconds if count > 1 + warm_up else 100.0

    engine_of(monkeypatch, advance)
    monkeypatch.setattr(timing, "backend", lambda: SimpleNamespace(kind=kind))
    # Other tests measure for a shorter time.
    monkeypatch.setattr(timing, "_SECONDS_A_WIDTH", 0.2)
    assert timer.rounds([Rounds(FixedWidth(1))]).times == pytest.approx([seconds])
    assert rounds == {1: 1 + warm_up + turns * (1 + timed), 3: 0}


@pytest.mark.parametrize("seed", range(5))
def test_a_computer_that_becomes_slower_for_a_while_is_so_for_all_kinds(seed, timer, monkeypatch):
    """Rounds of 3, 4 and 5 ms, on a computer that now and then takes 1.6 times as long for a second or so."""
    clock, rng, slow, until = Clock(monkeypatch), random.Random(seed), False, 0.0

    def advance(policy):
        nonlocal slow, until
        if clock.now > until:
            slow, until = not slow, clock.now + rng.uniform(0.1, 1.5)
        clock.now += 0.001 * (3 + policy.width) * (1.6 if slow else 1.0) * rng.uniform(0.95, 1.05)

    engine_of(monkeypatch, advance)
    monkeypatch.setattr(timing, "_SECONDS_A_WIDTH", 0.2)
    found = timer.rounds([Rounds(FixedWidth(width)) for width in (0, 1, 2)]).times
    assert found[1] / found[0] == pytest.approx(4 / 3, rel=0.04)
    assert found[2] / found[0] == pytest.approx(5 / 3, rel=0.04)
    # It may have been slow throughout.
    assert 0.95 * 0.003 < found[0] < 1.65 * 0.003


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kinds", [5, 30])
def test_a_computer_that_is_slow_most_of_the_time_changes_little(kinds, seed):
    """As beside an H100, whose processors others used, too: 1.7 times as slow for about half a second at a time."""
    rng = random.Random(seed)
    computer = SharedComputer(rng, noise=lambda: rng.uniform(1, 1.1))
    takes = [5 * (1 + 0.3 * kind / kinds) for kind in range(kinds)]
    found = compared([[[computer(ms) for _ in range(5)] for ms in takes] for _ in range(10)]).times
    shares = sorted(one / ms for one, ms in zip(found, takes, strict=True))
    assert shares[-1] / shares[0] < 1.08
    assert 0.99 < shares[0] < 1.8


def test_turns_are_compared_by_how_fast_the_computer_was():
    assert compared([[[3.0]]]) == (pytest.approx([3.0]), math.inf)
    slow_later = [[[1.0, 1.0], [4.0, 4.0]], [[1.5, 9.0], [6.0, 6.0]], [[2.0, 2.0], [8.0, 9.0]]]
    assert compared(slow_later).times == pytest.approx([1.0, 4.0], rel=0.02)


def test_the_spread_is_the_usual_distance_of_comparisons():
    assert compared([[[1.0], [4.0]]] * 5).spread == pytest.approx(0.0, abs=1e-6)
    assert compared([[[1.0], [4.0]]] * 4 + [[[1.0], [9.0]]]).spread == pytest.approx(0.0, abs=0.01)
    unsteady = [[[1.0], [share]] for share in (1.0, 2.0, 4.0, 1.0, 4.0)]
    assert compared(unsteady).spread == pytest.approx(math.log(2), rel=0.1)


@pytest.mark.parametrize("early", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tree", [0, 7])
def test_a_time_belongs_to_the_width_that_it_was_measured_with(early, tree, timer, monkeypatch):
    """Whatever part of a round is done while it is launched, before the one before it was looked at."""
    clock, widths, launched = Clock(monkeypatch), {64: [PLAIN, 3, 1, 7, 2], 512: [5, PLAIN]}, {}

    def advance(policy, depth):
        choice = policy.next_round(may_branch=True)
        if choice.places:
            assert (choice.places, choice.tree, choice.waits) == (7, tree, True)
        mine = launched.setdefault(depth, [])
        mine.append(1 + policy.choose(None) if choice.places else 0.5)
        # Other answers had rounds in the meantime, so that the first round of these is over when they go on.
        waited = 0.0 if advance.last != depth else (1 - early) * mine[-2]
        clock.now += 0.001 * (depth / 64) * (early * mine[-1] + waited)
        advance.last = depth

    advance.last = None
    make = lambda self, policy, depth: SimpleNamespace(advance=lambda: advance(policy, depth), lanes=[])  # noqa: E731
    monkeypatch.setattr(Timer, "_engine", make)
    found, spread = timer.waiting(widths, places=7, tree=tree)
    milliseconds = {64: {PLAIN: 0.5, 3: 4, 1: 2, 7: 8, 2: 3}, 512: {5: 48, PLAIN: 4}}
    for depth, times in milliseconds.items():
        assert found[depth] == pytest.approx({width: 0.001 * time for width, time in times.items()})
    assert spread == pytest.approx(0.0, abs=1e-6)


def test_a_drafts_time_is_the_median_after_the_first(timer, monkeypatch):
    spans = iter([50.0, 1.0, 4.0, 2.0])
    ticks = iter([tick for span in spans for tick in (0.0, span)])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert timer.draft(3) == 2.0


@pytest.mark.parametrize("make", [tiny_drafter, lambda: tiny_eagle3(1)], ids=["dflash", "eagle3"])
@pytest.mark.parametrize("rows", [True, False])
def test_rounds_have_the_context_that_they_are_said_to_have(make, rows, monkeypatch):
    """Also where a target takes no rows, so that the context has to be read."""
    target, drafter = tiny_target("llama"), make()
    monkeypatch.setattr(target, "_rows", rows)
    monkeypatch.setattr(target, "_trees", rows)
    engine = Timer(target, drafter)._engine(FixedWidth(2), 100)
    [lane] = engine.lanes
    for _ in range(3):
        engine.advance()
    assert len(lane.session.tokens) >= 103
    assert engine._batch.at.item() >= 103
    for leaf in engine._batch.caches.arrays():
        assert leaf.shape[2] >= 103
    assert all(mx.isfinite(leaf).all() for leaf in engine._batch.caches.arrays())


@pytest.mark.parametrize("family", mostly_slow(sorted(FAMILY_CONFIGS), "gemma3", "qwen3_5"))
def test_rounds_of_every_family_can_be_timed(family):
    if reason := unavailable(family):
        pytest.skip(reason)
    timer = Timer(family_target(family), tiny_drafter())
    assert (
        min(timer.rounds([Rounds(FixedWidth(2), 40), Rounds(FixedWidth(0), 40), Rounds(FixedWidth(2), 90)]).times) > 0
    )
    assert timer.draft(2) > 0
    found, spread = timer.waiting({40: [PLAIN, 0, 1, 3], 90: [PLAIN, 3]}, places=3, tree=0)
    assert {depth: list(times) for depth, times in found.items()} == {40: [PLAIN, 0, 1, 3], 90: [PLAIN, 3]}
    assert all(seconds > 0 for times in found.values() for seconds in times.values())
    assert spread >= 0
