"""Costs of a round: measured by real rounds, remembered on disk, and not when something disturbed them."""

import math
from dataclasses import replace

import mlx.core as mx
import pytest
from tiny import tiny_drafter, tiny_target

from dflash_mlx.policy import costs
from dflash_mlx.policy.timing import PLAIN, Compared
from dflash_mlx.policy.trees_or_chains import PairCosts
from dflash_mlx.policy.width import DEPTHS, SHALLOW, RoundCosts
from dflash_mlx.runtime import backend


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path))
    target, drafter = tiny_target("llama"), tiny_drafter()
    return lambda: costs.load_or_measure(target, drafter, block_size=8, folders=(), dtype=mx.float32)


def stored(tmp_path):
    return list((tmp_path / "round-costs").glob("*.json"))


WIDTHS = {0, 1, 3, 7}


class Machine:
    """In the place of `Timer`: rounds take what `seconds(width, branches=, waits=, depth=)` says."""

    def __init__(self, seconds):
        self.seconds = seconds

    def rounds(self, kinds):
        times = [self.seconds(p.width, branches=p.branches, waits=p.waits, depth=depth) for p, depth in kinds]
        return Compared(times, 0.02)

    def waiting(self, widths, *, places, tree):
        """After a draft of all places."""
        more = 0 if tree else self.draft(places)

        def after(depth, width):
            if width == PLAIN:
                return self.seconds(0, branches=False, waits=False, depth=depth)
            took = self.seconds(width, branches=tree > 0, waits=True, depth=depth)
            return took + (more - self.draft(width) if more and width else more)

        return {depth: {width: after(depth, width) for width in asked} for depth, asked in widths.items()}, 0.03

    def draft(self, places):
        return 0.1 + 0.01 * places


@pytest.fixture
def machine(monkeypatch):
    """Measures a pair by what rounds are said to take."""

    def measure(seconds, *, trees=True, **changes):
        target = tiny_target("llama", **changes)
        monkeypatch.setattr(target, "_trees", trees)
        monkeypatch.setattr(costs, "Timer", lambda target, drafter: Machine(seconds))
        # However slow the rounds are.
        monkeypatch.setattr(costs, "_SECONDS_TO_SPEND", 3000.0)
        return costs.measure(target, tiny_drafter(), block_size=8)

    return measure


@pytest.mark.parametrize("steep", [True, False])
@pytest.mark.parametrize("trees", [True, False])
def test_every_kind_of_round_is_timed(trees, steep, monkeypatch):
    target = tiny_target("llama", max_position_embeddings=1500)
    monkeypatch.setattr(target, "_trees", trees)
    monkeypatch.setattr(costs, "STEEP", 0.0 if steep else 1000.0)
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
    assert measured.chains.steep == steep
    if not (trees and steep):
        assert measured.chains.round_seconds.keys() >= WIDTHS
        tables.append(measured.chains.round_seconds)
    kind = measured.trees if trees else measured.chains
    assert kind.deeper.keys() == {512}
    assert {0, 7} <= kind.deeper[512].keys()
    tables.append(kind.deeper[512])
    assert all(0 < seconds < 5 for table in tables for seconds in table.values())


def test_rounds_are_timed_the_way_they_will_run(machine):
    """Chains wait for their drafts where width costs much, and there trees take their place."""

    def flat(width, *, branches, waits, depth):
        return 5.0 + 0.5 * waits + branches if width else 3.0

    measured = machine(flat)
    assert not measured.chains.steep
    assert {measured.chains.round(width) for width in WIDTHS - {0}} == {5.0}
    assert {measured.trees.round(width) for width in (1, 3, 7, 15, 31)} == {6.0}
    assert measured.chains.plain == measured.trees.plain == 3.0

    def steep(width, *, branches, waits, depth):
        return 5.0 + width + 0.5 * waits if width else 3.0

    chains = machine(steep, trees=False)
    assert chains.chains.steep
    assert chains.trees is None
    assert [chains.chains.round(width) for width in (0, 1, 2, 7)] == pytest.approx([3.0, 6.5, 7.5, 12.5])
    both = machine(steep)
    assert both.trees.steep
    assert [both.trees.round(width) for width in (0, 1, 2, 7, 15)] == [3.0, 6.5, 7.5, 12.5, 20.5]


@pytest.mark.parametrize("trees", [True, False])
def test_where_width_costs_much_its_steps_are_found(trees, machine):
    """Another four rows take another pass over the weights. A round with drafts takes a tenth longer at least."""

    def seconds(width, *, branches, waits, depth):
        return 10.0 + 5.0 * (width // 4)

    kind = machine(seconds, trees=trees)
    kind = kind.trees if trees else kind.chains
    assert [kind.round(width) for width in range(8)] == pytest.approx([10.0, *[11.0] * 3, *[15.0] * 4])
    assert kind.round_seconds.keys() == {*range(6), 7, *((15,) if trees else ())}


def test_larger_trees_are_timed_where_they_cost_little(machine):
    """Of the largest it is known before that they would be slower still."""

    def rising(by):
        return lambda width, *, branches, waits, depth: 10.0 + 3.0 * min(width, 7) + by * max(0, width - 7)

    assert machine(rising(0.1)).trees.round_seconds.keys() >= {15, 31}
    assert max(machine(rising(3.0)).trees.round_seconds) == 15


def test_after_a_long_context_a_few_rounds_are_timed_where_width_costs_little(machine):
    """A kernel may be no use there, so that drafts cost more of a plain round than after a short one."""

    def seconds(width, *, branches, waits, depth):
        return 3.0 + 0.001 * depth if not width else 4.0 + branches + 0.002 * depth * (1 + branches + (width > 7))

    measured = machine(seconds)
    for depth in DEPTHS:
        found = measured.after(depth)
        for kind, widths in ((found.chains, (0, 1, 7)), (found.trees, (0, 1, 7, 15, 31))):
            assert kind.deeper[depth].keys() == {0, 7, *((15, 31) if kind.places else ())}
            for width in widths:
                expected = seconds(width, branches=kind.places > 0, waits=False, depth=depth)
                assert kind.round(width) == pytest.approx(expected)
    assert machine(seconds, max_position_embeddings=1500).chains.deeper.keys() == {512}
    assert machine(seconds, max_position_embeddings=600).chains.deeper == {}


@pytest.mark.parametrize("trees", [True, False])
def test_a_round_that_waits_for_drafts_and_verifies_none_takes_what_was_measured(trees, machine):
    """More than a plain round and a draft: the host waits in between."""
    draft = Machine(None).draft(7)

    def seconds(width, *, branches, waits, depth):
        return 10.0 + width + (2.0 + draft if waits and trees else 2.0 if waits else 0.0)

    found = machine(seconds, trees=trees)
    kind = found.trees if trees else found.chains
    assert kind.plain == 10.0
    assert kind.round(0, drafted=7) == pytest.approx(12.0 + draft, abs=0.1 if not trees else 1e-6)
    assert kind.round(3, drafted=7) - kind.round(3) == pytest.approx(0.0 if trees else draft - Machine(None).draft(3))


@pytest.mark.parametrize(("memory", "further"), [(1e9, {3840, 16128}), (2e8, {3840}), (5e7, set())])
def test_on_cuda_longer_contexts_are_timed_where_their_caches_take_little_memory(memory, further, machine, monkeypatch):
    """Those of the tiny model take 512 bytes for a token."""
    gpu = replace(backend(), kind="cuda", memory_bytes=int(memory))
    monkeypatch.setattr(costs, "backend", lambda: gpu)
    found = machine(lambda width, **_: 3.0 + bool(width), max_position_embeddings=40_000)
    assert found.chains.deeper.keys() == {*DEPTHS, *further}


@pytest.mark.parametrize("trees", [True, False])
def test_rounds_are_timed_after_several_lengths_of_context(trees, machine):
    """From the last of them on, what rounds take more is taken to grow evenly."""

    def seconds(width, *, branches, waits, depth):
        return 10.0 + width + 0.001 * depth * (1 + width)

    for context, known in ((8192, True), (600, False)):
        found = machine(seconds, trees=trees, max_position_embeddings=context)
        for depth in (SHALLOW, 300, *DEPTHS, 2 * DEPTHS[-1]):
            costs = found.after(depth)
            kind = costs.trees if trees else costs.chains
            for width in WIDTHS:
                expected = seconds(width, branches=False, waits=True, depth=depth if known else SHALLOW)
                assert kind.round(width) == pytest.approx(expected)
        assert found.chains.depth == SHALLOW
        if trees and known:
            # Of trees that were timed after a short context only, at least as much as of smaller ones.
            assert found.after(DEPTHS[-1]).trees.round(15) == pytest.approx(
                seconds(15, branches=True, waits=True, depth=SHALLOW) + 0.008 * (DEPTHS[-1] - SHALLOW)
            )


def test_between_lengths_of_context_costs_lie_between(machine):
    """Where a cache no longer fits, what each further token costs is more; after a longer context it is never less."""
    deeper = {512: {0: 12.0, 7: 22.0}, 2048: {0: 10.0, 7: 40.0}}
    costs = PairCosts(RoundCosts({0: 10.0, 7: 20.0}, DRAFT, steep=False, deeper=deeper))

    def at(depth, width):
        return costs.after(depth).chains.round(width)

    assert [at(depth, 0) for depth in (0, SHALLOW, 288, 512, 1280, 2048)] == pytest.approx([10, 10, 11, 12, 12, 12])
    assert [at(depth, 7) for depth in (SHALLOW, 288, 512, 1280, 2048, 4032)] == pytest.approx([20, 21, 22, 31, 40, 60])


def test_widths_that_take_too_long_are_left_out(machine, monkeypatch):
    def seconds(width, *, branches, waits, depth):
        return 1.0 + width

    measured = machine(seconds)
    assert len(measured.trees.round_seconds) > 6
    monkeypatch.setattr(costs, "_FEWEST", 3)
    target = tiny_target("llama")
    monkeypatch.setattr(target, "_trees", True)
    monkeypatch.setattr(costs, "_SECONDS_TO_SPEND", 1.0)
    few = costs.measure(target, tiny_drafter(), block_size=8)
    assert few.trees.round_seconds.keys() == {0, 1, 3, 7}
    assert few.trees.round(5) == pytest.approx(6.0)


def test_trees_that_take_far_too_long_are_left_out(machine):
    def dearer(by):
        return lambda width, *, branches, waits, depth: 5.0 * (1 + by * branches)

    assert machine(dearer(0.7)).trees is None
    assert machine(dearer(0.5)).trees is not None


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
    turns += [disturbed] * 8 + [good] * 2
    spoilt = load()
    for kind in (spoilt.chains, spoilt.trees) if trees else (spoilt.chains,):
        assert list(kind.round_seconds.values()) == sorted(kind.round_seconds.values())
    assert not stored(tmp_path)
    assert load() == good
    assert len(stored(tmp_path)) == 1


def test_of_turns_the_least_figures_count_and_two_have_to_agree(load, tmp_path, turns):
    """Other work and compiling only add time."""
    turns += [PairCosts(chains(1.0, 5.0, 1.4)), PairCosts(chains(1.1, 1.2, 3.0)), PairCosts(chains(1.3, 1.4, 1.6))]
    found = load()
    assert found.chains.round_seconds == {0: 1.0, 1: 1.2, 7: 1.4}
    assert not turns
    assert load() == found


def test_after_the_most_turns_what_nothing_contradicts_is_remembered(load, tmp_path, turns):
    """A machine that is never quiet would measure at each start."""
    turns += [PairCosts(chains(1.0 * 1.5**i, 1.1 * 1.5**i, 1.2 * 1.5**i)) for i in range(8)]
    assert load().chains.round_seconds == {0: 1.0, 1: 1.1, 7: 1.2}
    assert not turns
    assert stored(tmp_path)


def test_a_measurement_that_takes_long_ends_sooner(load, turns, monkeypatch):
    """On a slow machine that is never quiet."""
    monkeypatch.setattr(costs, "_LONG", 0.0)
    turns += [PairCosts(chains(1.0 * 1.5**i, 1.1 * 1.5**i, 1.2 * 1.5**i)) for i in range(8)]
    load()
    assert len(turns) == 8 - 3


@pytest.mark.parametrize(
    ("steep", "spread", "narrow", "enough"),
    [
        (True, 0.05, 1.2, True),
        (True, 0.3, 1.2, False),
        # Of such slow rounds that there was one of each.
        (True, math.inf, 1.2, False),
        (False, 0.05, 1.2, False),
        # As wide rounds took then, and longer than they can.
        (True, 0.05, 1.6, False),
        (True, 0.05, 2.6, False),
    ],
)
def test_one_turn_is_enough_where_width_costs_much_and_nothing_disturbed_it(
    steep, spread, narrow, enough, load, tmp_path, turns
):
    """It compares all rounds with others right before them."""
    turns += [PairCosts(chains(1.0, narrow, 1.7, steep=steep), spread=spread)] * 8
    found = load()
    assert (len(turns) == 7) == enough
    assert found.spread == pytest.approx(spread)
    assert bool(stored(tmp_path)) == (narrow < 2.0)


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
