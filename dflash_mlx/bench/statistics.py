"""Medians, and how sure they are: bootstrap intervals. Pure functions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

RESAMPLES = 2000
# With fewer, the range of a median that is right 95 times in 100 is wider than all values that were seen.
FEWEST = 6


@dataclass(frozen=True)
class Interval:
    """The range in which the figure lies with a confidence of 95 %."""

    low: float
    high: float

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def middle(values: Iterable[float | None]) -> float | None:
    """The median of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of the values lie."""
    return float(np.quantile(values, share)) if len(values) else None


def median_interval(groups: Sequence[Sequence[float]], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval | None:
    """How sure the median of the groups' medians is: a group is a prompt, its values are the repeats.

    Percentiles of resampled medians: prompts are drawn with replacement and, within each, its repeats (Efron and
    Tibshirani, An Introduction to the Bootstrap, chapter 13). None for too few prompts.
    """
    if len(groups) < FEWEST:
        return None
    chance = np.random.default_rng(seed)
    columns = [_resampled(np.asarray(group, dtype=float), chance, resamples) for group in groups]
    return _interval(np.stack(columns, axis=1), chance)


def ratio_interval(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval | None:
    """The same for the median of the prompts' ratios: of each pair, the median of the second over that of the first."""
    if len(pairs) < FEWEST:
        return None
    chance = np.random.default_rng(seed)
    columns = [
        _resampled(np.asarray(above, dtype=float), chance, resamples)
        / _resampled(np.asarray(below, dtype=float), chance, resamples)
        for below, above in pairs
    ]
    return _interval(np.stack(columns, axis=1), chance)


def _resampled(values: "np.ndarray", chance: np.random.Generator, resamples: int) -> "np.ndarray":
    """Medians (resamples,) of as many values drawn with replacement."""
    if len(values) == 1:
        return np.full(resamples, values[0])
    return np.median(values[chance.integers(0, len(values), (resamples, len(values)))], axis=1)


def _interval(table: "np.ndarray", chance: np.random.Generator) -> Interval:
    """From (resamples, prompts)."""
    rows = np.arange(len(table))[:, None]
    drawn = chance.integers(0, table.shape[1], table.shape)
    medians = np.median(table[rows, drawn], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return Interval(float(low), float(high))
