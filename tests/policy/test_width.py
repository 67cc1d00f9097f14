"""Width policies against closed forms and simulated machines."""

import random
from dataclasses import replace

import numpy as np
import pytest
from policy.simulated import drafts_of, observed, plain

from dflash_mlx.decoding.policies import Choice, Forecast, Observation
from dflash_mlx.policy.confidence import Confidence, ConfidentWidth
from dflash_mlx.policy.pauses import Pauses
from dflash_mlx.policy.trees_or_chains import Experience, PairCosts, SteadyTree, TreesOrChains, choose_policy
from dflash_mlx.policy.width import (
    FADE,
    AcceptanceEstimate,
    FixedWidth,
    RoundCosts,
    SteadyWidth,
)

FLAT = RoundCosts({0: 3.0, 1: 5.0, 15: 5.2}, {1: 1.0, 15: 1.0}, steep=False)
STEEP = RoundCosts({0: 50.0, 1: 70.0, 7: 110.0, 15: 130.0}, {1: 12.0, 15: 25.0}, steep=True)


TREES = RoundCosts({0: 50.0, 1: 75.0, 7: 112.0, 15: 130.0, 31: 190.0}, {1: 12.0, 15: 25.0}, steep=True, places=15)


def copy(costs):
    return RoundCosts(dict(costs.round_seconds), dict(costs.draft_seconds), steep=costs.steep, places=costs.places)


def policy_for(costs):
    return choose_policy(PairCosts(copy(costs)), 15)


def chosen(policy, chances):
    """How many drafts of a chain a policy verifies that are kept with these chances."""
    scale = policy.confidence.calibration
    return policy.choose(Forecast.of_chain(np.array(chances), scale))


def simulate(policy, costs, chance, rounds, seed=0):
    """Run a policy on a text whose every draft is kept with probability `chance`; tokens a second it reaches."""
    rng = random.Random(seed)
    tokens = seconds = 0.0
    for _ in range(rounds):
        choice, accepted, width = policy.next_round(may_branch=False), 0, 0
        if choice.places:
            chain, forecast = drafts_of(policy, choice, np.full((15, 1), chance))
            width = chain.size
            while accepted < width and rng.random() < chance:
                accepted += 1
        took = costs.round(width, drafted=choice.places)
        seen = observed(choice, chain, forecast, range(accepted + 1), took) if choice.places else plain(took)
        policy.observe(seen)
        tokens, seconds = tokens + accepted + 1, seconds + took
    return tokens / seconds


def best_fixed(costs, chance):
    def speed(width):
        return sum(chance**i for i in range(width + 1)) / costs.round(width)

    return max(speed(width) for width in range(16))


def test_costs_interpolate_and_count_unused_drafts():
    assert STEEP.round(4) == pytest.approx(90.0)
    assert STEEP.round(15) == 130.0
    # A tree's rounds were measured with drafts of 15 places; shorter ones cost less.
    assert TREES.round(31) == 190.0
    assert TREES.round(31, drafted=1) == pytest.approx(190.0 - 13.0)
    assert TREES.round(0) == 50.0
    # Verifying 1 of 15 drafts costs a round of 1 and the longer draft.
    assert STEEP.round(1, drafted=15) == pytest.approx(70.0 + 25.0 - 12.0)
    assert STEEP.round(0, drafted=1) == pytest.approx(50.0 + 12.0)


def test_costs_outside_of_what_was_measured_stay_the_same():
    costs = RoundCosts({0: 5.0, 3: 10.0, 7: 20.0}, {3: 1.0, 7: 2.0}, steep=True)
    assert [costs.round(width) for width in (1, 2, 3, 5, 7, 15)] == [10.0, 10.0, 10.0, 15.0, 20.0, 20.0]
    assert RoundCosts({0: 5.0, 3: 10.0}, {3: 1.0}, steep=True).round(1) == 10.0


def test_costs_follow_the_machine():
    costs = copy(STEEP)
    for _ in range(200):
        costs.observe(2 * STEEP.round(7), 7, 7)
    assert costs.round(7) == pytest.approx(2 * STEEP.round(7), rel=0.02)
    costs.observe(1e9, 7, 7)
    assert costs.round(7) < 2.2 * STEEP.round(7)


def test_a_round_with_drafts_takes_longer_than_one_without():
    cheap = RoundCosts({0: 50.0, 1: 50.0, 7: 56.0}, {1: 2.0, 7: 2.0}, steep=False)
    assert [cheap.round(width) for width in (0, 1, 7)] == pytest.approx([50.0, 55.0, 56.0])
    # Of drafts that are there already.
    assert cheap.round(1, drafted=0) == 48.0


def test_estimate_is_exact_where_it_has_seen_much():
    estimate = AcceptanceEstimate()
    rng = random.Random(1)
    for _ in range(3000):
        accepted = 0
        while accepted < 5 and rng.random() < 0.5:
            accepted += 1
        estimate.observe(5, [accepted])
    assert estimate.expected_tokens(3)[3] == pytest.approx(1 + 0.5 + 0.25 + 0.125, abs=0.35)


def test_lanes_of_a_round_are_counted_together():
    """Four lanes, of which one accepts none, one a single draft, and two all of three; places beyond were not tried."""
    estimate = AcceptanceEstimate()
    estimate.observe(3, [0, 1, 3, 3])
    assert (estimate.tried, estimate.kept) == ([4.0, 3.0, 2.0], [3.0, 2.0, 2.0])
    estimate.observe(1, [1, 2])
    assert estimate.tried == pytest.approx([4 * FADE + 2, 3 * FADE, 2 * FADE])
    assert estimate.kept == pytest.approx([3 * FADE + 2, 2 * FADE, 2 * FADE])


def test_estimates_merge_by_how_often_each_position_was_tried():
    """Tried twice and four times: the mean tries are three, of which those kept are the mean of 2 and 1."""
    merged = AcceptanceEstimate([2.0, 2.0], [2.0, 0.0]).merged(AcceptanceEstimate([4.0], [1.0]))
    assert (merged.tried, merged.kept) == ([3.0, 1.0], [1.5, 0.0])


def widths_of(policy, costs, keeps, rounds):
    """The widths of an answer in which the target keeps the first `keeps` drafts of every round."""
    widths = []
    for _ in range(rounds):
        widths.append(policy.next_round(may_branch=False).places)
        took = costs.round(widths[-1])
        policy.observe(Observation(widths[-1], widths[-1], min(keeps, widths[-1]), seconds=took))
    return widths


@pytest.mark.parametrize("before", [1, 2])
def test_an_earlier_answer_is_a_hint_and_no_more(before):
    """The next answer begins with the width of a long one that kept few drafts. Where it keeps all, 15 drafts are best
    by far, and it comes to them nearly as soon as an answer that follows no other."""
    costs = RoundCosts({0: 3.0, 1: 3.3, 15: 6.0}, {1: 0.1, 15: 0.1}, steep=False)
    experience = Experience()
    first = choose_policy(PairCosts(copy(costs)), 15, experience)
    assert set(widths_of(first, costs, before, 200)[-50:]) <= {1, 3}
    widths = widths_of(choose_policy(PairCosts(copy(costs)), 15, experience), costs, 15, 40)
    assert widths[0] in (1, 3)
    assert set(widths[12:]) == {15}
    assert set(widths_of(policy_for(costs), costs, 15, 40)[6:]) == {15}


def test_the_policy_suits_the_machine():
    assert isinstance(policy_for(FLAT), SteadyWidth)
    assert isinstance(policy_for(STEEP), ConfidentWidth)
    assert FixedWidth(3).next_round(may_branch=True) == Choice(3, width=3)
    trees = choose_policy(PairCosts(copy(STEEP), copy(TREES)), 15)
    assert isinstance(trees, ConfidentWidth)
    assert trees.branches
    assert not policy_for(STEEP).branches
    assert isinstance(choose_policy(PairCosts(copy(FLAT), copy(TREES)), 15), TreesOrChains)


@pytest.mark.parametrize("keeps", [0, 1, 2, 4, 6, 10, 15])
def test_where_width_costs_little_a_few_widths_serve(keeps):
    """A GPU may compile anew for each. No other width would be a tenth faster, and no other is tried on the way."""
    policy = SteadyWidth(copy(FLAT), 15)
    seen = set(widths_of(policy, FLAT, keeps, 150)) - {0}
    assert seen <= {1, 3, 7, 15}
    gains = {width: (min(keeps, width) + 1) / FLAT.round(width) for width in range(1, 16)}
    assert gains[policy.width] > 0.9 * max(gains.values())


def test_trees_have_few_sizes_where_width_costs_little():
    costs = RoundCosts({0: 1.0, 7: 1.1, 15: 1.2, 31: 1.4}, {1: 0.1, 15: 0.1}, steep=False, places=15)
    policy, sizes = SteadyTree(costs, 15, Confidence()), set()
    for best in (0.01, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9):
        ranked = np.tile([best, (1 - best) / 4, (1 - best) / 8], (15, 1))
        for _ in range(60):
            choice = policy.next_round(may_branch=True)
            assert choice.width is not None
            tree, forecast = drafts_of(policy, replace(choice, places=15), ranked)
            sizes.add(tree.size)
            policy.observe(observed(choice, tree, forecast, tree.walk([0] * 15), None))
    assert sizes <= {7, 15, 31}
    assert len(sizes) > 1


def test_sizes_that_cannot_pay_are_not_looked_for():
    costs = RoundCosts({0: 1.0, 7: 1.1, 15: 1.2, 31: 1.4, 63: 1.8}, {1: 0.1}, steep=False, places=15)
    assert SteadyTree(costs, 15, Confidence()).next_round(may_branch=True).tree == 31
    only = RoundCosts({0: 1.0, 15: 2.0}, {1: 0.1}, steep=False, places=15)
    assert SteadyTree(only, 15, Confidence()).next_round(may_branch=True).tree == 15


@pytest.mark.parametrize(("second", "best"), [(0.001, 7), (0.3, 31)])
def test_a_steady_tree_has_the_size_that_promises_most(second, best):
    """A drafter without alternatives gains nothing from more than a chain's drafts, one in doubt does. The next answer
    begins with that size."""
    costs = RoundCosts({0: 1.0, 7: 1.1, 15: 1.2, 31: 1.4}, {1: 0.1, 7: 0.1}, steep=False, places=7)
    confidence, candidates = Confidence(), np.tile([0.6, second, second / 2], (7, 1))
    policy = SteadyTree(costs, 7, confidence)
    for _ in range(100):
        choice = policy.next_round(may_branch=True)
        tree, forecast = drafts_of(policy, choice, candidates)
        # As many are kept as were promised.
        path = [0, 1] if len(tree.parents) else [0]
        policy.observe(replace(observed(choice, tree, forecast, path, None), promised=1.0))
    speeds = {
        size: (1 + drafts_of(policy, choice, candidates)[1].chances[:size].sum()) / costs.round(size)
        for size in (7, 15, 31)
    }
    assert max(speeds, key=lambda size: speeds[size]) == best
    assert policy.size == SteadyTree(costs, 7, confidence).size == best


def test_drafts_that_were_not_verified_are_no_change_of_the_machine():
    policy = ConfidentWidth(copy(STEEP), 15)
    for _ in range(50):
        took = STEEP.round(1, drafted=15)
        policy.observe(Observation(15, 1, 1, promised=1.0, seconds=took))
    assert policy.costs.round(7) == pytest.approx(STEEP.round(7))


def test_a_fixed_tree_is_the_likeliest_of_its_size():
    policy = FixedWidth(3, places=2)
    choice = policy.next_round(may_branch=True)
    assert choice == Choice(2, tree=3, width=3)
    tree, _ = drafts_of(policy, choice, np.array([[0.5, 0.4], [0.9, 0.1]]))
    # 0.5, 0.45 after it, and 0.4: more than anything else after them.
    assert (tree.tokens, tree.parents) == ([0, 0, 1], [0, 1, 0])
    assert policy.next_round(may_branch=False) == Choice(2, width=3)


@pytest.mark.parametrize("chance", [0.5, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
def test_policies_come_close_to_the_best_fixed_width(costs, chance):
    reached = simulate(policy_for(costs), costs, chance, 1500)
    assert reached > 0.87 * max(best_fixed(costs, chance), 1 / costs.plain)


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
def test_hopeless_drafts_cost_little(costs, chance):
    """Where no draft is worth it, the loss against plain decoding stays under 3 % and the user is told."""
    policy = policy_for(costs)
    notices = []
    observe = policy.observe

    def watched(round):
        observe(round)
        notices.append(policy.take_notice())

    policy.observe = watched
    assert simulate(policy, costs, chance, 2000) > 0.97 / costs.plain
    assert any(notice and "paused" in notice for notice in notices)


def test_confidence_chooses_width_by_the_round():
    policy = ConfidentWidth(copy(STEEP), 15)
    sure, unsure = [0.99] * 15, [0.05] * 15
    assert chosen(policy, sure) == 15
    assert chosen(policy, unsure) == 0
    assert chosen(policy, [0.95, 0.95, 0.1] + [0.9] * 12) == 2


def test_overconfident_drafters_are_corrected():
    """Promises of 0.9 that hold one time in four: after a while they are not believed."""
    policy = ConfidentWidth(copy(STEEP), 15)
    promises = [0.9] * 15
    before = chosen(policy, promises)
    for i in range(60):
        width = chosen(policy, promises)
        accepted = 1 if i % 4 == 0 and width else 0
        policy.observe(Observation(15, width, accepted, promised=0.9 * min(accepted + 1, width)))
    assert chosen(policy, promises) < before / 2


def text_of(rng, places, alternatives):
    """Probabilities (places, alternatives) of a random text, the best first, as a drafter that is right about it."""
    raw = -np.sort(-rng.dirichlet([0.2] * (alternatives + 1), places)[:, :alternatives], axis=1)
    return np.maximum(raw, 1e-9)


def drawn(rng, probabilities):
    """A text by the candidates' probabilities, whose numbers stand for the tokens."""
    return [int(np.searchsorted(np.cumsum(own), rng.random())) for own in probabilities]


def test_trees_are_faster_than_chains():
    """On the same text and machine, choosing among 8 tokens a place gains against choosing among 1."""
    reached = {}
    for alternatives in (1, 8):
        rng = np.random.default_rng(0)
        policy = ConfidentWidth(copy(TREES), 15)
        tokens = seconds = 0.0
        for _ in range(1500):
            choice = policy.next_round(may_branch=True)
            choice = replace(choice, places=max(choice.places, 1))
            candidates = text_of(rng, choice.places, 8)
            tree, forecast = drafts_of(policy, choice, candidates[:, :alternatives])
            path = tree.walk(drawn(rng, candidates))
            took = TREES.round(tree.size, drafted=choice.places)
            policy.observe(observed(choice, tree, forecast, path, took))
            tokens, seconds = tokens + len(path), seconds + took
        reached[alternatives] = tokens / seconds
    assert reached[8] > 1.05 * reached[1]


def test_a_tree_stops_where_the_next_draft_is_not_worth_its_time():
    policy = ConfidentWidth(copy(TREES), 15)
    choice = replace(policy.next_round(may_branch=True), places=15)

    def tree(candidates):
        return drafts_of(policy, choice, np.array([candidates] * 15))[0]

    sure, unsure = [0.9, 0.05], [0.3, 0.2, 0.2, 0.1]
    assert 15 <= tree(sure).size <= 31
    assert max(tree(sure).depths) > max(tree(unsure).depths)
    few = tree(unsure).size
    policy.costs = replace(TREES, round_seconds={width: 50.0 + 0.1 * width for width in TREES.round_seconds})
    assert tree(unsure).size == 31 > few


def test_pauses_grow_and_end():
    pauses = Pauses()
    lengths = []
    for _ in range(4):
        while not pauses.resting:
            pauses.observe(1, 100.0, 50.0)
        lengths.append(sum(1 for _ in iter(pauses.take_rest, False)))
    assert lengths == [32, 128, 512, 512]
    for _ in range(100):
        pauses.observe(5, 100.0, 50.0)
        assert not pauses.resting
    while not pauses.resting:
        pauses.observe(1, 100.0, 50.0)
    assert pauses.resting == 32


def test_bad_luck_within_a_good_stretch_is_no_reason_to_pause():
    """Two rounds in three lose a plain step and the third gains six: faster than plain on the whole."""
    pauses = Pauses()
    for i in range(300):
        pauses.observe(8 if i % 3 == 0 else 1, 100.0, 50.0)
        assert not pauses.resting


def test_drafts_that_gain_a_fifth_are_seldom_paused():
    """Rounds of 1.86 plain steps that gain 2.22 tokens on average, but often one and sometimes six."""
    rng, paused = random.Random(0), 0
    for _ in range(200):
        pauses = Pauses()
        for _ in range(100):
            gained = 1
            while gained < 16 and rng.random() < 0.55:
                gained += 1
            pauses.observe(gained, 1.86, 1.0)
            if pauses.resting:
                paused += 1
                break
    assert paused <= 40


def test_a_pause_comes_before_much_is_lost():
    """Rounds that take two plain steps and gain one token: a handful of steps is lost before the first pause."""
    pauses = Pauses()
    rounds = 0
    while not pauses.resting:
        pauses.observe(1, 100.0, 50.0)
        rounds += 1
    assert rounds <= 6


@pytest.mark.parametrize("costs", [FLAT, STEEP, TREES], ids=["flat", "steep", "trees"])
def test_drafts_that_are_known_to_be_kept_are_used_in_a_pause(costs):
    """A round with all drafts takes 1.7 or 2.6 plain steps: 1.2 kept ones are worth the former, and not the latter."""
    policy = policy_for(costs)
    policy.pauses.resting = 9
    assert policy.next_round(may_branch=False, told=12.0).places == (15 if costs.steep else policy.width)
    assert (policy.next_round(may_branch=False, told=1.2).places > 0) == (not costs.steep)
    assert policy.next_round(may_branch=False).places == 0


def next_drafted(policy):
    """The next choice that is not a rest."""
    return next(choice for choice in iter(lambda: policy.next_round(may_branch=False), None) if choice.places)


def test_as_many_places_are_drafted_as_would_have_been_worth_their_time():
    """Drafts take a tenth of a plain step each. What an answer found is what the next one begins with."""
    costs = RoundCosts(
        {width: 1.0 + 0.3 * width for width in range(16)}, {w: 0.1 * w for w in range(1, 16)}, steep=True
    )
    confidence = Confidence()
    for right, expected in ((0, 1), (3, 3), (6, 6)):
        policy = ConfidentWidth(copy(costs), 15, confidence)
        for _ in range(30):
            choice = next_drafted(policy)
            tree, forecast = drafts_of(policy, choice, np.array([[0.97]] * right + [[0.02]] * 15))
            kept = min(right, tree.size)
            policy.observe(observed(choice, tree, forecast, range(kept + 1), None))
        # Now and then one or two more, which tell whether more would be worth it.
        assert expected <= next_drafted(policy).places <= expected + 2
    assert 6 <= ConfidentWidth(copy(costs), 15, confidence).next_round(may_branch=False).places <= 8
    assert ConfidentWidth(copy(costs), 15).next_round(may_branch=False).places == 15 // 2


def test_a_drafter_that_is_sure_and_wrong_is_mistrusted_after_a_few_rounds():
    """Until then its trees are as large as those of one that is right, and all of their time is lost."""
    costs = RoundCosts({0: 1.0, 1: 1.4, 7: 1.7, 15: 2.0, 31: 2.6}, {1: 0.2, 15: 0.3}, steep=True, places=15)
    policy, candidates, sizes = ConfidentWidth(costs, 15), np.tile([0.9, 0.06, 0.03], (15, 1)), []
    for _ in range(4):
        choice = policy.next_round(may_branch=True)
        tree, forecast = drafts_of(policy, choice, candidates)
        sizes.append(tree.size)
        policy.observe(observed(choice, tree, forecast, [0], None))
    assert sizes[0] > 15
    assert sizes[3] < 8
