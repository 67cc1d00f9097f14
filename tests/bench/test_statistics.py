"""Intervals against distributions whose median is known."""

import numpy as np
import pytest

from dflash_mlx.bench.statistics import FEWEST, Interval, median_interval, middle, quantile, ratio_interval


@pytest.mark.parametrize("prompts", [12, 30])
def test_intervals_hold_the_median_about_95_times_in_100(prompts: int) -> None:
    """Ratios of a log-normal distribution with the median 1.6, as speedups are spread."""
    chance = np.random.default_rng(3)
    trials = 300
    hits = 0
    for trial in range(trials):
        drawn = 1.6 * np.exp(0.3 * chance.standard_normal(prompts))
        interval = ratio_interval([([1.0], [float(value)]) for value in drawn], seed=trial, resamples=400)
        assert interval is not None
        hits += interval.holds(1.6)
    # With 300 trials the share has a standard error of 1.3 %; an interval of order statistics is a little too wide.
    assert 0.92 <= hits / trials <= 0.985


def test_repeats_that_differ_make_the_interval_wider() -> None:
    calm = [([1.0] * 5, [1.5] * 5) for _ in range(8)]
    noisy = [([0.6, 0.8, 1.0, 1.2, 1.4], [1.5] * 5) for _ in range(8)]
    narrow, wide = ratio_interval(calm), ratio_interval(noisy)
    assert narrow == Interval(1.5, 1.5)
    assert wide is not None
    assert wide.high - wide.low > 0.2
    assert wide.holds(1.5)


def test_too_few_prompts_have_no_interval() -> None:
    assert ratio_interval([([1.0], [2.0])] * (FEWEST - 1)) is None
    assert median_interval([[2.0]] * (FEWEST - 1)) is None
    assert median_interval([[2.0]] * FEWEST) == Interval(2.0, 2.0)


def test_the_same_data_give_the_same_interval() -> None:
    groups = [[float(n), float(n + 2)] for n in range(10)]
    assert median_interval(groups) == median_interval(groups)


def test_medians_and_quantiles_of_what_is_known() -> None:
    assert middle([None, 3.0, 1.0, None, 2.0]) == 2.0
    assert middle([None]) is None
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.25) == 2.0
    assert quantile([], 0.5) is None
