"""What the automatic choice loses in rounds that several answers share: recorded ones, replayed side by side.

`pytest -s tests/policy/test_replay_group.py` prints what is kept of the best fixed number of drafts. The machines are
those of test_replay.py, as far as it is known or may be assumed what more rows take there.
"""

import random
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from policy.simulated import SharedComputer
from policy.test_replay import NOISE, OFF, PLACES, Clock, Trace, traces

from dflash_mlx.decoding.policies import GroupPolicy, RoundReport
from dflash_mlx.policy.group import FixedGroup, GroupCosts, GroupWidth, interpolate

STREAMS = (2, 8, 16)
# Answers that each stream gives one after another.
ANSWERS = 3
FIXED = (0, 1, 3, 7, 15)
# What is kept of the best fixed number of drafts: for any category, for any number of streams, and on a machine. These
# answers are few, so that it is partly luck which number was the best one for them.
LEAST, LEAST_OF_ALL = 0.92, 0.94


def table(passes: dict[int, float]) -> GroupCosts:
    """A pass by rows of all lanes; a drafter takes 0.15 of that."""
    plain = {lanes: interpolate(passes, lanes) for lanes in (2, 4, 8, 16)}
    return GroupCosts(plain, {2: passes}, {rows: 0.15 * seconds for rows, seconds in passes.items()})


# Up to 16 rows see test_replay.py. Beyond that it is assumed, not measured: MLX multiplies in tiles of 32 rows, so
# fewer rows take as long as 32, and more take longer in proportion; on an M5, from 64 rows on.
MACHINES = {
    "2 CPU cores": table({1: 51, 2: 66, 4: 75, 8: 83, 16: 100, 32: 148, 64: 240, 512: 1632}),
    "H100, small model": GroupCosts({2: 3.2, 32: 3.5}, {2: {4: 4.2, 64: 4.3, 512: 6.3}}, {4: 1.2, 512: 1.4}),
    "H100, large model": GroupCosts(
        {2: 9.0, 32: 9.3}, {2: {4: 9.5, 64: 10, 256: 14, 512: 24}}, {4: 1.2, 64: 1.3, 512: 2.2}
    ),
    "M3": table({1: 1.0, 2: 1.0, 4: 1.28, 6: 2.0, 8: 2.5, 9: 3.1, 10: 3.94, 32: 4.0, 64: 8.0, 512: 64.0}),
    "M4": table({1: 1.0, 2: 1.03, 3: 1.22, 4: 1.47, 6: 2.07, 8: 2.69, 16: 3.9, 32: 4.2, 64: 8.4, 512: 67.0}),
    "M5": table({1: 1.0, 3: 1.12, 5: 1.48, 8: 2.25, 12: 3.18, 32: 3.3, 64: 4.5, 128: 8.5, 512: 34.0}),
}


class Answer:
    """An answer that is being replayed."""

    def __init__(self, trace: Trace, at: int) -> None:
        self.trace, self.at = trace, at
        # How many of the first places are right, by round.
        self.right = (trace.ranks == 0).cumprod(axis=1).sum(axis=1)

    @property
    def chances(self) -> np.ndarray:
        """How likely the best candidate of each place is in the next round."""
        return self.trace.probabilities(self.at)[:, 0]

    @property
    def done(self) -> bool:
        return self.at >= len(self.right)


def replay(
    answers: list[Trace],
    policy: GroupPolicy,
    costs: GroupCosts,
    streams: int,
    clock: Callable[[float], float] | None = None,
) -> float:
    """Answer all, so many at a time, in the order in which the decode loop asks the policy; tokens a second.

    clock: by which the policy is told what rounds took.
    """
    rng, waiting, lanes = random.Random(len(answers)), list(answers), []
    tokens = spent = 0.0
    while waiting and len(lanes) < streams:
        # Not all began at the same time.
        lanes.append(Answer(waiting.pop(), rng.randrange(100)))
    while lanes:
        rows = len(lanes)
        choice = policy.next_round(rows)
        width = choice.places
        if choice.waits:
            width = policy.choose(np.stack([lane.chances[: choice.places] for lane in lanes]), rows=rows)
        kept = [min(int(lane.right[lane.at]), width) for lane in lanes]
        took = costs.round(rows, width, drafted=choice.places)
        seen = took if clock is None else clock(took)
        policy.observe(RoundReport(rows, choice.places, width, list(enumerate(kept)), seen))
        tokens, spent = tokens + sum(kept) + rows, spent + took
        for lane, num_accepted in zip(lanes, kept, strict=True):
            lane.at += num_accepted + 1
        lanes = [lane for lane in lanes if not lane.done]
        while waiting and len(lanes) < streams:
            lanes.append(Answer(waiting.pop(), 0))
    return tokens / spent


def measured(costs: GroupCosts, rng: random.Random) -> GroupCosts:
    """What a user's machine may have been measured to cost: each figure is off by chance."""

    def off(exact):
        return {at: seconds * rng.uniform(1 - OFF, 1 + OFF) for at, seconds in exact.items()}

    return GroupCosts(off(costs.plain), {2: off(costs.verify[2])}, off(costs.draft))


@pytest.mark.parametrize("machine", MACHINES)
def test_little_is_lost_against_the_best_fixed_number_of_drafts(machine):
    costs, rng = MACHINES[machine], random.Random(0)
    kept: dict[str, list[float]] = {}
    for streams in STREAMS:
        for category in (*dict.fromkeys(trace.category for trace in traces()), "all"):
            mine = [trace for trace in traces() if category in (trace.category, "all")]
            answers = rng.choices(mine, k=ANSWERS * streams)
            fixed = {width: replay(answers, FixedGroup(width), costs, streams) for width in FIXED}
            # A GPU compiles for each number of drafts anew.
            rented = "H100" in machine
            policy = GroupWidth(measured(costs, rng), PLACES, any_width=not rented)
            shared = SharedComputer(rng, noise=lambda: rng.lognormvariate(0, NOISE))
            clock = shared if rented else Clock(rng, steady=False)
            speed = replay(answers, policy, costs, streams, clock)
            for kind in (category, f"{streams} streams", machine):
                kept.setdefault(kind, []).append(speed / max(fixed.values()))
    means = {kind: statistics.geometric_mean(shares) for kind, shares in kept.items()}
    print(f"\n{machine}:", ", ".join(f"{kind} {mean:.2f}" for kind, mean in means.items() if kind != machine), end="")
    print(f"; together {means[machine]:.3f}, the least {min(kept[machine]):.2f}")
    assert min(means.values()) > LEAST
    assert means[machine] > LEAST_OF_ALL
