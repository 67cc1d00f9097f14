"""What rounds show of costs that were measured wrong, against closed forms."""

import math
from dataclasses import replace

import pytest

from dflash_mlx.policy.drift import Drift
from dflash_mlx.policy.width import RoundCosts

FLAT = RoundCosts({0: 3.0, 1: 5.0, 15: 5.2}, {1: 1.0, 15: 1.0}, steep=False)
STEEP = RoundCosts({0: 50.0, 1: 70.0, 7: 110.0, 15: 130.0}, {1: 12.0, 15: 25.0}, steep=True)


def copy(costs):
    return replace(costs, drift=Drift())


def take_turns(costs, drafted, plain, *, turns, rounds=18):
    """Rounds of 7 drafts and plain ones by turns, which take so many times as long as measured."""
    for _ in range(turns):
        for factor, width in ((drafted, 7), (plain, 0)):
            for _ in range(rounds):
                costs.observe(factor * STEEP.round(width), width, width)


def test_rounds_with_drafts_that_were_measured_wrong_are_corrected():
    """A change from one kind to the other tells by how much; what was measured weighs as much as two changes."""
    costs = copy(STEEP)
    take_turns(costs, 1.2, 1.0, turns=1)
    assert costs.drift.of_drafts == pytest.approx(1.2 ** (1 / 3))
    take_turns(costs, 1.2, 1.0, turns=20)
    assert len(costs.drift.lessons.of_drafts) == 15
    assert costs.round(7) / costs.plain == pytest.approx(1.2 ** (15 / 17) * STEEP.round(7) / STEEP.plain)
    # Drafts that are made and not verified are a share of a round, and neither kind.
    assert costs.round(0, drafted=1) - costs.plain == pytest.approx(12 * costs.drift.factor)
    later = copy(STEEP)
    later.follow(Drift(lessons=costs.drift.lessons))
    assert later.drift.of_drafts == costs.drift.of_drafts


def test_a_machine_that_slows_down_is_not_taken_for_wrong_figures():
    costs = copy(STEEP)
    take_turns(costs, 1.0, 1.0, turns=2)
    # At once with the change to rounds with drafts.
    take_turns(costs, 2.0, 2.0, turns=2)
    assert max(costs.drift.lessons.of_drafts) == pytest.approx(math.log(2))
    assert costs.drift.of_drafts == pytest.approx(1.0)


@pytest.mark.parametrize(("drafted", "plain"), [(9, 18), (8, 18), (9, 17)])
def test_kinds_are_compared_by_eight_usual_rounds_each(drafted, plain):
    """The first round with drafts catches up, and after trees plain ones take longer for a while."""
    costs = copy(STEEP)
    for _ in range(4):
        for width, unusual, rounds in ((7, 1, drafted), (0, 10, plain)):
            for i in range(rounds):
                costs.observe((5 if i < unusual else 1) * STEEP.round(width), width, width)
                costs.observe(9 * STEEP.round(0, drafted=7), 0, 7)  # drafts that were not verified
    assert costs.drift.lessons.of_drafts == pytest.approx([0] * 7 if (drafted, plain) == (9, 18) else [])


def test_widths_that_were_measured_wrong_are_corrected():
    """Each round is compared with the median of the five before; what was measured weighs as much as four."""
    costs = copy(STEEP)
    for _ in range(20):
        for width in (7, 7, 7, 7, 7, 15):
            costs.observe((1.2 if width == 15 else 1.0) * STEEP.round(width), width, width)
    assert costs.drift.of_widths == pytest.approx({7: 1.0, 15: 1.2 ** (15 / 19)})
    widest = 130.0 * 1.2 ** (15 / 19)
    known = [costs.round(width) / costs.drift.factor for width in (1, 7, 11, 15)]
    assert known == pytest.approx([70.0, 110.0, (110.0 + widest) / 2, widest])
    later = copy(STEEP)
    later.follow(Drift(lessons=costs.drift.lessons))
    assert later.round(15) == pytest.approx(widest)


def test_widths_that_were_not_measured_teach_about_the_nearest():
    costs = copy(STEEP)
    for width in (1, 1, 1, 1, 1, 5):
        costs.observe((1.2 if width == 5 else 1.0) * STEEP.round(width), width, width)
    assert costs.drift.of_widths == pytest.approx({7: 1.2 ** (1 / 5)})


def test_where_width_costs_little_all_widths_are_alike():
    costs = copy(FLAT)
    for width in (1, 15) * 10:
        costs.observe((1.2 if width == 15 else 1.0) * FLAT.round(width), width, width)
    assert costs.drift.of_widths == {}
