"""What rounds of several lanes cost: by real rounds, of which a draft is a part."""

import pytest
from tiny import tiny_drafter, tiny_target

from dflash_mlx.policy import group_costs
from dflash_mlx.policy.group_costs import measure_group


def test_every_number_of_lanes_is_timed(monkeypatch):
    monkeypatch.setattr(group_costs, "_SECONDS_TO_SPEND", 300.0)
    costs = measure_group(tiny_target("llama"), tiny_drafter(), places=7, most_lanes=5)
    assert costs.plain.keys() == {2, 4}
    assert {4, 8} <= costs.verify.keys() == costs.draft.keys() <= {4, 8, 16, 32}
    assert all(seconds > 0 for table in (costs.plain, costs.verify, costs.draft) for seconds in table.values())


@pytest.mark.parametrize(("a_row", "rows"), [(0.01, {4, 8, 16, 32}), (0.5, {4, 8, 16}), (2.0, {4, 8})])
def test_a_round_is_a_pass_and_a_draft(a_row, rows, monkeypatch):
    """Wider rounds are not timed where they could not pay even if every draft were kept."""
    timed = []

    def taken(lanes, width):
        return 1.0 + a_row * lanes * width + (0.3 if width else 0.0)

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
