"""What rounds of several lanes cost: by real rounds, of which a draft is a part."""

import random

import pytest
from tiny import tiny_drafter, tiny_target

from dflash_mlx.policy import group_costs
from dflash_mlx.policy.group_costs import measure_group


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
    costs = measure_group(tiny_target("llama"), tiny_drafter(), places=7, most_lanes=5)
    assert costs.plain.keys() == {2, 4}
    assert {4, 8} <= costs.verify.keys() == costs.draft.keys() <= {4, 8, 16, 32}
    assert all(seconds > 0 for table in (costs.plain, costs.verify, costs.draft) for seconds in table.values())
    assert costs.more_lanes.keys() == {2, 4}
    assert min(costs.more_lanes.values()) == costs.more_lanes[2] == 0


@pytest.mark.parametrize("a_lane", [0.0, 0.1])
@pytest.mark.parametrize(("a_row", "rows"), [(0.01, {4, 8, 16, 32}), (0.2, {4, 8, 16}), (2.0, {4, 8})])
def test_a_round_is_a_pass_and_a_draft_and_what_more_lanes_take(a_row, rows, a_lane, taking):
    """Wider rounds are not timed where they could not pay even if every draft were kept."""

    def rounds(lanes, width):
        return 1.0 + (a_row * lanes * (width + 1) + a_lane * (lanes - 2) + 0.3 if width else 0.0)

    timed = taking(rounds, 0.3)
    costs = measure_group(tiny_target("llama"), tiny_drafter(), places=7, most_lanes=4)
    assert costs.verify.keys() == rows
    for lanes, width in timed:
        assert costs.round(lanes, width) == pytest.approx(rounds(lanes, width))
    assert costs.plain == pytest.approx({2: 1.0, 4: 1.0})
    # Rounds of 8 rows that only four lanes have made tell nothing of the lanes.
    assert costs.more_lanes == {2: 0.0, 4: pytest.approx(2 * a_lane if (2, 3) in timed else 0.0)}


def test_when_time_is_up_it_is_still_found_out_how_many_lanes_gain(taking, monkeypatch):
    plain = {2: 1.0, 4: 1.2, 8: 1.5, 16: 2.9, 32: 5.8}
    timed = taking(lambda lanes, width: 2.0 if width else plain[lanes], 0.5)
    monkeypatch.setattr(group_costs, "_SECONDS_TO_SPEND", 0.0)
    costs = measure_group(tiny_target("llama"), tiny_drafter(), places=3, most_lanes=32)
    assert costs.plain == pytest.approx({2: 1.0, 4: 1.2, 8: 1.5, 16: 2.9})
    assert timed == [(2, 0), (2, 1), (2, 3), (4, 0), (8, 0), (16, 0)]


@pytest.mark.parametrize("seed", range(3))
def test_a_slow_while_of_the_computer_makes_no_width_look_slow(seed, taking, monkeypatch):
    """Quick rounds are timed in turns of all widths, some of which meet a slow while."""
    rng, slow = random.Random(seed), False

    def rounds(lanes, width):
        nonlocal slow
        slow = rng.random() < (0.8 if slow else 0.2)
        return (0.004 + 0.0002 * width) * (1.7 if slow else 1.0) * rng.uniform(1.0, 1.03)

    timed = taking(rounds, 0.001)
    monkeypatch.setattr(group_costs, "_SLOW", 0.03)
    costs = measure_group(tiny_target("llama"), tiny_drafter(), places=7, most_lanes=2)
    assert timed.count((2, 7)) > 2
    for width in (1, 3, 7):
        assert costs.round(2, width) / costs.round(2, 0) == pytest.approx(1 + 0.05 * width, rel=0.05)
