"""How many drafts to verify in a round, and which.

A wider round gains more tokens and costs more time; how much of either depends on the machine, the pair and the text.
So the cost of a round is measured on the user's machine, and the width is the one with the most expected tokens a
second. Two policies do that:

- `ConfidentWidth` (confidence.py): each round's own, a tree's or a chain's, from the drafter's probabilities.
- `SteadyWidth`: chains of one width, from the acceptance of the rounds so far. The host never waits for a draft, which
  is faster where width costs little. `SteadyTree` (trees_or_chains.py) does the same for trees.

Where both are open, with trees, trees_or_chains.py decides. Where drafting does not pay, all pause, say so, and try
again later.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, zip_longest

from dflash_mlx.decoding.policies import Choice, Forecast, Observation
from dflash_mlx.policy.drift import Drift
from dflash_mlx.policy.pauses import Patience, Pauses

# Tokens of context after which rounds are measured; after the further ones at few widths.
SHALLOW, DEPTHS = 64, (512, 2048)
# How much one more round lets the past fade: a memory of about 25 rounds.
FADE = 0.96
# Weight, in observations, of the assumption that a position is kept as often as the one before it.
_PRIOR_WEIGHT, _PRIOR_RATE = 2.0, 0.75
# A change of width must promise this much, so that noise does not make it flutter.
HYSTERESIS = 1.03
# From this ratio between the widest and the narrowest drafted round, choosing each round's width pays for the wait.
STEEP = 1.25
# Where width costs little, these widths are enough, and a GPU may compile anew for each.
FEW_WIDTHS = (1, 3, 7, 15)


@dataclass(frozen=True)
class FixedWidth:
    """Always the same width: a chain, or the likeliest tree within `places` places when that is not 0.

    waits: as a policy that chooses by the drafter's probabilities does.
    """

    listens_after = 0

    width: int
    places: int = 0
    waits: bool = False

    @property
    def branches(self) -> bool:
        return self.places > 0

    def next_round(self, *, may_branch: bool, told: float = 0.0) -> Choice:
        width = None if self.waits else self.width
        if not self.branches or self.width == 0:
            return Choice(self.width, width=width)
        return Choice(self.places, tree=self.width if may_branch else 0, width=width)

    def choose(self, forecast: Forecast) -> int:
        return self.width

    def observe(self, round: Observation) -> None:
        pass

    def take_notice(self) -> str | None:
        return None


# A share of the measured time that rounds only fall below if that was measured beside other programs.
_TOO_HIGH = 0.85
# A round for which drafts are made is not taken to cost less than this, in plain rounds. So small a difference is
# mostly chance, and useless drafts would be made all the time.
_LEAST_COST = 1.1


@dataclass
class RoundCosts:
    """Seconds a round takes by width, and its draft's share by places; measured at some and interpolated between.

    round_seconds: after `SHALLOW` tokens of context; deeper: after more, by their number, at few widths, where it was
    measured. steep: width costs much (more than `STEEP`). places: rounds were measured as trees of drafts at this many
    places, and are to be trees; 0: as chains. depth: tokens of context now. `observe` keeps the totals up to date while
    rounds are timed.
    """

    round_seconds: dict[int, float]
    draft_seconds: dict[int, float]
    steep: bool
    places: int = 0
    deeper: dict[int, dict[int, float]] = field(default_factory=dict)
    depth: int = SHALLOW
    drift: Drift = field(default_factory=Drift)
    # `round_seconds` as corrected by the drift; None where that has changed.
    _corrected: dict[int, float] | None = field(default=None, init=False, repr=False, compare=False)
    # What is known of rounds of each width after longer contexts (`_longer`). Several are asked for in every round.
    _lines: dict[int, list[tuple[int, float]]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def follow(self, drift: Drift) -> None:
        """Let this be the drift from now on."""
        self.drift, self._corrected = drift, None

    def round(self, width: int, *, drafted: int | None = None) -> float:
        """A round that verifies `width` drafts of `drafted` places (as many as when it was measured, when None)."""
        return self._expected(self._measured(width, drafted), width, drafted)

    def observe(self, seconds: float, width: int, drafted: int) -> None:
        """Follow slow changes (a warm machine, a longer context), and what was measured wrong."""
        measured = self._measured(width, drafted)
        self.drift.observe(seconds / self._expected(measured, width, drafted))
        if width == 0 and drafted:
            return
        self.drift.compare_kinds(seconds / measured, drafting=width > 0)
        if width and self.steep:
            nearest = min(filter(None, self.round_seconds), key=lambda at: abs(at - width))
            self.drift.compare_widths(seconds / measured, nearest)
            self._corrected = None

    @property
    def too_high(self) -> bool:
        """Whether rounds take clearly less than was measured: other programs were running then."""
        return self.drift.factor < _TOO_HIGH

    @property
    def plain(self) -> float:
        return self.round(0)

    def worth(self, kept: float, width: int) -> float:
        """How many times as fast as plain decoding a round of this width is that keeps so many drafts; 0 for none."""
        return (1.0 + kept) * self.plain / self.round(width) if kept else 0.0

    def _expected(self, measured: float, width: int, drafted: int | None) -> float:
        """What is to be expected of a round that was measured so."""
        if width:
            measured *= self.drift.of_drafts
            if drafted != 0:
                measured = max(measured, _LEAST_COST * self._measured(0, 0))
        return measured * self.drift.factor

    def _measured(self, width: int, drafted: int | None) -> float:
        """What a round takes by what was measured, and by what its width's rounds have shown."""
        if self._corrected is None:
            known = self.drift.of_widths
            self._corrected = {at: seconds * known.get(at, 1.0) for at, seconds in self.round_seconds.items()}
        own = (self.places or width) if width else 0
        extra = 0.0 if drafted in (None, own) else self._draft(drafted) - self._draft(own)
        return _interpolate(self._corrected, width) + extra + self._deeper(width)

    def _draft(self, width: int) -> float:
        return _interpolate(self.draft_seconds, width) if width else 0.0

    def _deeper(self, width: int) -> float:
        """What a round takes longer than after a short context."""
        if not self.deeper or self.depth <= SHALLOW:
            return 0.0
        line = self._lines.get(width) or self._lines.setdefault(width, self._longer(width))
        for (before, less), (after, more) in pairwise(line):
            if self.depth <= after:
                return less + (more - less) * (self.depth - before) / (after - before)
        after, more = line[-1]
        return more * (self.depth - SHALLOW) / (after - SHALLOW)

    def _longer(self, width: int) -> list[tuple[int, float]]:
        """The same at the lengths of context that were measured. It never falls."""
        line = [(SHALLOW, 0.0)]
        for depth, table in sorted(self.deeper.items()):
            longer = {at: seconds - _interpolate(self.round_seconds, at) for at, seconds in table.items()}
            line.append((depth, max(line[-1][1], _interpolate(longer, width))))
        return line


def _interpolate(table: dict[int, float], width: int) -> float:
    """Piecewise linear; constant outside. Width 0 has no draft and is never interpolated from."""
    found = table.get(width)
    if found is not None:
        return found
    below, above, share = _around(tuple(table), width)
    return table[below] + (table[above] - table[below]) * share


@cache
def _around(widths: tuple[int, ...], width: int) -> tuple[int, int, float]:
    """The nearest of the widths on both sides, and how far between them this one is, from 0 to 1."""
    known = [at for at in widths if at > 0]
    below = max((at for at in known if at < width), default=min(known))
    above = min((at for at in known if at > width), default=max(known))
    return below, above, 0.0 if below == above else (width - below) / (above - below)


@dataclass
class AcceptanceEstimate:
    """How likely each draft position is kept, given that all before it were; the recent past counts most."""

    tried: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)

    def observe(self, width: int, accepted: Sequence[int]) -> None:
        """A round of `width` drafts, and how many of them each of its lanes accepted."""
        self.fade(FADE)
        for counts in (self.tried, self.kept):
            counts.extend([0.0] * (width - len(counts)))
        lanes = Counter(min(count, width) for count in accepted)
        reached = len(accepted)
        for i in range(width):
            self.tried[i] += reached
            reached -= lanes[i]
            self.kept[i] += reached

    def fade(self, factor: float) -> None:
        self.tried = [count * factor for count in self.tried]
        self.kept = [count * factor for count in self.kept]

    def merged(self, newest: "AcceptanceEstimate") -> "AcceptanceEstimate":
        """The mean of two estimates, by how often each position was tried."""

        def mean(a: list[float], b: list[float]) -> list[float]:
            return [(x + y) / 2 for x, y in zip_longest(a, b, fillvalue=0.0)]

        return AcceptanceEstimate(mean(self.tried, newest.tried), mean(self.kept, newest.kept))

    def expected_tokens(self, widest: int) -> list[float]:
        """Tokens that rounds of width 0 to `widest` gain on average. A position rarely reached is taken to be like the
        one before it."""
        total, survival, rate = 1.0, 1.0, _PRIOR_RATE
        totals = [total]
        for i in range(widest):
            tried, kept = (self.tried[i], self.kept[i]) if i < len(self.tried) else (0.0, 0.0)
            rate = (kept + _PRIOR_WEIGHT * rate) / (tried + _PRIOR_WEIGHT)
            survival *= rate
            total += survival
            totals.append(total)
        return totals


class SteadyWidth:
    """The one width with the most expected tokens a second, by the acceptance of the rounds so far."""

    branches = False

    def __init__(
        self,
        costs: RoundCosts,
        widest: int,
        estimate: AcceptanceEstimate | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.costs, self.widest = costs, widest
        self.estimate = estimate if estimate is not None else AcceptanceEstimate()
        # What an earlier answer taught is a hint about this one, not knowledge.
        self.estimate.fade(0.2)
        self.pauses = Pauses(patience)
        self.widths = sorted({min(width, widest) for width in FEW_WIDTHS})
        speeds = self._speeds()
        self.width = max(speeds, key=lambda width: speeds[width])

    @property
    def listens_after(self) -> int:
        return self.pauses.listens_after

    def next_round(self, *, may_branch: bool, told: float = 0.0) -> Choice:
        if self.pauses.take_rest(lambda: self.costs.worth(told, self.width)):
            return Choice(0, rests=True)
        return Choice(self.width, width=self.width)

    def choose(self, forecast: Forecast) -> int:
        return self.width

    def observe(self, round: Observation) -> None:
        if round.seconds is not None:
            self.costs.observe(round.seconds, round.width, round.drafted)
        if round.width == 0:
            return
        self.estimate.observe(round.width, [round.num_accepted])
        self.pauses.observe(round.num_accepted + 1, self.costs.round(round.width), self.costs.plain)
        speeds = self._speeds()
        best = max(speeds, key=lambda width: speeds[width])
        if speeds[best] > speeds[self.width] * HYSTERESIS:
            self.width = best

    def take_notice(self) -> str | None:
        notice, self.pauses.notice = self.pauses.notice, None
        return notice

    def _speeds(self) -> dict[int, float]:
        """Expected tokens a second by width."""
        expected = self.estimate.expected_tokens(self.widest)
        return {width: expected[width] / self.costs.round(width) for width in self.widths}
