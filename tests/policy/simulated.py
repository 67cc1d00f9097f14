"""Rounds without models: what a policy chooses of drafts whose probabilities are known, what it is told of them, and
how long they take on a computer that others use, too."""

import random
from collections.abc import Callable, Sequence
from itertools import islice, takewhile

import numpy as np
from best_first import HostTree, best_first

from dflash_mlx.decoding.policies import Choice, Forecast, Observation, WidthPolicy


def drafts_of(policy: WidthPolicy, choice: Choice, probabilities: np.ndarray) -> tuple[HostTree, Forecast | None]:
    """The drafts that are verified, and the forecast where there is one, by candidates (W, K), the best first.

    A candidate's number at its place stands for its token. A chain is a tree, too.
    """
    with np.errstate(divide="ignore"):
        log_probs = np.log(probabilities[: choice.places].astype(np.float64))
    best = np.exp(log_probs[:, 0])
    if not choice.tree:
        log_probs = log_probs[:, :1]
    nodes = list(islice(best_first(log_probs, scale=choice.scale), choice.tree or choice.places))
    forecast = None
    if choice.tree:
        forecast = Forecast(best, np.array([node.chance for node in nodes]))
    elif choice.waits:
        forecast = Forecast.of_chain(best, choice.scale)
    width = choice.width
    if width is None:
        assert forecast is not None
        width = policy.choose(forecast)
    token_ids = np.tile(np.arange(log_probs.shape[1]), (choice.places, 1))
    return HostTree.of(nodes[:width], token_ids, log_probs), forecast


def observed(
    choice: Choice, tree: HostTree, forecast: Forecast | None, path: Sequence[int], seconds: float | None
) -> Observation:
    """What the policy is told of a round that went through these rows of its drafts."""
    promised = tree.promised(path) if forecast is not None else 0.0
    # The first of a place's candidates is always among a row's children.
    firsts = len(list(takewhile(lambda row: tree.tokens[row - 1] == 0, path[1:])))
    return Observation(
        choice.places,
        tree.size,
        len(path) - 1,
        tree=choice.tree > 0,
        branched=choice.tree > 0,
        depth=max(tree.depths),
        firsts=firsts,
        forecast=forecast,
        promised=promised,
        seconds=seconds,
    )


def plain(seconds: float | None) -> Observation:
    """A round without drafts."""
    return Observation(0, 0, 0, seconds=seconds)


class SharedComputer:
    """What takes so many milliseconds at best, where others use the computer, too, as was measured beside an H100.

    For a fraction of a second at a time it is so many times slower, since somebody else's work shares its processors.
    noise: a factor for each time.
    """

    SLOWER, QUICK_MS, SLOW_MS = 1.7, 250.0, 450.0

    def __init__(self, rng: random.Random, *, noise: Callable[[], float]) -> None:
        self.rng, self.noise, self.slow, self.left = rng, noise, False, 0.0

    def __call__(self, ms: float) -> float:
        took = ms * (self.SLOWER if self.slow else 1.0) * self.noise()
        self.left -= took
        if self.left < 0:
            self.slow = not self.slow
            self.left = self.rng.expovariate(1 / (self.SLOW_MS if self.slow else self.QUICK_MS))
        return took
