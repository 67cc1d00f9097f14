"""What rounds show of the costs that were measured before: how the machine changes, and what was measured wrong."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import median

# Where rounds of one kind follow those of the other, so many of each are compared.
_COMPARED = 8
# Rounds of a kind that are left out, since the first one catches up, and plain ones take longer while the positions of
# trees are out of order (caches/replay.py).
_UNUSUAL = {True: 1, False: 10}
# A round of a width is compared with so many before it.
_BEFORE = 5
# So many comparisons are remembered; what was measured weighs as much as some of kinds, and of widths.
_COMPARISONS, _PRIOR_OF_DRAFTS, _PRIOR_OF_WIDTH = 15, 2.0, 4.0


@dataclass
class Lessons:
    """What rounds have shown of costs that were measured wrong: logarithms of how many times as long they take.

    of_drafts: rounds with drafts, beyond plain ones; of_widths: rounds of a width, beyond others with drafts. What the
    last comparisons found. It outlives an answer.
    """

    of_drafts: list[float] = field(default_factory=list)
    of_widths: dict[int, list[float]] = field(default_factory=dict)


@dataclass
class Drift:
    """How many times as long as measured rounds take now: on a warm machine, beside other programs.

    factor: all of them. of_drafts: rounds with drafts, beyond that; of_widths: rounds of some widths, beyond that. A
    machine can be twice as fast a second later, so rounds are compared with others right before them: of the two kinds
    where one follows the other.
    """

    factor: float = 1.0
    lessons: Lessons = field(default_factory=Lessons)
    of_drafts: float = field(init=False)
    of_widths: dict[int, float] = field(init=False)
    # Of the newest rounds of either kind, what is compared, and how many of these there are since the last change.
    _before: deque[float] = field(default_factory=deque, init=False)
    _since: deque[float] = field(default_factory=deque, init=False)
    _count: int = field(default=0, init=False)
    _drafting: bool | None = field(default=None, init=False)
    # What the newest rounds with drafts took, beyond what is known of their widths.
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=_BEFORE), init=False)

    def __post_init__(self) -> None:
        self.of_drafts = _learnt(self.lessons.of_drafts, _PRIOR_OF_DRAFTS)
        self.of_widths = {width: _learnt(found, _PRIOR_OF_WIDTH) for width, found in self.lessons.of_widths.items()}

    def observe(self, ratio: float) -> None:
        """A round took so many times as long as was expected. A single outlier counts little."""
        self.factor *= min(max(ratio, 0.5), 2.0) ** 0.05

    def compare_kinds(self, ratio: float, *, drafting: bool) -> None:
        """A round of this kind took so many times as long as was measured."""
        if drafting is not self._drafting:
            self._drafting, self._before, self._since = drafting, self._since, deque(maxlen=_COMPARED)
            self._count = -_UNUSUAL[drafting]
        self._count += 1
        if self._count > 0:
            self._since.append(log(ratio))
        if self._count == len(self._before) == _COMPARED:
            longer = median(self._since) - median(self._before)
            found = [*self.lessons.of_drafts[1 - _COMPARISONS :], longer if drafting else -longer]
            self.lessons.of_drafts, self.of_drafts = found, _learnt(found, _PRIOR_OF_DRAFTS)

    def compare_widths(self, ratio: float, width: int) -> None:
        """A round with drafts took so many times as long as was measured, what is known of its width considered.

        width: the one that is nearest to its own of those that were measured.
        """
        if len(self._newest) == _BEFORE:
            longer = log(ratio * self.of_widths.get(width, 1.0)) - median(self._newest)
            found = [*self.lessons.of_widths.get(width, [])[1 - _COMPARISONS :], longer]
            self.lessons.of_widths[width] = found
            self.of_widths[width] = _learnt(found, _PRIOR_OF_WIDTH)
        self._newest.append(log(ratio))


def _learnt(found: Sequence[float], prior: float) -> float:
    """How many times as long as measured, by these comparisons; 1 weighs as much as `prior` of them."""
    # Not the mean: now and then the machine changes just then.
    return exp(median(found) * len(found) / (len(found) + prior)) if found else 1.0
