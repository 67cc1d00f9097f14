"""Costs of a round: measured by real rounds, remembered on disk, and not when something disturbed them."""

from itertools import accumulate, chain
from types import SimpleNamespace

import mlx.core as mx
import pytest
from tiny import tiny_drafter, tiny_target

from dflash_mlx.decoding.session import Session
from dflash_mlx.policy import costs
from dflash_mlx.policy.trees_or_chains import PairCosts
from dflash_mlx.policy.width import RoundCosts


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path))
    target, drafter = tiny_target("llama"), tiny_drafter()
    return lambda: costs.load_or_measure(target, drafter, block_size=8, folders=(), dtype=mx.float32)


def stored(tmp_path):
    return list((tmp_path / "round-costs").glob("*.json"))


WIDTHS = {0, 1, 3, 7}


@pytest.fixture
def machine(monkeypatch):
    """Has rounds take what `seconds(policy)` says; measures a pair by it."""

    def measure(seconds, *, trees=True):
        target = tiny_target("llama")
        monkeypatch.setattr(target, "_trees", trees)
        monkeypatch.setattr(costs, "_round_seconds", lambda session, policy: seconds(policy))
        return costs.measure(target, tiny_drafter(), block_size=8)

    return measure


@pytest.mark.parametrize("trees", [True, False])
def test_every_kind_of_round_is_timed(trees, monkeypatch):
    target = tiny_target("llama")
    monkeypatch.setattr(target, "_trees", trees)
    monkeypatch.setattr(costs, "MOST_GAIN", 100.0)
    # However busy the machine is.
    monkeypatch.setattr(costs, "_SECONDS_TO_SPEND", 300.0)
    measured = costs.measure(target, tiny_drafter(), block_size=8)
    assert (measured.trees is not None) == trees
    tables = [measured.chains.draft_seconds]
    if measured.trees is not None:
        assert measured.trees.places == 7
        assert {0, 1, 7, 15} <= measured.trees.round_seconds.keys()
        tables.append(measured.trees.round_seconds)
    if not (trees and measured.chains.steep):
        assert measured.chains.round_seconds.keys() >= WIDTHS
        tables.append(measured.chains.round_seconds)
    assert all(0 < seconds < 5 for table in tables for seconds in table.values())


def test_rounds_are_timed_the_way_they_will_run(machine):
    """Chains wait for their drafts where width costs much, and there trees take their place."""
    flat = machine(lambda policy: 5.0 + 0.5 * policy.waits + policy.branches if policy.width else 3.0)
    assert not flat.chains.steep
    assert {flat.chains.round(width) for width in WIDTHS - {0}} == {5.0}
    assert {flat.trees.round(width) for width in (1, 3, 7, 15, 31)} == {6.0}
    assert flat.chains.plain == flat.trees.plain == 3.0

    def steep(policy):
        return 5.0 + policy.width + 0.5 * policy.waits if policy.width else 3.0

    chains = machine(steep, trees=False)
    assert chains.chains.steep
    assert chains.trees is None
    assert [chains.chains.round(width) for width in (1, 7)] == [6.5, 12.5]
    both = machine(steep)
    assert both.trees.steep
    assert [both.trees.round(width) for width in (0, 1, 7, 15, 31)] == [3.0, 6.5, 12.5, 20.5, 36.5]


def test_trees_that_take_far_too_long_are_left_out(machine):
    assert machine(lambda policy: 5.0 * (1 + 0.7 * policy.branches)).trees is None
    assert machine(lambda policy: 5.0 * (1 + 0.5 * policy.branches)).trees is not None


@pytest.mark.parametrize("trees", [True, None])
def test_measured_once_then_remembered(trees, load, tmp_path, monkeypatch):
    chains = RoundCosts({0: 1.0, 1: 1.1, 7: 1.2}, {1: 0.1, 7: 0.2}, steep=False)
    found = PairCosts(chains, trees and RoundCosts({0: 1.0, 1: 1.1, 7: 1.2}, {1: 0.1, 7: 0.2}, steep=False, places=7))
    monkeypatch.setattr(costs, "measure", lambda *_, **__: found)
    assert load() == found
    monkeypatch.setattr(costs, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert load() == found
    (path,) = stored(tmp_path)
    path.write_text('{"chains"')
    monkeypatch.setattr(costs, "measure", lambda *_, **__: found)
    assert load() == found


@pytest.fixture
def turns(monkeypatch):
    """Have a measurement's turns find what is in this list, one after another."""
    monkeypatch.setattr(costs, "_AGREEING", 2)
    found = []
    monkeypatch.setattr(costs, "measure", lambda *_, **__: found.pop(0))
    return found


DRAFT = {1: 0.2, 7: 0.2}


def chains(*seconds, steep=False):
    return RoundCosts(dict(zip((0, 1, 7), seconds, strict=True)), DRAFT, steep=steep)


@pytest.mark.parametrize("trees", [True, False])
def test_a_disturbed_measurement_is_repeated_and_not_remembered(trees, load, tmp_path, turns):
    """What serves for now never says that a wider round takes less time."""
    rounds = {True: (3.4, 1.1, 3.7), False: (1.0, 1.1, 2.0)}

    def of(*disturbances):
        return PairCosts(*[chains(*rounds[disturbed], steep=True) for disturbed in disturbances])

    disturbed, good = of(False, True) if trees else of(True), of(False, False) if trees else of(False)
    turns += [disturbed] * 4 + [good] * 2
    spoilt = load()
    for kind in (spoilt.chains, spoilt.trees) if trees else (spoilt.chains,):
        assert list(kind.round_seconds.values()) == sorted(kind.round_seconds.values())
    assert not stored(tmp_path)
    assert load() == good
    assert len(stored(tmp_path)) == 1


def test_of_turns_the_least_figures_count_and_two_have_to_agree(load, tmp_path, turns):
    """Other work and compiling only add time."""
    turns += [PairCosts(chains(1.0, 5.0, 1.4)), PairCosts(chains(1.1, 1.2, 3.0)), PairCosts(chains(1.3, 1.4, 1.6))]
    assert load().chains.round_seconds == {0: 1.0, 1: 1.2, 7: 1.4}
    assert not turns
    assert stored(tmp_path)


def test_after_the_most_turns_what_nothing_contradicts_is_remembered(load, tmp_path, turns):
    """A machine that is never quiet would measure at each start."""
    turns += [PairCosts(chains(1.0 * 1.5**i, 1.1 * 1.5**i, 1.2 * 1.5**i)) for i in range(4)]
    assert load().chains.round_seconds == {0: 1.0, 1: 1.1, 7: 1.2}
    assert not turns
    assert stored(tmp_path)


@pytest.mark.parametrize("last", [False, True])
def test_a_turn_that_was_disturbed_does_not_decide_what_is_timed(load, tmp_path, turns, last):
    """It took width for costly, or trees for too slow, and so timed other rounds than the turns that agree."""
    good = PairCosts(chains(1.0, 1.1, 1.2), chains(1.0, 1.3, 1.4))
    steep, treeless = PairCosts(chains(1.0, 1.1, 1.9, steep=True), good.trees), PairCosts(chains(0.9, 1.0, 1.1))
    turns += [good, steep, treeless, good] if last else [steep, good, good]
    assert load() == good
    assert not turns
    assert stored(tmp_path)


def test_a_measurement_is_of_the_pairs_own_block(load, monkeypatch):
    asked = []

    def measure(target, drafter, *, block_size):
        asked.append(block_size)
        return PairCosts(chains(1.0, 1.1, 1.2))

    monkeypatch.setattr(costs, "measure", measure)
    load()
    assert asked == [8]


def clock(monkeypatch, spans):
    """Have each two looks at the clock be so far apart."""
    ticks = accumulate(chain.from_iterable((0.0, span) for span in spans))
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))


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
def test_as_many_rounds_are_timed_as_are_telling(seconds, timed, kind, warm_up, monkeypatch):
    """The first ones are slower and do not count."""
    now, rounds = 0.0, 0

    def decode(*_, **__):
        nonlocal now, rounds
        yield "the prompt's own step"
        while True:
            rounds += 1
            now += seconds if rounds > warm_up else 100.0
            yield "a round"

    monkeypatch.setattr(costs, "decode", decode)
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(costs, "backend", lambda: SimpleNamespace(kind=kind))
    # Other tests measure for a shorter time.
    monkeypatch.setattr(costs, "_SECONDS_A_WIDTH", 0.2)
    found = costs._round_seconds(Session(tiny_target("llama"), tiny_drafter()), costs.FixedWidth(3))
    assert found == pytest.approx(seconds)
    assert rounds == min(warm_up + timed, 40)


def test_a_drafts_time_is_the_median_after_the_first(monkeypatch):
    clock(monkeypatch, [50.0, 1.0, 4.0, 2.0])
    session = Session(tiny_target("llama"), tiny_drafter())
    session.feed([0] * 64)
    assert costs._draft_seconds(session, 3) == 2.0
