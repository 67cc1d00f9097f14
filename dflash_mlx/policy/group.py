"""How many drafts to verify in the rounds that several lanes share.

All lanes verify chains of one width, 0 included (plain batched decoding): drafting and batching use up the same thing,
the rows that a pass of the target takes at little more cost than one. So the width is the one with the most expected
tokens a second, of all lanes, by the measured cost of a pass over lanes x (width + 1) rows. Trees are for single lanes:
a tree's rows buy few tokens each, and many lanes have better use for them.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dflash_mlx.decoding.policies import Choice, RoundReport
from dflash_mlx.policy.pauses import Pauses
from dflash_mlx.policy.width import FADE, FEW_WIDTHS, STEEP, AcceptanceEstimate
from dflash_mlx.tree_steps import SUREST

# Where a GPU compiles for each width, choosing each round's pays for the wait only from this ratio between the widest
# and the narrowest drafted round: the host has much to do for many lanes, and then does it while the device is idle.
_STEEP_COMPILED = 2.0
# Drafting, or another width, must promise so many times as much: a GPU compiles anew for another shape, and lanes that
# join have more to bring along.
_WORTH = 1.1
# Twice as many lanes must give this many times as many tokens a second.
_WORTH_DOUBLING = 1.1
# After this many rounds in which drafting was not worth it, this many are made without; more each time.
_MOST_UNUSED, _FIRST_REST, _LONGEST_REST = 4, 8, 256
# Where the width is chosen in each round, drafting is worth it from so many times the speed of plain rounds.
_PAYS = 1.03
# So many rounds decide how many places the next one drafts.
_RECENT_ROUNDS = 8
# The chance that a place is kept if those before it are: at first, and how much one more round lets the past fade.
_FIRST_CHANCE, _CHANCE_FADE = 0.75, 0.9
# How quickly costs follow what rounds take, those with drafts or those without; half as quickly the others, since it
# may be the computer that is slower now; and what a single width takes beyond that.
_FOLLOW, _FOLLOW_OTHERS, _FOLLOW_WIDTH = 0.3, 0.15, 0.1
# After this many drafted rounds, four times as many each time, some plain ones show what they really take.
_FIRST_CHECK, _LONGEST_CHECK, _CHECK = 32, 2048, 8


@dataclass
class FixedGroup:
    """Always the same width."""

    width: int
    waits: bool = False

    def next_round(self, lanes: int) -> Choice:
        return Choice(self.width, width=None if self.waits else self.width)

    def choose(self, best: np.ndarray, *, rows: int) -> int:
        return int(best.shape[1])

    def observe(self, report: RoundReport) -> None:
        pass


@dataclass
class GroupCosts:
    """Seconds of the parts of a shared round, measured at some numbers and interpolated between.

    plain: a round without drafts, by lanes. verify: a pass of the target and its judgement, by lanes and by rows of all
    lanes together. draft: a pass of the drafter, by rows. `observe` follows changes of the machine, and learns where
    rounds of a width take longer than others would let expect.
    """

    plain: Mapping[int, float]
    verify: Mapping[int, Mapping[int, float]]
    draft: Mapping[int, float]
    # What rounds took lately, times what was measured, without drafts and with; and what those of a width took beyond.
    _drift: dict[bool, float] = field(default_factory=lambda: {False: 1.0, True: 1.0})
    _own_drift: dict[int, float] = field(default_factory=dict)
    # The measured passes by lanes and width, and drafts by rows: they are asked for in every round and stay the same.
    _passes: dict[tuple[int, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _drafts: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def round(self, lanes: int, width: int, *, drafted: int | None = None) -> float:
        """A round of this many lanes that verifies `width` drafts of `drafted` places each (as many, when None)."""
        drafted = width if drafted is None else drafted
        drafting = self._drafting(lanes, drafted) if drafted else 0.0
        return (self._passing(lanes, width) + drafting) * self._drift[drafted > 0] * self._own_drift.get(width, 1.0)

    def rounds(self, lanes: int, widths: Sequence[int]) -> np.ndarray:
        """Rounds that draft each number of places, by the width they verify: (widths, 1 + widths), none first."""
        passing = [self._passing(lanes, width) for width in (0, *widths)]
        drafting = [self._drafting(lanes, drafted) for drafted in widths]
        own_drift = [self._own_drift.get(width, 1.0) for width in (0, *widths)]
        return np.add.outer(drafting, passing) * self._drift[True] * own_drift

    def _passing(self, lanes: int, width: int) -> float:
        found = self._passes.get((lanes, width))
        if found is None:
            found = self._passes[lanes, width] = self._between(lanes, width)
        return found

    def _drafting(self, lanes: int, places: int) -> float:
        rows = lanes * (places + 1)
        found = self._drafts.get(rows)
        if found is None:
            found = self._drafts[rows] = interpolate(self.draft, rows)
        return found

    def _between(self, lanes: int, width: int) -> float:
        """What a pass takes, between those that were measured."""
        if width == 0:
            return interpolate(self.plain, lanes)
        # For more lanes than were measured, what as many rows of the most lanes take.
        rows, known = lanes * (width + 1), sorted(self.verify)
        after = next((i for i, number in enumerate(known) if number >= lanes), len(known) - 1)
        nearest = {number: interpolate(self.verify[number], rows) for number in known[max(after - 1, 0) : after + 1]}
        return float(np.interp(lanes, list(nearest), list(nearest.values())))

    def observe(self, seconds: float, lanes: int, width: int, drafted: int) -> None:
        """Follow the machine, and the width's rounds more slowly; a single outlier counts little."""
        ratio = min(max(seconds / self.round(lanes, width, drafted=drafted), 0.5), 2.0)
        self._drift[drafted > 0] *= ratio**_FOLLOW
        self._drift[drafted == 0] *= ratio**_FOLLOW_OTHERS
        if width:
            self._own_drift[width] = self._own_drift.get(width, 1.0) * ratio**_FOLLOW_WIDTH


def interpolate(table: Mapping[int, float], at: int) -> float:
    """Piecewise linear; beyond the last number it goes on as between the last two, before the first it stays."""
    known = sorted(table)
    if at > known[-1] and len(known) > 1:
        before, last = known[-2:]
        return table[last] + (table[last] - table[before]) * (at - last) / (last - before)
    return float(np.interp(at, known, [table[number] for number in known]))


def rising(table: Mapping[int, float]) -> dict[int, float]:
    """Seconds by rows, none of them above those of more rows: what disturbs a measurement only makes it longer."""
    numbers = sorted(table)
    lowest = np.minimum.accumulate([table[number] for number in reversed(numbers)])[::-1]
    return dict(zip(numbers, lowest.tolist(), strict=True))


def worthwhile_lanes(plain: Mapping[int, float]) -> int:
    """Up to how many lanes the tokens a second still rise; plain: seconds of a round without drafts, by lanes."""
    lanes = min(plain)
    while 2 * lanes in plain and 2 * plain[lanes] >= _WORTH_DOUBLING * plain[2 * lanes]:
        lanes *= 2
    return lanes


class GroupWidth:
    """The width with the most expected tokens a second, of all lanes together.

    Where a wider round costs more, by the drafter's probabilities in each round: the sum of the chances that each lane
    keeps its drafts. It drafts as many places as would have been best for the rounds before. Where a wider round costs
    no more, by the acceptance of the rounds so far: then the host never waits for a draft.
    """

    def __init__(self, costs: GroupCosts, places: int, *, by_confidence: bool = False, any_width: bool = True) -> None:
        """places: the most that the drafter can draft. by_confidence: always go by its confidence. any_width: a round
        may have any number of drafts, and not just a few numbers, for each of which a GPU compiles anew."""
        self.costs, self.places, self._by_confidence = costs, places, by_confidence
        self._few = sorted({min(width, places) for width in FEW_WIDTHS})
        self._widths = list(range(1, places + 1)) if any_width else self._few
        self._steep = STEEP if any_width else _STEEP_COMPILED
        self.estimate = AcceptanceEstimate()
        self.pauses = Pauses()
        self._width = 0
        # Of the last rounds, the tokens expected of each width from 0 to all places, beyond the one that is sure.
        self._recent_gains: deque[np.ndarray] = deque(maxlen=_RECENT_ROUNDS)
        # How likely each place is kept if those before it are, for places that a round did not draft.
        self._chances = np.full(places, _FIRST_CHANCE)
        # A lane's tokens a second that drafting the chosen number of places promises.
        self._speed = 0.0
        # Kept drafts, and what the confidence promised, of the drafts judged so far, by lane.
        self._kept = self._promised = 20.0
        self._expected = 0.0
        # Rounds in a row whose drafts were not worth it, rounds left without drafting, and how many the next time.
        self._unused, self._rest, self._next_rest = 0, 0, _FIRST_REST
        # Drafted rounds since the last plain ones, and after how many these are looked at again.
        self._drafted, self._next_check = 0, _FIRST_CHECK

    def next_round(self, lanes: int) -> Choice:
        if self._rests():
            self._drafted = 0
            return Choice(0)
        if self._by_confidence or self.costs.round(lanes, self.places) > self._steep * self.costs.round(lanes, 1):
            drafted, self._speed = self._best_places(lanes)
            self._count_unused(self._speed * self.costs.round(lanes, 0) > _PAYS)
            if self._rest:
                # The next try judges by what it sees then, and not by the rounds before.
                self._recent_gains = deque(list(self._recent_gains)[-1:], maxlen=_RECENT_ROUNDS)
            return Choice(drafted)
        speeds = self._speeds(lanes)
        best = max(speeds, key=lambda width: speeds[width])
        if self._width not in speeds or speeds[best] > _WORTH * speeds[self._width]:
            self._width = best
        self._count_unused(speeds[best] * self.costs.round(lanes, 0) > _WORTH)
        self._drafted += 1
        if self._drafted > self._next_check:
            self._next_check = min(4 * self._next_check, _LONGEST_CHECK)
            self._drafted, self._rest = 0, max(self._rest, _CHECK - 1)
            return Choice(0)
        return Choice(self._width, width=self._width)

    def choose(self, best: np.ndarray, *, rows: int) -> int:
        drafted = best.shape[1]
        chances = np.minimum(best * (self._kept / self._promised), SUREST)
        gains = self._expected_gains(np.cumprod(chances, axis=1).mean(axis=0))
        self._recent_gains.append(gains)
        # Rounds without drafts are always to be had.
        speed = max(self._speed, 1.0 / self.costs.round(rows, 0))
        widths = [width for width in (0, *self._widths) if width <= drafted]
        seconds = np.array([self.costs.round(rows, width, drafted=drafted) for width in widths])
        width = widths[int(_worth(gains[widths], seconds, speed).argmax())]
        self._expected = float(gains[width]) * self._promised / self._kept
        return width

    def observe(self, report: RoundReport) -> None:
        if report.seconds is not None:
            self.costs.observe(report.seconds, report.rows, report.width, report.drafted)
        if report.drafted == 0 or not report.kept:
            return
        kept = [num_accepted for _, num_accepted in report.kept]
        mean = sum(kept) / len(kept)
        if report.width:
            self.estimate.observe(report.width, kept)
            if self._expected:
                self._kept = FADE * self._kept + mean
                self._promised = FADE * self._promised + self._expected
        self._expected = 0.0
        seconds = self.costs.round(report.rows, report.width, drafted=report.drafted)
        self.pauses.observe(mean + 1, seconds, self.costs.round(report.rows, 0), lanes=len(kept))

    def _rests(self) -> bool:
        """Whether the next round is one of those without drafting that were decided on before."""
        if self._rest > 0:
            self._rest -= 1
            return True
        return self.pauses.take_rest()

    def _count_unused(self, pays: bool) -> None:
        """Rest from drafting after some rounds in a row of which none was worth it."""
        self._unused = 0 if pays else self._unused + 1
        if pays:
            self._next_rest = _FIRST_REST
        elif self._unused >= _MOST_UNUSED:
            self._unused, self._rest, self._next_rest = 0, self._next_rest, min(2 * self._next_rest, _LONGEST_REST)

    def _expected_gains(self, kept: np.ndarray) -> np.ndarray:
        """Tokens by width, from 0 to all places, beyond the one that is sure; kept: by drafted place, how likely it is.

        Of places that were not drafted, what was lately seen of them is expected.
        """
        drafted = len(kept)
        # Where no lane has a draft, there is no chance.
        chances = kept / np.maximum(np.concatenate([[1.0], kept[:-1]]), np.finfo(float).tiny)
        self._chances[:drafted] = _CHANCE_FADE * self._chances[:drafted] + (1 - _CHANCE_FADE) * chances
        beyond = kept[-1] * np.cumprod(self._chances[drafted:])
        return np.concatenate([[0.0], kept, beyond]).cumsum()

    def _best_places(self, lanes: int) -> tuple[int, float]:
        """How many places to draft, and a lane's tokens a second then, had the last rounds' widths been chosen so."""
        recent = self._recent_gains or [np.array(self.estimate.expected_tokens(self.places)) - 1.0]
        gains = np.stack(recent)[:, [0, *self._widths]]
        best, speed, plain = 0, 0.0, 1.0 / self.costs.round(lanes, 0)
        for i, (places, seconds) in enumerate(zip(self._widths, self.costs.rounds(lanes, self._widths), strict=True)):
            # No more are verified than are drafted.
            chosen = _worth(gains[:, : i + 2], seconds[: i + 2], max(speed, plain)).argmax(axis=1)
            tokens = 1.0 + np.take_along_axis(gains, chosen[:, None], axis=1)
            tokens_a_second = float(tokens.sum() / seconds[chosen].sum())
            if tokens_a_second > speed:
                best, speed = places, tokens_a_second
        return best, speed

    def _speeds(self, lanes: int) -> dict[int, float]:
        """Expected tokens a second of a lane, by width."""
        expected = self.estimate.expected_tokens(self.places)
        return {width: expected[width] / self.costs.round(lanes, width) for width in self._few}


def _worth(gains: np.ndarray, seconds: np.ndarray, speed: float) -> np.ndarray:
    """What rounds of some widths, the first of them 0, are worth: tokens that they gain beyond what their time would.

    gains: (..., widths) tokens beyond the one that is sure; seconds: (widths,); speed: tokens a second otherwise.
    """
    worth = gains - speed * seconds
    worth[..., 0] += _WORTH - 1.0
    return worth
