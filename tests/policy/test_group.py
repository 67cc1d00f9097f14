"""The width that lanes share, on simulated machines and texts, and the costs that it is chosen by."""

import numpy as np
import pytest

from dflash_mlx.decoding.policies import Choice, RoundReport
from dflash_mlx.policy.group import FixedGroup, GroupCosts, GroupWidth, interpolate, rising, worthwhile_lanes

PLACES = 15


def flat():
    """A machine with power to spare: rows cost next to nothing."""
    return GroupCosts({2: 1.0, 8: 1.1, 32: 1.4}, {2: {4: 1.2, 64: 1.3, 512: 1.6}}, {4: 0.2, 512: 0.3})


def bound_by_memory():
    """As GPUs are: a pass costs its weights, and from some number of rows on its arithmetic."""
    verify = {2: {4: 1.02, 16: 1.1, 32: 1.25, 64: 1.8, 128: 3.2, 512: 12.0}}
    return GroupCosts({2: 1.0, 8: 1.05, 32: 1.3}, verify, {4: 0.1, 64: 0.11, 512: 0.2})


def proportional():
    """As a CPU of few cores: every row costs the same."""
    return GroupCosts({2: 2.0, 32: 32.0}, {2: {4: 4.0, 512: 512.0}}, {4: 0.4, 512: 51.2})


def sure(chance):
    return lambda rng, lanes: np.full((lanes, PLACES), chance)


# Chances (lanes, places) that the target keeps what is drafted, given that it kept what comes before.
TEXTS = {
    "half": sure(0.5),
    "most": sure(0.7),
    "nearly all": sure(0.9),
    "each lane otherwise": lambda rng, lanes: np.tile(rng.beta(3, 1, (lanes, 1)), PLACES),
    "each place otherwise": lambda rng, lanes: rng.beta(3, 1, (lanes, PLACES)),
}


def width_by(policy, chances):
    """What a policy chooses for lanes whose drafts have these chances (lanes, places)."""
    return policy.choose(chances, rows=len(chances))


def run(policy, costs, text, lanes, rounds, *, seed=0):
    """Let a policy decode; what it reaches in the second half, in the best fixed width's tokens a second.

    Tokens are counted as what is expected of them, so that the drafts' luck does not matter.
    """
    rng = np.random.default_rng(seed)
    tokens = seconds = 0.0
    fixed = np.zeros(PLACES + 1)
    for i in range(rounds):
        chances = np.clip(text(rng, lanes), 1e-3, 0.999)
        choice = policy.next_round(lanes)
        drafted = width = choice.places
        if choice.waits:
            width = width_by(policy, chances[:, :drafted])
        kept = [int((rng.random(PLACES) < own).cumprod()[:width].sum()) for own in chances]
        took = costs.round(lanes, width, drafted=drafted)
        policy.observe(RoundReport(lanes, drafted, width, list(enumerate(kept)), took))
        expected = 1 + np.concatenate([[0.0], np.cumprod(chances, axis=1).mean(axis=0).cumsum()])
        fixed += expected / rounds
        if i >= rounds // 2:
            tokens, seconds = tokens + expected[width], seconds + took
    return tokens / seconds / max(fixed[width] / costs.round(lanes, width) for width in range(PLACES + 1))


def test_tables_are_interpolated():
    table = {2: 1.0, 4: 2.0, 8: 2.0}
    assert [interpolate(table, at) for at in (1, 2, 3, 4, 6, 8)] == [1.0, 1.0, 1.5, 2.0, 2.0, 2.0]
    # Beyond the last number as between the last two: in proportion the part that does not grow would grow, too.
    assert interpolate(table, 16) == 2.0
    assert interpolate({2: 1.0, 4: 1.5}, 8) == 2.5
    assert [interpolate({4: 3.0}, at) for at in (2, 8)] == [3.0, 3.0]


def test_no_measurement_stays_above_one_of_more_rows():
    """What disturbs a measurement makes it longer, so the lower figure is the better one."""
    assert rising({8: 2.5, 2: 4.0, 4: 2.0, 1: 1.0, 16: 3.0}) == {1: 1.0, 2: 2.0, 4: 2.0, 8: 2.5, 16: 3.0}
    assert rising({4: 1.0}) == {4: 1.0}


@pytest.mark.parametrize(
    ("plain", "lanes"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 2.0}, 4),  # 8 take twice as long as 4
        ({1: 1.0, 2: 1.8, 4: 3.3}, 2),  # 2 / 1.8 is more than a tenth, 3.6 / 3.3 is not
        ({2: 1.1, 4: 2.0}, 4),  # a tenth is enough
        ({2: 1.0, 8: 1.0}, 2),  # as far as is known without a gap
        ({1: 1.0, 2: 2.0, 4: 2.0}, 1),
    ],
)
def test_as_many_at_a_time_as_twice_as_many_bring_a_tenth_more(plain, lanes):
    assert worthwhile_lanes(plain) == lanes


def test_a_round_costs_its_parts():
    costs = bound_by_memory()
    assert costs.round(8, 0) == pytest.approx(1.05)
    # 8 lanes of an anchor and 3 drafts: 32 rows for each model.
    assert costs.round(8, 3) == pytest.approx(1.25 + 0.1 + 0.01 * 28 / 60)
    # Drafts that are not verified, and none that are.
    assert costs.round(8, 1, drafted=7) == pytest.approx(1.1 + 0.11)
    assert costs.round(8, 0, drafted=7) == pytest.approx(1.05 + 0.11)


def test_widths_that_take_longer_than_was_measured_are_found_out():
    """As with attention that has a kernel for some numbers of rows."""
    costs, truth = flat(), flat()
    for _ in range(150):
        costs.observe(2 * truth.round(16, 3), 16, 3, 3)
        costs.observe(truth.round(16, 7), 16, 7, 7)
        costs.observe(truth.round(16, 0), 16, 0, 0)
    assert costs.round(16, 3) == pytest.approx(2 * truth.round(16, 3), rel=0.05)
    assert costs.round(16, 7) == pytest.approx(truth.round(16, 7), rel=0.05)
    assert costs.round(16, 0) == pytest.approx(truth.round(16, 0), rel=0.05)


def test_costs_follow_the_machine():
    """A slow while makes no width look much worse than another, whichever was used in it."""
    costs, truth = bound_by_memory(), bound_by_memory()
    for _ in range(20):
        costs.observe(1.7 * truth.round(8, 3), 8, 3, 3)
    assert costs.round(8, 3) == pytest.approx(1.7 * truth.round(8, 3), rel=0.02)
    assert costs.round(8, 7) == pytest.approx(1.7 * truth.round(8, 7), rel=0.15)
    # It may also be drafting that takes longer than was measured, so plain rounds are taken to be slower by less.
    assert 1.2 < costs.round(8, 0) / truth.round(8, 0) < 1.5
    for width in (3, 7) * 50:
        costs.observe(truth.round(8, width), 8, width, width)
    for width in (0, 3, 7):
        assert costs.round(8, width) == pytest.approx(truth.round(8, width), rel=0.1)


def test_an_outlier_is_soon_forgotten():
    costs, truth = bound_by_memory(), bound_by_memory()
    costs.observe(1e9, 8, 0, 0)
    for _ in range(8):
        costs.observe(truth.round(8, 0), 8, 0, 0)
    assert costs.round(8, 0) == pytest.approx(truth.round(8, 0), rel=0.05)
    assert costs.round(8, 3) == pytest.approx(truth.round(8, 3), rel=0.1)


@pytest.mark.parametrize(
    ("verify", "draft", "pauses"),
    [
        (1.1, 0.1, False),
        (3.0, 0.1, True),  # the pass over a draft takes as long as three plain rounds
        (1.1, 2.0, True),  # all 15 places are drafted, whatever is verified of them
    ],
)
def test_lanes_rest_where_rounds_gain_less_than_plain_ones(verify, draft, pauses):
    """Half of the lanes keep the one draft that each verifies: 1.5 tokens a round."""
    costs = GroupCosts({8: 1.0}, {8: {16: verify, 128: 3 * verify}}, {16: 0.01, 128: draft})
    policy = GroupWidth(costs, PLACES)
    for _ in range(40):
        policy.observe(RoundReport(8, PLACES, 1, [(lane, lane % 2) for lane in range(8)], None))
    assert (policy.pauses.resting > 0) == pauses
    assert (policy.next_round(8).places == 0) == pauses


def test_good_drafts_of_a_machine_with_power_to_spare_are_wide():
    costs = flat()
    policy = GroupWidth(costs, PLACES)
    assert not policy.next_round(4).waits
    run(policy, costs, sure(0.95), 4, 100)
    assert policy.next_round(4).width >= 12


def test_drafts_that_do_not_pay_are_not_verified_and_then_not_made():
    costs = proportional()
    policy = GroupWidth(costs, PLACES)
    rested = 0
    for _ in range(300):
        choice = policy.next_round(4)
        drafted = choice.places
        rested += drafted == 0
        assert choice.waits == (drafted > 0)
        width = width_by(policy, np.full((4, drafted), 0.5)) if drafted else 0
        assert width == 0
        took = costs.round(4, 0, drafted=drafted)
        policy.observe(RoundReport(4, drafted, 0, [(lane, 0) for lane in range(4)], took))
    assert rested > 250


@pytest.mark.parametrize("lanes", [2, 8, 32])
@pytest.mark.parametrize("machine", [flat, bound_by_memory])
@pytest.mark.parametrize("text", TEXTS)
def test_it_comes_close_to_the_best_fixed_width(text, machine, lanes):
    assert run(GroupWidth(machine(), PLACES), machine(), TEXTS[text], lanes, 400) > 0.95


@pytest.mark.parametrize("text", TEXTS)
def test_where_every_row_costs_the_same_it_is_plain_decoding(text):
    assert run(GroupWidth(proportional(), PLACES), proportional(), TEXTS[text], 8, 400) > 0.97


def rounds_drafted(policy, lanes, chances):
    """Which of the rounds are drafted, 1 or 0 for each, when the drafts of each have such a chance."""
    drafted = []
    for chance in chances:
        places = policy.next_round(lanes).places
        drafted.append(min(places, 1))
        if places:
            width_by(policy, np.full((lanes, places), chance))
    return drafted


def test_each_rest_is_twice_as_long_as_the_one_before():
    """Four rounds in a row whose drafts are not worth it, and a rest: of 8 rounds first, of 256 at most.

    With 32 lanes drafts of 0.3 are not worth a verification: it brings 0.3 tokens and costs half a plain round more.
    """
    rests = [8, 16, 32, 64, 128, 256, 256]
    # The first round is drafted before anything is known of the drafts.
    expected = [1] + [round for rest in rests for round in [1] * 4 + [0] * rest]
    assert rounds_drafted(GroupWidth(bound_by_memory(), PLACES), 32, [0.3] * len(expected)) == expected


def test_good_drafts_make_the_next_rest_a_first_one():
    """Drafts of 0.99 are worth it: 0.99 tokens for half a plain round. What they promised decides until it is past."""
    first = [0.3] * (5 + 8)  # rounds, and those of a first rest
    drafted = rounds_drafted(GroupWidth(bound_by_memory(), PLACES), 32, [*first, *[0.99] * 8, *[0.3] * 30])
    assert drafted == [1] * 5 + [0] * 8 + [1] * (8 + 12) + [0] * 8 + [1] * 4 + [0] * 6


def test_as_many_places_are_drafted_as_pays():
    """Drafting takes time for each place: no more of them than the drafts of the last rounds were worth."""
    drafted = {}
    for chance in (0.5, 0.9):
        policy, costs = GroupWidth(bound_by_memory(), PLACES), bound_by_memory()
        for _ in range(20):
            drafted[chance] = places = policy.next_round(8).places
            width_by(policy, np.full((8, places), chance))
        speeds = {
            width: sum(chance**place for place in range(width + 1)) / costs.round(8, width)
            for width in range(1, PLACES + 1)
        }
        # In the long run rounds verify what they draft, since the drafts are always alike.
        assert speeds[places] > 0.97 * max(speeds.values())
    assert drafted[0.5] < drafted[0.9]


def test_places_that_no_lane_has_drafts_for_promise_nothing():
    """As with drafts from the text, where they end; a warning of numpy's would be an error here."""
    policy = GroupWidth(flat(), PLACES, by_confidence=True)
    for _ in range(10):
        places = policy.next_round(4).places
        chances = np.tile(np.where(np.arange(places) < 2, 0.9, 0.0), (4, 1))
        assert places == 0 or width_by(policy, chances) <= 2
    policy = GroupWidth(flat(), PLACES, by_confidence=True)
    assert width_by(policy, np.zeros((4, PLACES))) == 0
    assert policy.next_round(4).places > 0


def test_rounds_of_all_numbers_of_places_and_widths():
    costs = bound_by_memory()
    costs.observe(2 * costs.round(8, 3), 8, 3, 3)
    rounds = costs.rounds(8, [1, 3, 7])
    for i, drafted in enumerate([1, 3, 7]):
        for j, width in enumerate([0, 1, 3, 7]):
            assert rounds[i, j] == pytest.approx(costs.round(8, width, drafted=drafted))


class Expects:
    """Stands for the acceptance so far: the tokens expected of a round, by width."""

    def __init__(self, tokens):
        self.tokens = tokens

    def expected_tokens(self, places):
        return [self.tokens.get(width, 0.0) for width in range(places + 1)]


def costs_by_width(seconds):
    """Of 8 lanes, rounds that cost so much by their width; plain ones take two seconds."""
    return GroupCosts({8: 2.0}, {8: {8 * (width + 1): cost for width, cost in seconds.items()}}, {8: 0.0, 128: 0.0})


def test_another_width_has_to_promise_a_tenth_more():
    policy = GroupWidth(costs_by_width({1: 3.0, 15: 3.0}), PLACES)
    chosen = []
    for tokens in ({3: 2.0}, {3: 2.0, 7: 2.19}, {3: 2.0, 7: 2.21}, {3: 2.42, 7: 2.21}, {3: 2.44, 7: 2.21}):
        policy.estimate = Expects(tokens)
        chosen.append(policy.next_round(8).width)
    assert chosen == [3, 3, 7, 7, 3]


def test_lanes_rest_where_the_best_width_brings_no_more_than_plain_rounds():
    """Rounds of any width take 3 seconds, plain ones 2: a tenth more than 1.5 tokens is worth it."""
    policy = GroupWidth(costs_by_width({1: 3.0, 15: 3.0}), PLACES)
    policy.estimate = Expects({1: 1.64, 3: 1.6})
    rests = [8, 16]
    assert [policy.next_round(8).places for _ in range(32)] == [width for n in rests for width in [1] * 4 + [0] * n]
    policy.estimate = Expects({1: 1.66})
    assert [policy.next_round(8).places for _ in range(30)] == [1] * 30


def test_what_plain_rounds_take_is_looked_at_again():
    """After 32 drafted rounds in a row, then after 128 and so on, eight plain ones; rests show it as well."""
    policy = GroupWidth(costs_by_width({1: 3.0, 15: 3.0}), PLACES)
    policy.estimate = Expects({3: 3.0})
    expected = [3] * 32 + [0] * 8 + [3] * 128 + [0] * 8 + [3] * 512 + [0] * 8 + [3]
    assert [policy.next_round(8).places for _ in range(len(expected))] == expected


def test_costs_that_were_measured_wrong_are_found_out():
    """A drafted round was measured to take 1.1 plain ones, and takes 2.5; it brings 2.2 tokens."""
    wrong = GroupCosts({8: 1.4}, {8: {16: 1.5, 128: 1.5}}, {16: 0.04, 128: 0.04})
    truth = GroupCosts({8: 1.0}, {8: {16: 2.4, 128: 2.4}}, {16: 0.1, 128: 0.1})
    policy = GroupWidth(wrong, PLACES)
    assert not policy.next_round(8).waits
    assert run(policy, truth, sure(0.55), 8, 2000) > 0.97


def test_cheap_drafts_that_are_never_verified_are_not_made_for_ever():
    """A draft of 8 % of a plain round, of which no part is worth a verification: drafting should rest."""
    assert run(GroupWidth(bound_by_memory(), PLACES), bound_by_memory(), sure(0.3), 32, 1000) > 0.97


def test_where_wider_rounds_cost_the_same_and_drafting_costs_more_than_it_brings_it_rests():
    """Every drafted round costs what 2.5 plain ones do, and brings 1.4 tokens."""
    costs = GroupCosts(dict.fromkeys((2, 64), 1.0), {2: dict.fromkeys((4, 1024), 2.0)}, dict.fromkeys((4, 1024), 0.5))
    policy = GroupWidth(costs, PLACES)
    assert not policy.next_round(16).waits
    assert run(policy, costs, sure(0.3), 16, 1000) > 0.97
    assert run(policy, costs, sure(0.9), 16, 1000) > 0.9


def test_more_lanes_leave_less_room_for_drafts():
    chosen = []
    for lanes in (2, 8, 32, 128):
        policy = GroupWidth(bound_by_memory(), PLACES)
        chosen.append(width_by(policy, np.full((lanes, PLACES), 0.8)))
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > 5 > 2 >= chosen[-1]


def test_rows_without_a_lane_cost_and_bring_nothing():
    policy = GroupWidth(bound_by_memory(), PLACES)
    few = np.full((8, PLACES), 0.8)
    assert policy.choose(few, rows=8) > policy.choose(few, rows=32)


def test_it_reads_confidence_where_a_wide_round_costs_more():
    policy = GroupWidth(bound_by_memory(), PLACES)
    assert not policy.next_round(2).waits
    assert policy.next_round(32).waits


@pytest.mark.parametrize("text", TEXTS)
def test_where_each_width_is_compiled_anew_there_are_only_a_few(text):
    """And little is lost by that."""
    policy, widths = GroupWidth(bound_by_memory(), PLACES, any_width=False), set()
    choose, next_round = policy.choose, policy.next_round

    def noting(best, *, rows):
        widths.add(width := choose(best, rows=rows))
        return width

    def noted(lanes):
        widths.add((choice := next_round(lanes)).places)
        assert choice.waits == (choice.places > 0)
        return choice

    policy.choose, policy.next_round = noting, noted
    assert run(policy, bound_by_memory(), TEXTS[text], 32, 300) > 0.9
    assert max(widths) > 0
    assert widths <= {0, 1, 3, 7, 15}


def test_overconfident_drafters_are_corrected():
    """Promises of 0.9 that hold one time in four: after a while they are not believed."""
    policy = GroupWidth(bound_by_memory(), PLACES)
    promises = np.full((8, PLACES), 0.9)
    before = policy.choose(promises, rows=8)
    for _ in range(60):
        width = policy.choose(promises, rows=8)
        kept = [(lane, min(width, lane % 4 == 0)) for lane in range(8)]
        policy.observe(RoundReport(8, PLACES, width, kept, None))
    assert policy.choose(promises, rows=8) < before / 2


def test_a_round_whose_lanes_have_all_left_teaches_nothing():
    policy = GroupWidth(flat(), PLACES)
    before = policy.next_round(4)
    policy.observe(RoundReport(4, before.places, before.places, [], 1.0))
    assert policy.next_round(4) == before


def test_a_fixed_group_is_always_as_wide():
    policy = FixedGroup(3)
    assert [policy.next_round(lanes) for lanes in (2, 9)] == [Choice(3, width=3)] * 2
    # Also where one lane is left in two rows.
    assert [width_by(policy, np.full((lanes, 3), 0.01)) for lanes in (2, 1)] == [3, 3]
