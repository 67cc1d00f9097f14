"""Width policies against closed forms and simulated machines."""

import random

import pytest

from dflash_mlx.decoding.width import (
    AcceptanceEstimate,
    ConfidentWidth,
    FixedWidth,
    Pauses,
    RoundCosts,
    SteadyWidth,
    choose_policy,
)

FLAT = RoundCosts({0: 3.0, 1: 5.0, 15: 5.2}, {1: 1.0, 15: 1.0}, steep=False)
STEEP = RoundCosts({0: 50.0, 1: 70.0, 7: 110.0, 15: 130.0}, {1: 12.0, 15: 25.0}, steep=True)


def copy(costs):
    return RoundCosts(dict(costs.round_seconds), dict(costs.draft_seconds), steep=costs.steep)


def simulate(policy, costs, chance, rounds, seed=0):
    """Run a policy on a text whose every draft is kept with probability `chance`; tokens a second it reaches."""
    rng = random.Random(seed)
    tokens = seconds = 0.0
    for _ in range(rounds):
        drafted = policy.next_width()
        width = policy.choose([chance] * drafted) if policy.reads_confidence and drafted else drafted
        accepted = 0
        while accepted < width and rng.random() < chance:
            accepted += 1
        took = costs.round(width, drafted=drafted)
        policy.observe(drafted=drafted, width=width, num_accepted=accepted, seconds=took)
        tokens, seconds = tokens + accepted + 1, seconds + took
    return tokens / seconds


def best_fixed(costs, chance):
    def speed(width):
        return sum(chance**i for i in range(width + 1)) / costs.round(width)

    return max(speed(width) for width in range(16))


def test_costs_interpolate_and_count_unused_drafts():
    assert STEEP.round(4) == pytest.approx(90.0)
    assert STEEP.round(15) == 130.0
    # Verifying 1 of 15 drafts costs a round of 1 and the longer draft.
    assert STEEP.round(1, drafted=15) == pytest.approx(70.0 + 25.0 - 12.0)
    assert STEEP.round(0, drafted=1) == pytest.approx(50.0 + 12.0)


def test_costs_follow_the_machine():
    costs = copy(STEEP)
    for _ in range(200):
        costs.observe(2 * STEEP.round(7), 7, 7)
    assert costs.round(7) == pytest.approx(2 * STEEP.round(7), rel=0.02)
    costs.observe(1e9, 7, 7)
    assert costs.round(7) < 2.2 * STEEP.round(7)


def test_estimate_is_exact_where_it_has_seen_much():
    estimate = AcceptanceEstimate()
    rng = random.Random(1)
    for _ in range(3000):
        accepted = 0
        while accepted < 5 and rng.random() < 0.5:
            accepted += 1
        estimate.observe(5, accepted)
    assert estimate.expected_tokens(3)[3] == pytest.approx(1 + 0.5 + 0.25 + 0.125, abs=0.35)


def test_where_width_costs_little_the_steady_policy_is_chosen():
    assert isinstance(choose_policy(copy(FLAT), 15), SteadyWidth)
    assert isinstance(choose_policy(copy(STEEP), 15), ConfidentWidth)
    assert not FixedWidth(3).reads_confidence


@pytest.mark.parametrize("chance", [0.5, 0.7, 0.85, 0.95])
@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
def test_policies_come_close_to_the_best_fixed_width(costs, chance):
    reached = simulate(choose_policy(copy(costs), 15), costs, chance, 1500)
    assert reached > 0.87 * max(best_fixed(costs, chance), 1 / costs.plain)


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
def test_hopeless_drafts_cost_little(costs, chance):
    """Where no draft is worth it, the loss against plain decoding stays under 5 % and the user is told."""
    policy = choose_policy(copy(costs), 15)
    notices = []
    observe = policy.observe

    def watched(**what):
        observe(**what)
        notices.append(policy.take_notice())

    policy.observe = watched
    assert simulate(policy, costs, chance, 2000) > 0.95 / costs.plain
    assert any(notice and "paused" in notice for notice in notices)


def test_confidence_chooses_width_by_the_round():
    policy = ConfidentWidth(copy(STEEP), 15)
    sure, unsure = [0.99] * 15, [0.05] * 15
    assert policy.choose(sure) == 15
    assert policy.choose(unsure) == 0
    assert policy.choose([0.95, 0.95, 0.1] + [0.9] * 12) == 2


def test_overconfident_drafters_are_corrected():
    """Promises of 0.9 that hold one time in four: after a while they are not believed."""
    policy = ConfidentWidth(copy(STEEP), 15)
    before = policy.choose([0.9] * 15)
    for i in range(60):
        width = policy.choose([0.9] * 15)
        policy.observe(drafted=15, width=width, num_accepted=1 if i % 4 == 0 and width else 0, seconds=None)
    assert policy.choose([0.9] * 15) < before / 2


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


def test_a_pause_comes_before_much_is_lost():
    """Rounds that take two plain steps and gain one token: a handful of steps is lost before the first pause."""
    pauses = Pauses()
    rounds = 0
    while not pauses.resting:
        pauses.observe(1, 100.0, 50.0)
        rounds += 1
    assert rounds <= 6
