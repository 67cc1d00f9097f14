"""The choice between trees and chains, on simulated machines and texts."""

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
from policy.simulated import drafts_of, observed, plain

from dflash_mlx.decoding.policies import Observation
from dflash_mlx.policy.confidence import Confidence
from dflash_mlx.policy.trees_or_chains import Experience, SteadyTree, TreesOrChains
from dflash_mlx.policy.width import RoundCosts, SteadyWidth

PLACES = 15
PLAIN = 2.8
CHAINS = {0: PLAIN, 1: 5.2, PLACES: 5.2}
# Probabilities of a place's candidates: a tree gains little where the first is nearly sure.
SURE, UNSURE = [0.85, 0.06, 0.03, 0.02], [0.55, 0.2, 0.1, 0.05]


def costs_of(trees_take):
    trees = {0: PLAIN, 1: trees_take, PLACES: trees_take}
    drafts = {1: 1.0, PLACES: 1.0}
    return RoundCosts(dict(CHAINS), drafts, steep=False), RoundCosts(trees, dict(drafts), steep=False, places=PLACES)


def run(policy, text, rounds, rng, trees_take, keeps=None, *, may_branch=True):
    """Decode a text by the policy; its tokens a second, and the share of rounds that were trees.

    The text is what the drafter says of it or, with `keeps`, so many first guesses a round and then nothing it knows.
    """
    limits = np.cumsum(text)
    tokens = seconds = trees = 0.0
    for _ in range(rounds):
        choice = policy.next_round(may_branch=may_branch)
        if keeps is None:
            drawn = np.searchsorted(limits, rng.random(PLACES)).tolist()
        else:
            right = next(keeps)
            drawn = [0] * right + [len(text)] * (PLACES - right)
        path, took = [0], PLAIN
        if choice.places:
            drafts, forecast = drafts_of(policy, choice, np.tile(text, (PLACES, 1)))
            path, took = drafts.walk(drawn), trees_take if choice.tree else CHAINS[PLACES]
            trees += choice.tree > 0
        policy.observe(observed(choice, drafts, forecast, path, took) if choice.places else plain(took))
        tokens, seconds = tokens + len(path), seconds + took
    return tokens / seconds, trees / rounds


@pytest.mark.parametrize(
    ("text", "trees_take", "trees_win"),
    [(SURE, 6.4, False), (UNSURE, 6.4, True), (UNSURE, 5.3, True), (UNSURE, 8.2, False)],
)
@pytest.mark.parametrize("start", [True, False], ids=["chains", "trees"])
def test_the_faster_kind_is_found(text, trees_take, trees_win, start):
    policy = TreesOrChains(*costs_of(trees_take), PLACES, Experience(chains=start))
    rng = np.random.default_rng(1)
    speed, share = run(policy, text, 600, rng, trees_take)
    assert share > 0.75 if trees_win else share < 0.25
    chains, trees = costs_of(trees_take)
    fixed = {}
    for kind, only in ((False, SteadyTree(trees, PLACES, Confidence())), (True, SteadyWidth(chains, PLACES))):
        fixed[kind], _ = run(only, text, 600, rng, trees_take)
    assert (fixed[False] > fixed[True]) == trees_win
    assert speed > 0.93 * max(fixed.values())


@pytest.mark.parametrize("start", [True, False], ids=["chains", "trees"])
def test_trees_are_judged_by_what_they_gain_and_not_by_their_promise(start):
    """First guesses alone are right here: a tree gains no more than a chain, and takes longer, though its other guesses
    promise that it pays."""
    said, trees_take, keeps = [0.85, 0.1, 0.02, 0.01], 5.8, cycle([1, 2])
    policy = TreesOrChains(*costs_of(trees_take), PLACES, Experience(chains=start))
    run(policy, said, 100, None, trees_take, keeps)
    speed, share = run(policy, said, 200, None, trees_take, keeps)
    assert share < 0.15
    # Rounds of chains gain 2 and 3 tokens in turn.
    assert speed > 0.97 * 2.5 / CHAINS[PLACES]


def test_the_next_answer_begins_with_what_this_one_found():
    experience = Experience()
    first = TreesOrChains(*costs_of(6.4), PLACES, experience)
    assert first.next_round(may_branch=True).tree
    run(first, SURE, 60, np.random.default_rng(0), 6.4)
    assert experience.chains
    assert not TreesOrChains(*costs_of(6.4), PLACES, experience).next_round(may_branch=True).tree


def test_each_forecast_counts_until_trees_lead_clearly():
    """Trees take a third longer than chains, which is about what they gain, or less long."""
    for takes, leads in ((6.9, False), (4.2, True)):
        experience = Experience()
        policy = TreesOrChains(*costs_of(takes), PLACES, experience)
        assert policy.listens_after == 1
        run(policy, UNSURE, 20, np.random.default_rng(0), takes)
        assert (experience.lead > 1.1) == leads
        assert (policy.listens_after > 1) == leads
    for lead, leads in ((1.11, True), (1.09, False), (None, False)):
        experience.lead = lead
        assert (policy.listens_after > 1) == leads
    while not policy.trees.pauses.resting:
        run(policy, SURE, 1, None, 4.2, cycle([0]))
    # In a rest there are none.
    assert policy.listens_after == 16


def test_an_answer_that_cannot_branch_goes_by_its_chains():
    """It is told of their rounds as they need it, and their pause is said, though others use trees, which pay."""
    experience = Experience(lead=1.3)
    experience.patience_with_trees.gain = 2.0
    policy = TreesOrChains(*costs_of(4.2), PLACES, experience)
    run(policy, UNSURE, 1, np.random.default_rng(0), 4.2, may_branch=False)
    assert policy.listens_after == 1
    while not policy.chains.pauses.resting:
        assert policy.take_notice() is None
        run(policy, UNSURE, 1, None, 4.2, cycle([0]), may_branch=False)
    assert "paused" in policy.take_notice()
    assert policy.listens_after == 16


def test_a_tree_without_a_forecast_tells_what_was_kept_of_it():
    policy = TreesOrChains(*costs_of(4.2), PLACES, Experience())
    run(policy, UNSURE, 20, np.random.default_rng(0), 4.2)
    comparison, tokens = replace(policy.experience.comparison), policy.trees.confidence.tokens
    before, speed = policy.trees.confidence.calibration, policy.trees.pauses.speed
    policy.observe(Observation(PLACES, PLACES, 9, tree=True, branched=True, depth=9, promised=4.5, seconds=4.2))
    assert policy.trees.confidence.calibration > before
    assert policy.trees.pauses.speed > speed
    assert (policy.experience.comparison, policy.trees.confidence.tokens) == (comparison, tokens)


def test_trees_that_did_not_pay_may_lose_less_in_the_next_answer():
    """Nothing of what is said is right, and drafting in any form takes too long."""
    rests, experience = [], Experience()
    for _ in range(2):
        policy, rounds = TreesOrChains(*costs_of(6.4), PLACES, experience), 0
        while not policy.trees.pauses.resting:
            run(policy, SURE, 1, None, 6.4, cycle([0]))
            rounds += 1
        rests.append(rounds)
        experience.chains = False
    # A round loses 6.4 / 2.8 - 1 = 1.29 plain steps, of the five that it may at first, and then of half as many.
    assert rests == [4, 2]


def test_short_answers_look_at_trees_now_and_then():
    """As often as one long answer would: on a text for chains less and less."""
    experience, rng = Experience(), np.random.default_rng(0)
    shares = []
    for _ in range(30):
        policy = TreesOrChains(*costs_of(6.4), PLACES, experience)
        shares.append(run(policy, SURE, 20, rng, 6.4)[1])
    assert shares[0] > 0
    assert 2 <= sum(share > 0 for share in shares) <= 6


@pytest.mark.parametrize("seed", range(4))
def test_a_change_of_text_is_noticed(seed):
    """At the first look at trees or, with bad luck, at the second."""
    policy = TreesOrChains(*costs_of(6.4), PLACES, Experience())
    rng = np.random.default_rng(seed)
    run(policy, SURE, 50, rng, 6.4)
    assert not policy.next_round(may_branch=True).tree
    run(policy, UNSURE, 200, rng, 6.4)
    _, share = run(policy, UNSURE, 200, rng, 6.4)
    assert share > 0.7
    _, share = run(policy, SURE, 200, rng, 6.4)
    assert share < 0.3


def test_where_chains_do_not_pay_trees_are_tried():
    """Chains of this text gain 1.8 tokens in the time of 1.9 plain steps, trees 3 in that of 2.1."""
    policy = TreesOrChains(*costs_of(6.0), PLACES, Experience(chains=True))
    speed, share = run(policy, [0.45, 0.3, 0.15, 0.05], 600, np.random.default_rng(3), 6.0)
    assert share > 0.8
    assert speed > 1.15 / PLAIN


def test_answers_that_cannot_branch_say_nothing_about_trees():
    """Their chains do not wait, and the next answer looks at trees at once."""
    experience = Experience()
    policy = TreesOrChains(*costs_of(6.4), PLACES, experience)
    _, share = run(policy, SURE, 100, np.random.default_rng(0), 6.4, may_branch=False)
    assert share == 0
    assert experience.chains is False
    assert TreesOrChains(*costs_of(6.4), PLACES, experience).next_round(may_branch=True).tree


@pytest.mark.parametrize("chains", [True, False])
def test_after_hopeless_drafts_those_of_the_other_kind_may_lose_as_little(chains):
    experience = Experience(chains=chains)
    of_both = [experience.patience_with_trees, experience.patience]
    of_both[chains].pause = of_both[chains].longest = 512
    policy = TreesOrChains(*costs_of(6.4), PLACES, experience)
    while experience.chains == chains:
        run(policy, SURE, 1, None, 6.4, cycle([0]))
    assert of_both[0] == replace(of_both[1], gain=of_both[0].gain)


@pytest.mark.parametrize("chains", [True, False])
def test_hopeless_drafts_pause_whatever_their_kind(chains):
    policy = TreesOrChains(*costs_of(6.4), PLACES, Experience(chains=chains))
    notices = []
    rng = np.random.default_rng(0)
    for _ in range(1500):
        speed, _ = run(policy, [0.02, 0.01], 1, rng, 6.4)
        notices.append(policy.take_notice())
    assert any(notice and "paused" in notice for notice in notices)
    speed, _ = run(TreesOrChains(*costs_of(6.4), PLACES, Experience(chains=chains)), [0.02, 0.01], 1500, rng, 6.4)
    assert speed > 0.95 / PLAIN
