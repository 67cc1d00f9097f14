"""What rounds of several lanes cost: by real rounds, of which a draft is a part."""

import random

import mlx.core as mx
import pytest
from tiny import tiny_drafter, tiny_target

from dflash_mlx.policy import group_costs
from dflash_mlx.policy.group import GroupCosts
from dflash_mlx.policy.group_costs import load_or_measure_group, measure_group


@pytest.fixture
def taking(monkeypatch):
    """Have drafts and rounds, made or not, take what is said; tells which rounds of (lanes, width) were timed."""
    real_times_of = group_costs._times_of

    def take(rounds, draft, *, made=False):
        timed = []

        def times_of(engine, policy, width):
            if made:
                real_times_of(engine, policy, width)
            timed.append((len(engine.lanes), width))
            return [rounds(*timed[-1])]

        def some_times(work, **_):
            if made:
                work()
            return [draft]

        monkeypatch.setattr(group_costs, "_times_of", times_of)
        monkeypatch.setattr(group_costs, "some_times", some_times)
        return timed

    monkeypatch.setattr(group_costs, "_SECONDS_TO_SPEND", 300.0)
    return take


def test_every_number_of_lanes_is_timed(taking):
    """Real rounds and drafts are made, whose times are set: a pass of those is a difference, of no use by a clock."""
    taking(lambda lanes, width: 2.0, 0.5, made=True)
    costs, _ = measure_group(tiny_target("llama"), tiny_drafter(), places=7, most_lanes=5)
    assert costs.plain.keys() == {2, 4}
    assert {lanes: list(table) for lanes, table in costs.verify.items()} == {2: [2, 4, 8, 16], 4: [4, 8, 16, 32]}
    assert costs.draft.keys() == {4, 8, 16, 32}
    assert all(
        seconds > 0 for table in (costs.plain, costs.draft, *costs.verify.values()) for seconds in table.values()
    )


@pytest.mark.parametrize("a_lane", [0.0, 0.1])
@pytest.mark.parametrize(("a_row", "of_two", "of_four"), [(0.01, 7, 7), (0.2, 7, 1), (2.0, 1, 1)])
def test_a_round_is_a_pass_and_a_draft(a_row, of_two, of_four, a_lane, taking):
    """Wider rounds are not timed where they could not pay even if every draft were kept."""

    def rounds(lanes, width):
        return 1.0 + (a_row * lanes * (width + 1) + a_lane * (lanes - 2) + 0.3 if width else 0.0)

    timed = taking(rounds, 0.3)
    costs, spread = measure_group(tiny_target("llama"), tiny_drafter(), places=7, most_lanes=4)
    assert max(width for lanes, width in timed if lanes == 2) == of_two
    assert ((4, 3) in timed) == (of_four >= 3)
    for lanes, widest in ((2, of_two), (4, of_four)):
        for width in (1, 3, 7):
            if width <= widest:
                assert costs.round(lanes, width) == pytest.approx(rounds(lanes, width))
            else:
                assert costs.round(lanes, width) > 0.9 * rounds(lanes, width)
    assert costs.plain == pytest.approx({2: 1.0, 4: 1.0})
    assert spread == pytest.approx(0.0, abs=1e-6)


def test_between_numbers_of_lanes_and_beyond_them_rows_tell_what_a_pass_takes():
    costs = GroupCosts({2: 1.0, 8: 1.0}, {2: {4: 1.0, 32: 1.0}, 8: {16: 2.0, 128: 9.0}}, {4: 0.0})
    seconds = {(2, 1): 1.0, (4, 7): 1 / 3 * 3.0 + 2 / 3, (8, 15): 9.0, (16, 7): 9.0, (32, 1): 5.0}
    for (lanes, width), expected in seconds.items():
        assert costs.round(lanes, width) == pytest.approx(expected)


def test_when_time_is_up_it_is_still_found_out_how_many_lanes_gain(taking, monkeypatch):
    plain = {2: 1.0, 4: 1.2, 8: 1.5, 16: 2.9, 32: 5.8}
    timed = taking(lambda lanes, width: 2.0 if width else plain[lanes], 0.5)
    monkeypatch.setattr(group_costs, "_SECONDS_TO_SPEND", 0.0)
    costs, _ = measure_group(tiny_target("llama"), tiny_drafter(), places=3, most_lanes=32)
    assert costs.plain == pytest.approx({2: 1.0, 4: 1.2, 8: 1.5, 16: 2.9})
    assert timed == [(2, 0), (2, 1), (2, 3), (4, 0), (8, 0), (16, 0)]


@pytest.mark.parametrize("usual", [0.004, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_a_slow_while_of_the_computer_makes_no_width_look_slow(seed, usual, taking):
    """Rounds are timed in turns of all widths, some of which meet a slow while."""
    rng, slow = random.Random(seed), False

    def rounds(lanes, width):
        nonlocal slow
        slow = rng.random() < (0.8 if slow else 0.2)
        return usual * (1.0 + 0.05 * width) * (1.7 if slow else 1.0) * rng.uniform(1.0, 1.03)

    timed = taking(rounds, 0.25 * usual)
    costs, _ = measure_group(tiny_target("llama"), tiny_drafter(), places=7, most_lanes=2)
    assert timed.count((2, 7)) > 2
    for width in (1, 3, 7):
        assert costs.round(2, width) / costs.round(2, 0) == pytest.approx(1 + 0.05 * width, rel=0.05)


@pytest.mark.parametrize(("disturbed", "kept"), [(1.05, True), (3.0, False)])
def test_costs_that_other_work_spoilt_are_not_remembered(disturbed, kept, taking, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    rng = random.Random(0)
    timed = taking(lambda lanes, width: 0.1 * rng.choice([1.0, disturbed]), 0.02)
    target, drafter = tiny_target("llama"), tiny_drafter()

    def load():
        before = len(timed)
        load_or_measure_group(target, drafter, places=7, most_lanes=2, folders=(tmp_path,), dtype=mx.float32)
        return len(timed) > before

    assert load()
    assert load() != kept


def test_a_round_without_drafts_never_takes_longer_than_one_with(taking):
    """Something else took the time."""
    seconds = {(2, 0): 9.0, (2, 1): 1.2, (2, 3): 1.4, (4, 0): 1.5}
    taking(lambda lanes, width: seconds.get((lanes, width), 2.0), 0.2)
    costs, _ = measure_group(tiny_target("llama"), tiny_drafter(), places=7, most_lanes=4)
    assert costs.plain == pytest.approx({2: 1.2, 4: 1.5})
    assert costs.round(2, 3) == pytest.approx(1.4)
