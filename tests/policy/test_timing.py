"""How rounds are timed: which of them count, and to which width a time belongs."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from tiny import mostly_slow, tiny_drafter, tiny_eagle3, tiny_target
from tiny_families import FAMILY_CONFIGS, family_target, unavailable

from dflash_mlx.policy import timing
from dflash_mlx.policy.timing import Timer
from dflash_mlx.policy.width import FixedWidth


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))


def engine_of(monkeypatch, advance):
    """Have timers use an engine whose rounds `advance(policy)` makes."""
    make = lambda self, policy: SimpleNamespace(advance=lambda: advance(policy), lanes=[])  # noqa: E731
    monkeypatch.setattr(Timer, "_engine", make)


@pytest.fixture
def timer():
    return Timer(tiny_target("llama"), tiny_drafter(), depth=64)


@pytest.mark.parametrize(("kind", "warm_up"), [("cpu", 1), ("metal", 3)])
@pytest.mark.parametrize(
    ("seconds", "timed"),
    [
        (1.0, 1),  # very slow ones: one
        (0.4, 3),  # slow ones: three
        (0.0625, 4),  # quick ones: until a fifth of a second is full
        (0.001, 40),  # and 40 rounds in all at the most
    ],
)
def test_as_many_rounds_are_timed_as_are_telling(seconds, timed, kind, warm_up, timer, monkeypatch):
    """The first ones are slower and do not count."""
    clock, rounds = Clock(monkeypatch), -1

    def advance(policy):
        nonlocal rounds
        rounds += 1
        clock.now += seconds if rounds > warm_up else 100.0

    engine_of(monkeypatch, advance)
    monkeypatch.setattr(timing, "backend", lambda: SimpleNamespace(kind=kind))
    # Other tests measure for a shorter time.
    monkeypatch.setattr(timing, "_SECONDS_A_WIDTH", 0.2)
    assert timer.round(FixedWidth(3)) == pytest.approx(seconds)
    assert rounds == min(warm_up + timed, 40)


@pytest.mark.parametrize("early", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tree", [0, 7])
def test_a_time_belongs_to_the_width_that_it_was_measured_with(early, tree, timer, monkeypatch):
    """Whatever part of a round is done while it is launched, before the one before it was looked at."""
    clock, widths, launched = Clock(monkeypatch), [3, 1, 7, 2], []

    def advance(policy):
        choice = policy.next_round(may_branch=True)
        assert (choice.places, choice.tree, choice.waits) == (7, tree, True)
        launched.append(policy.choose(None))
        before = launched[-2] if len(launched) > 1 else 0
        clock.now += early * launched[-1] + (1 - early) * before

    engine_of(monkeypatch, advance)
    assert timer.in_turns(widths, places=7, tree=tree) == pytest.approx({width: width for width in widths})


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
    engine = Timer(target, drafter, depth=100)._engine(FixedWidth(2))
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
    timer = Timer(family_target(family), tiny_drafter(), depth=40)
    assert timer.round(FixedWidth(2)) > 0
    assert timer.draft(2) > 0
    assert timer.in_turns([1, 3], places=3, tree=0).keys() == {1, 3}
