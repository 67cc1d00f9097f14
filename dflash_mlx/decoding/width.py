"""How many drafts to verify in a round.

A wider round gains more tokens and costs more time; how much of either depends on the machine, the pair and the text.
So the cost of a round is measured on the user's machine, acceptance is estimated from the rounds so far, and the width
is the one with the most expected tokens a second. Width 0 is plain decoding: where drafting does not pay it pauses, and
is tried again later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

# How much one more round lets the past fade: a memory of about 25 rounds.
_FADE = 0.96
# Weight, in observations, of the assumption that a position is kept as often as the one before it.
_PRIOR_WEIGHT = 2.0
_PRIOR_RATE = 0.75
# A change of width must promise this much, so that noise does not make it flutter.
_HYSTERESIS = 1.03
_ROUNDS_BEFORE_PAUSE = 6
_FIRST_PAUSE, _LONGEST_PAUSE = 24, 384


class WidthPolicy(Protocol):
    def next_width(self) -> int:
        """Width of the next round; called once a round, before the outcome of the current one is known."""

    def observe(self, width: int, num_accepted: int, seconds: float | None) -> None:
        """What a round of `width` brought and took; `seconds` is None where it could not be timed."""

    def take_notice(self) -> str | None:
        """Something the user should be told, once."""


@dataclass
class FixedWidth:
    """Always the same width."""

    width: int

    def next_width(self) -> int:
        return self.width

    def observe(self, width: int, num_accepted: int, seconds: float | None) -> None:
        pass

    def take_notice(self) -> str | None:
        return None


@dataclass
class AcceptanceEstimate:
    """How likely each draft position is kept, given that all before it were; the recent past counts most."""

    tried: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)

    def observe(self, width: int, num_accepted: int) -> None:
        self.fade(_FADE)
        reached = min(num_accepted + 1, width)
        for counts in (self.tried, self.kept):
            counts.extend([0.0] * (reached - len(counts)))
        for i in range(reached):
            self.tried[i] += 1.0
        for i in range(num_accepted):
            self.kept[i] += 1.0

    def fade(self, factor: float) -> None:
        self.tried = [count * factor for count in self.tried]
        self.kept = [count * factor for count in self.kept]

    def rates(self, width: int) -> list[float]:
        """Conditional rates of positions 1 to `width`. A position rarely reached is taken to be like the one before."""
        rates, rate = [], _PRIOR_RATE
        for i in range(width):
            tried, kept = (self.tried[i], self.kept[i]) if i < len(self.tried) else (0.0, 0.0)
            rate = (kept + _PRIOR_WEIGHT * rate) / (tried + _PRIOR_WEIGHT)
            rates.append(rate)
        return rates

    def expected_tokens(self, width: int) -> float:
        """Tokens a round of `width` gains on average."""
        total, survival = 1.0, 1.0
        for rate in self.rates(width):
            survival *= rate
            total += survival
        return total


@dataclass
class RoundCosts:
    """Seconds a round takes by width: measured at some widths, interpolated between, and kept up to date."""

    measured: dict[int, float]
    _drift: dict[int, float] = field(default_factory=dict)
    _overall: float = 1.0

    def seconds(self, width: int) -> float:
        return self._table(width) * self._drift.get(width, self._overall)

    def observe(self, width: int, seconds: float) -> None:
        """Follow slow changes (a warm machine, a longer context); single outliers count little."""
        ratio = min(max(seconds / self._table(width), 0.25), 4.0)
        self._drift[width] = 0.8 * self._drift.get(width, self._overall) + 0.2 * ratio
        self._overall = 0.95 * self._overall + 0.05 * ratio

    def _table(self, width: int) -> float:
        if width in self.measured:
            return self.measured[width]
        known = sorted(self.measured)
        below = max((w for w in known if w < width), default=known[0])
        above = min((w for w in known if w > width), default=known[-1])
        low, high = self.measured[below], self.measured[above]
        return low if below == above else low + (high - low) * (width - below) / (above - below)


class AdaptiveWidth:
    """The width with the most expected tokens a second; pauses where that is 0."""

    def __init__(self, costs: Mapping[int, float], max_width: int, estimate: AcceptanceEstimate | None = None) -> None:
        self.costs = RoundCosts(dict(costs))
        self.max_width = max_width
        self.estimate = estimate if estimate is not None else AcceptanceEstimate()
        # What an earlier answer taught is a hint about this one, not knowledge.
        self.estimate.fade(0.2)
        self.width = self._best_width(allow_pause=False)
        self._rounds = 0
        self._resting = 0
        self._pause = _FIRST_PAUSE
        self._notice: str | None = None

    def next_width(self) -> int:
        if self._resting > 0:
            self._resting -= 1
            return 0
        return self.width

    def observe(self, width: int, num_accepted: int, seconds: float | None) -> None:
        if seconds is not None:
            self.costs.observe(width, seconds)
        if width == 0:
            return
        self.estimate.observe(width, num_accepted)
        self._rounds += 1
        best = self._best_width(allow_pause=self._rounds >= _ROUNDS_BEFORE_PAUSE)
        if best == 0:
            self._rest()
        elif self._speed(best) > self._speed(self.width) * _HYSTERESIS:
            self.width = best
        elif self._rounds >= 2 * _ROUNDS_BEFORE_PAUSE:
            self._pause = _FIRST_PAUSE

    def take_notice(self) -> str | None:
        notice, self._notice = self._notice, None
        return notice

    def _speed(self, width: int) -> float:
        return self.estimate.expected_tokens(width) / self.costs.seconds(width)

    def _best_width(self, *, allow_pause: bool) -> int:
        return max(range(0 if allow_pause else 1, self.max_width + 1), key=self._speed)

    def _rest(self) -> None:
        gain = self.estimate.expected_tokens(self.width)
        self._notice = (
            f"drafting paused for {self._pause} tokens: {gain:.1f} tokens a round do not pay for a round that costs "
            f"{self.costs.seconds(self.width) / self.costs.seconds(0):.1f} plain steps"
        )
        self._resting = self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        # The next try judges by what it sees then.
        self.estimate.fade(0.3)
        self._rounds = _ROUNDS_BEFORE_PAUSE // 2
        self.width = self._best_width(allow_pause=False)
