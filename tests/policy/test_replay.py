"""What the automatic choice loses: recorded answers, replayed on machines whose rounds cost what was measured there.

`pytest -s tests/policy/test_replay.py` prints the tables. record_traces.py made the records, of the demo pair.
"""

import copy
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from best_first import HostTree
from policy.record_traces import NONE, STEPS, TRACES
from policy.simulated import drafts_of, observed, plain

from dflash_mlx.decoding.policies import WidthPolicy
from dflash_mlx.policy.trees_or_chains import Experience, PairCosts, choose_policy
from dflash_mlx.policy.width import FixedWidth, RoundCosts

PLACES = 15
# How far a measured round may be off, and how much rounds vary.
OFF, NOISE, SEEDS = 0.05, 0.05, 3
# A computer with other work becomes so many times slower, and quick again, with this chance at each round.
SLOWER, CHANGES = 1.6, 0.01


@dataclass(frozen=True)
class Trace:
    """A recorded answer: see `record_traces.record`. sampled: not greedily."""

    category: str
    sampled: bool
    log_probs: np.ndarray
    ranks: np.ndarray

    def probabilities(self, at: int) -> np.ndarray:
        """Of each place's candidates, whose numbers stand for their tokens."""
        return np.exp(self.log_probs[at].astype(np.float64) / -STEPS)

    def text(self, at: int) -> list[int]:
        """How the text goes on, as far as the candidates know it."""
        tokens = self.ranks[at].tolist()
        return tokens[: tokens.index(NONE)] if NONE in tokens else tokens


@cache
def traces() -> tuple[Trace, ...]:
    with np.load(TRACES) as stored:
        names = [name.removesuffix("/ranks") for name in stored.files if name.endswith("/ranks")]
        return tuple(
            Trace(
                name.split("/")[0],
                not name.endswith("/0.0"),
                stored[f"{name}/log_probs"],
                stored[f"{name}/ranks"],
            )
            for name in names
        )


def table(relative: dict[int, float], *, drafter: float) -> PairCosts:
    """Rounds that wait for their drafts, by a pass's time over so many rows, in passes over one row.

    drafter: its share of the target's weights.
    """
    rows, seconds = sorted(relative), [relative[number] for number in sorted(relative)]
    over = {width: float(np.interp(width + 1, rows, seconds)) for width in (0, 1, 2, 3, 4, 5, 7, 11, 15)}
    drafts = {width: drafter * over[width] for width in over if width}
    # A round drafts as many places as it verifies, or all where it is a tree.
    chains = {width: over[width] + drafts.get(width, 0.0) for width in over}
    trees = {width: over[width] + (drafts[PLACES] if width else 0.0) for width in over}
    return PairCosts(RoundCosts(chains, drafts, steep=True), RoundCosts(trees, dict(drafts), steep=True, places=PLACES))


def gpu(plain: float, chain: float, draft: float, *, trees: dict[int, float] | None = None) -> PairCosts:
    """Rounds whose width costs nothing, of which chains are queued after one another."""
    drafts = {1: draft, PLACES: draft}
    chains = RoundCosts({0: plain, 1: chain, PLACES: chain}, drafts, steep=False)
    if trees is None:
        return PairCosts(chains)
    return PairCosts(chains, RoundCosts({0: plain, **trees}, dict(drafts), steep=False, places=PLACES))


# Published times of a pass in 4 bits over so many rows, by MLX's own kernels: github.com/ml-explore/mlx, issues 4265
# (M3 Ultra, whose kernel is that of M1 and M2), 3863 (M3 Max), 3839 (M4 Pro) and pull request 3791 (M5 Max).
MACHINES = {
    "2 CPU cores": PairCosts(
        RoundCosts({0: 51.1, 1: 66.5, 3: 79.4, 7: 85.6, 15: 103.5}, {1: 10.3, 7: 13.1, 15: 16.5}, steep=True),
        RoundCosts(
            {0: 51.1, 1: 77.2, 2: 84.6, 3: 88.4, 4: 90.9, 7: 94.0, 8: 103.0, 15: 106.6, 31: 148.0},
            {1: 10.3, 7: 13.1, 15: 16.5},
            steep=True,
            places=PLACES,
        ),
    ),
    "H200": gpu(3.2, 4.1, 1.4, trees={1: 4.4, 15: 4.4, 31: 4.4, 63: 4.4}),
    "H200, attention of 32 rows in one launch": gpu(2.8, 3.5, 1.4, trees={1: 3.8, 3: 3.8, 15: 3.8, 31: 3.87, 63: 5.5}),
    "H200, a launch for each product": gpu(2.8, 3.7, 1.3, trees={1: 4.1, 3: 4.2, 15: 4.2, 31: 4.3, 63: 6.0}),
    "H200, slower computer": gpu(3.3, 4.4, 1.2, trees={1: 5.1, 3: 5.6, 15: 5.6, 31: 5.6, 63: 7.4}),
    "H200, trees before they had kernels": gpu(3.0, 4.2, 1.2, trees={15: 6.65, 31: 7.05}),
    "H200, slower computer, trees before they had kernels": gpu(
        3.1, 5.2, 1.2, trees={1: 6.3, 7: 6.4, 15: 6.4, 31: 6.6, 63: 7.2}
    ),
    "H200, no trees": gpu(3.2, 4.6, 1.4),
    "M1": table({1: 1.0, 2: 1.83, 4: 3.26, 8: 6.1, 16: 6.3}, drafter=0.15),
    "M3": table({1: 1.0, 2: 1.0, 4: 1.28, 6: 2.0, 8: 2.5, 9: 3.1, 10: 3.94, 16: 3.94}, drafter=0.15),
    "M4": table({1: 1.0, 2: 1.03, 3: 1.22, 4: 1.47, 6: 2.07, 8: 2.69, 16: 3.9}, drafter=0.15),
    "M5": table({1: 1.0, 3: 1.12, 5: 1.48, 8: 2.25, 12: 3.18, 16: 3.9}, drafter=0.15),
}
# What is kept of the speed of the best fixed choice for any category of prompts, and for the greedy and the sampled
# answers of one: these are two or four, so that it is partly luck which choice was the best one for them.
LEAST, LEAST_OF_FEW = 0.95, 0.92
FIXED = [FixedWidth(0), *(FixedWidth(width) for width in (1, 3, 7, 15))]
FIXED_TREES = [FixedWidth(size, places=PLACES) for size in (15, 31, 63)]  # where they were measured


class Clock:
    """How long rounds are seen to take, other than they should."""

    def __init__(self, rng: random.Random, *, steady: bool) -> None:
        self.rng, self.steady, self.slower = rng, steady, False

    def __call__(self, seconds: float) -> float:
        if not self.steady and self.rng.random() < CHANGES:
            self.slower = not self.slower
        return seconds * (SLOWER if self.slower else 1.0) * self.rng.lognormvariate(0, NOISE)


class Round(NamedTuple):
    """What a round takes time for: drafts for so many places, of which so many are verified, in a chain or a tree."""

    places: int
    size: int
    tree: bool

    def seconds(self, costs: PairCosts) -> float:
        if not self.places:
            return costs.chains.plain
        kind = costs.trees if costs.trees is not None and self.tree else costs.chains
        return kind.round(self.size, drafted=self.places)


class Answer(NamedTuple):
    tokens: int
    rounds: Counter[Round]

    def seconds(self, costs: PairCosts) -> float:
        return sum(count * round.seconds(costs) for round, count in self.rounds.items())

    def speed(self, costs: PairCosts) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds(costs)


def answer(trace: Trace, policy: WidthPolicy, *, may_branch: bool, seen: Callable[[Round], float]) -> Answer:
    """Answer by the policy, in the order in which the decode loop asks it. seen: what it is told that rounds took."""
    at, end, untold, unread, rounds = 0, len(trace.ranks), [], 0, Counter[Round]()
    following = policy.next_round(may_branch=may_branch)
    while at < end:
        choice = following
        tree, forecast, path = HostTree([], [], []), None, [0]
        if choice.places:
            tree, forecast = drafts_of(policy, choice, trace.probabilities(at))
            path = tree.walk(trace.text(at))
        # The next draft is launched before the outcome of this round is known.
        following = policy.next_round(may_branch=may_branch)
        made = Round(choice.places, tree.size, choice.tree > 0)
        rounds[made] += 1
        at, seconds = at + len(path), seen(made)
        round = observed(choice, tree, forecast, path, seconds) if choice.places else plain(seconds)
        if choice.tree and not choice.waits:
            # Of trees told of together, the forecast of one is read.
            unread = (unread + 1) % max(policy.listens_after, 1)
            round = round if unread == 0 else replace(round, forecast=None, firsts=0)
        if after := policy.listens_after:
            untold.append(round)
            if len(untold) >= after:
                for round in untold:
                    policy.observe(round)
                untold.clear()
    return Answer(at, rounds)


def replay(trace: Trace, policy: WidthPolicy, costs: PairCosts, clock: Clock | None) -> float:
    """Tokens a second of a steady machine. clock: by which the policy is told what rounds took."""

    def seen(round: Round) -> float:
        seconds = round.seconds(costs)
        return clock(seconds) if clock is not None else seconds

    return answer(trace, policy, may_branch=costs.trees is not None, seen=seen).speed(costs)


@cache
def fixed_answers(policy: FixedWidth) -> list[Answer]:
    """To all that was recorded; the same on all machines."""
    return [answer(trace, policy, may_branch=policy.branches, seen=lambda _: 0.0) for trace in traces()]


def measured(costs: PairCosts, rng: random.Random) -> PairCosts:
    """What a user's machine may have been measured to cost: each figure is off by chance."""

    def kind(exact: RoundCosts) -> RoundCosts:
        return replace(
            exact, round_seconds={w: s * rng.uniform(1 - OFF, 1 + OFF) for w, s in exact.round_seconds.items()}
        )

    return PairCosts(kind(costs.chains), kind(costs.trees) if costs.trees is not None else None)


@dataclass(frozen=True)
class Result:
    """An answer's tokens a second: left to itself, and by fixed choice."""

    trace: Trace
    speed: float
    fixed: dict[str, float]

    @property
    def kind(self) -> str:
        return f"{self.trace.category}{', sampled' if self.trace.sampled else ', greedy'}"


def fixed_speeds(costs: PairCosts) -> list[dict[str, float]]:
    """For each recorded answer, tokens a second of each fixed choice that the machine has."""
    trees = costs.trees.round_seconds if costs.trees is not None else {}
    policies = [*FIXED, *(policy for policy in FIXED_TREES if policy.width in trees)]
    names = [f"{policy.width}{' tree' if policy.branches else ''}" for policy in policies]
    speeds = [[answered.speed(costs) for answered in fixed_answers(policy)] for policy in policies]
    return [dict(zip(names, of_answer, strict=True)) for of_answer in zip(*speeds, strict=True)]


def automatic_speeds(
    costs: PairCosts, seed: int, *, steady: bool, before: Callable[[], Experience] = Experience
) -> Iterator[float]:
    """Tokens a second of one answer after another, left to itself. before: what the first one begins with."""
    rng = random.Random(seed)
    known, experience, clock = measured(costs, rng), before(), Clock(rng, steady=steady)
    for trace in traces():
        mine = copy.deepcopy(experience)
        policy = choose_policy(copy.deepcopy(known), PLACES, mine)
        yield replay(trace, policy, costs, clock)
        experience = experience.merged(mine)


@pytest.mark.parametrize("steady", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["steady", "unsteady"])
@pytest.mark.parametrize(
    "machine", [pytest.param(name, marks=pytest.mark.long) if "before" in name else name for name in MACHINES]
)
def test_little_is_lost_against_the_best_fixed_choice(machine, steady):
    costs = MACHINES[machine]
    fixed = fixed_speeds(costs)
    found = [
        Result(trace, speed, choices)
        for seed in range(SEEDS)
        for trace, speed, choices in zip(traces(), automatic_speeds(costs, seed, steady=steady), fixed, strict=True)
    ]
    mean = statistics.geometric_mean
    choices = list(fixed[0])
    over_all = {choice: mean(r.speed / r.fixed[choice] for r in found) for choice in choices}
    print(
        f"\n{machine}{'' if steady else ', unsteady'}: times the speed of",
        ", ".join(f"{choice}: {over_all[choice]:.2f}" for choice in choices),
    )
    assert min(kept_of_the_best(found, lambda result: result.trace.category)) > LEAST
    assert min(kept_of_the_best(found, lambda result: result.kind)) > LEAST_OF_FEW
    assert min(over_all.values()) > 0.97


# A drafter of two layers for the demo target, on an H100.
CHEAP = gpu(4.3, 4.8, 0.6, trees={1: 4.8, 63: 4.8})


def useless_answers(
    costs: PairCosts, known: PairCosts, clock: Clock | None = None, before: Callable[[], Experience] = Experience
) -> list[float]:
    """How many times as long as plain decoding answers of 1,000 tokens take, one after another, with such a drafter.

    before: what the first one begins with.
    """
    said = np.concatenate([trace.log_probs for trace in traces() if not trace.sampled])[:1001]
    wrong = Trace("useless", False, said, np.full((1000, PLACES), NONE, dtype=traces()[0].ranks.dtype))
    experience, times = before(), []
    for _ in range(3):
        mine = copy.deepcopy(experience)
        speed = replay(wrong, choose_policy(copy.deepcopy(known), PLACES, mine), costs, clock)
        times.append(1 / (speed * costs.chains.plain))
        experience = experience.merged(mine)
    print(f" {', '.join(f'{longer:.3f}' for longer in times)} times as long", end="")
    return times


@pytest.mark.parametrize("machine", [*MACHINES, "H100, cheap drafts"])
def test_a_drafter_that_is_sure_of_itself_and_never_right_costs_little(machine):
    """Less than 3 % in each of three answers, also where its rounds take little longer than others."""
    costs = MACHINES.get(machine, CHEAP)
    print(f"\n{machine}:", end="")
    assert max(useless_answers(costs, costs)) < 1.03


@pytest.mark.parametrize("machine", [*MACHINES, "H100, cheap drafts"])
def test_a_drafter_that_is_never_right_from_somewhere_on_costs_little(machine):
    """Less than 3 % of the rest of an answer, though rounds are told of together while drafting pays."""
    costs = MACHINES.get(machine, CHEAP)
    greedy = [trace for trace in traces() if not trace.sampled]
    said, right = (
        np.concatenate(parts)[:1000] for parts in zip(*((t.log_probs, t.ranks) for t in greedy), strict=True)
    )

    def answered(useless: int) -> Answer:
        ranks = np.concatenate([right, np.full((useless, PLACES), NONE, dtype=right.dtype)])
        trace = Trace("useless", False, np.concatenate([said, said, said[:1]]), ranks)
        policy = choose_policy(copy.deepcopy(costs), PLACES)
        return answer(trace, policy, may_branch=costs.trees is not None, seen=lambda round: round.seconds(costs))

    half, whole = answered(0), answered(1000)
    plain_seconds = (whole.tokens - half.tokens) * costs.chains.plain
    longer = (whole.seconds(costs) - half.seconds(costs)) / plain_seconds
    print(f"\n{machine}: {longer:.3f} times as long", end="")
    assert longer < 1.03


@pytest.mark.parametrize("steady", [True, False], ids=["steady", "unsteady"])
@pytest.mark.parametrize("machine", [*MACHINES, "H100, cheap drafts"])
def test_that_its_rounds_were_measured_as_too_cheap_is_found_out(machine, steady):
    """The first answer shows it, so that the others lose as little as with the right costs."""
    costs = MACHINES.get(machine, CHEAP)
    print(f"\n{machine}{'' if steady else ', unsteady'}:", end="")
    clocks = [Clock(random.Random(seed), steady=steady) for seed in range(SEEDS)]
    first, *later = zip(*(useless_answers(costs, too_cheap(costs), clock) for clock in clocks), strict=True)
    assert statistics.mean(first) < 1.03
    assert max(map(max, later)) < 1.02


@pytest.mark.parametrize("machine", [*MACHINES, "H100, cheap drafts"])
def test_guesses_that_looked_random_when_they_were_checked_make_the_first_answer_careful(machine):
    """It loses next to nothing then. A drafter that is better than it looked loses little."""
    costs = MACHINES.get(machine, CHEAP)
    print(f"\n{machine}:", end="")
    assert max(useless_answers(costs, too_cheap(costs), before=Experience.of_failure)) < 1.01
    careful, bold = (
        statistics.geometric_mean(automatic_speeds(costs, 0, steady=True, before=before))
        for before in (Experience.of_failure, Experience)
    )
    print(f"; a good drafter keeps {careful / bold:.3f} of its speed", end="")
    assert careful > 0.95 * bold


def too_cheap(costs: PairCosts) -> PairCosts:
    """The costs with plain rounds measured as too long, and those with drafts as too short."""

    def kind(exact: RoundCosts) -> RoundCosts:
        rounds = {w: s * (1 - OFF if w else 1 + OFF) for w, s in exact.round_seconds.items()}
        return replace(exact, round_seconds=rounds)

    return PairCosts(kind(costs.chains), kind(costs.trees) if costs.trees is not None else None)


def kept_of_the_best(found: Sequence[Result], kind_of: Callable[[Result], str]) -> list[float]:
    """What is kept, for each kind of answers, of the speed of the fixed choice that is the best one for them all."""
    mean, choices, kept = statistics.geometric_mean, list(found[0].fixed), []
    for kind in dict.fromkeys(kind_of(result) for result in found):
        mine = [result for result in found if kind_of(result) == kind]
        best = max(choices, key=lambda choice: mean(r.fixed[choice] for r in mine))
        kept.append(mean(r.speed / r.fixed[best] for r in mine))
        hindsight = mean(r.speed / max(r.fixed.values()) for r in mine)
        worst = min(r.speed / r.fixed["0"] for r in mine)
        print(f"  {kind:22} {kept[-1]:.3f} of {best}; {hindsight:.3f} of each answer's best; {worst:.2f} of 0")
    return kept
