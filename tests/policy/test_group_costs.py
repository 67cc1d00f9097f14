"""What rounds of several lanes cost: by real rounds, of which a draft is a part."""

import pytest
from tiny import tiny_drafter, tiny_target

from dflash_mlx.policy import group_costs
from dflash_mlx.policy.group_costs import measure_group


def test_every_number_of_lanes_is_timed(monkeypatch):
    """Real rounds and drafts are made, whose times are set: a pass of those is a difference, of no use by a clock."""

    def seconds(made):
        def timed(*args):
            made(*args)
            return 2.0 if made is round_seconds else 0.5

        return timed

    round_seconds = group_costs._round_seconds
    monkeypatch.setattr(group_costs, "_SECONDS_TO_SPEND", 300.0)
    monkeypatch.setattr(group_costs, "_round_seconds", seconds(round_seconds))
    monkeypatch.setattr(group_costs, "_seconds", seconds(group_costs._seconds))
    costs = measure_group(tiny_target("llama"), tiny_drafter(), places=7, most_lanes=5)
    assert costs.plain.keys() == {2, 4}
    assert {4, 8} <= costs.verify.keys() == costs.draft.keys() <= {4, 8, 16, 32}
    assert all(seconds > 0 for table in (costs.plain, costs.verify, costs.draft) for seconds in table.values())
    assert costs.more_lanes.keys() == {2, 4}
    assert min(costs.more_lanes.values()) == costs.more_lanes[2] == 0


@pytest.mark.parametrize("a_lane", [0.0, 0.1])
@pytest.mark.parametrize(("a_row", "rows"), [(0.01, {4, 8, 16, 32}), (0.2, {4, 8, 16}), (2.0, {4, 8})])
def test_a_round_is_a_pass_and_a_draft_and_what_more_lanes_take(a_row, rows, a_lane, monkeypatch):
    """Wider rounds are not timed where they could not pay even if every draft were kept."""
    timed = []

    def taken(lanes, width):
        return 1.0 + (a_row * lanes * (width + 1) + a_lane * (lanes - 2) + 0.3 if width else 0.0)

    def round_seconds(engine, policy, width):
        timed.append((len(engine.lanes), width))
        return taken(*timed[-1])

    monkeypatch.setattr(group_costs, "_round_seconds", round_seconds)
    monkeypatch.setattr(group_costs, "_seconds", lambda work: 0.3)
    costs = measure_group(tiny_target("llama"), tiny_drafter(), places=7, most_lanes=4)
    assert costs.verify.keys() == rows
    for lanes, width in timed:
        assert costs.round(lanes, width) == pytest.approx(taken(lanes, width))
    assert costs.plain == {2: 1.0, 4: 1.0}
    # Rounds of 8 rows that only four lanes have made tell nothing of the lanes.
    assert costs.more_lanes == {2: 0.0, 4: pytest.approx(2 * a_lane if (2, 3) in timed else 0.0)}


def test_when_time_is_up_it_is_still_found_out_how_many_lanes_gain(monkeypatch):
    plain = {2: 1.0, 4: 1.2, 8: 1.5, 16: 2.9, 32: 5.8}
    timed = []

    def round_seconds(engine, policy, width):
        timed.append((len(engine.lanes), width))
        return 2.0 if width else plain[len(engine.lanes)]

    monkeypatch.setattr(group_costs, "_round_seconds", round_seconds)
    monkeypatch.setattr(group_costs, "_SECONDS_TO_SPEND", 0.0)
    costs = measure_group(tiny_target("llama"), tiny_drafter(), places=3, most_lanes=32)
    assert costs.plain == {2: 1.0, 4: 1.2, 8: 1.5, 16: 2.9}
    assert timed == [(2, 0), (2, 1), (2, 3), (4, 0), (8, 0), (16, 0)]
