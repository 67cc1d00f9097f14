"""Each round's own drafts, by the drafter's confidence in them."""

from dataclasses import dataclass, field

import numpy as np

from dflash_mlx.decoding.policies import Choice, Forecast, Observation
from dflash_mlx.policy.pauses import Patience, Pauses
from dflash_mlx.policy.width import FADE, RoundCosts
from dflash_mlx.tree_steps import SUREST

# Drafts for which the drafter's confidence is taken at its word at first.
_PRIOR_DRAFTS = 6.0
# How sure a place that was not drafted is taken to be, times the one before it.
_LESS_SURE = 0.9
# How much the worth of drafting a number of places fades in a round: a memory of about 5.
_PLACES_FADE = 0.8


@dataclass
class Confidence:
    """What the drafter's own confidence was worth lately. An answer leaves it to the next one.

    kept, promised: drafts that were kept, and how many its probabilities promised, decayed sums: sampling keeps fewer.
    values: what a round was worth on average if it drafted 0, 1, 2, ... places, in tokens, its time subtracted. tokens:
    what trees of each size promised on average.
    """

    kept: float = _PRIOR_DRAFTS
    promised: float = _PRIOR_DRAFTS
    values: np.ndarray | None = None
    tokens: list[float] = field(default_factory=list)

    @property
    def calibration(self) -> float:
        """What a probability of the drafter's was worth lately: drafts kept by drafts promised."""
        return self.kept / self.promised

    def observe(self, kept: float, promised: float) -> None:
        """Note how many drafts were kept. Where none was promised, nothing is learnt."""
        if not promised:
            return
        self.kept = FADE * self.kept + kept
        self.promised = FADE * self.promised + promised

    def weigh_sizes(self, tokens: list[float]) -> None:
        """Note what trees of each size would have promised in a round."""
        before = self.tokens if len(self.tokens) == len(tokens) else tokens
        self.tokens = [FADE * so_far + (1 - FADE) * now for so_far, now in zip(before, tokens, strict=True)]


class ConfidentWidth:
    """Each round's own drafts: the likeliest ones, as long as they are likely enough to be worth their time.

    The drafter's probability of a token is close to the rate at which the target keeps it, so a path's chance is the
    product of its probabilities, and the chances of all drafts add up to the number that is kept. A round should
    maximize expected tokens - speed * seconds, where speed is the answer's tokens a second so far (the rule that
    maximizes tokens a second in the long run).

    Drafting costs time, too: as many places are drafted as would have been worth most in the last rounds. Where width
    costs little, all places are drafted, and only numbers of drafts are verified that were measured: a GPU may compile
    anew for each.
    """

    # Rounds wait for its choice, which goes by all that came before.
    listens_after = 1

    def __init__(
        self,
        costs: RoundCosts,
        places: int,
        confidence: Confidence | None = None,
        patience: Patience | None = None,
    ) -> None:
        """places: the most that the drafter can draft."""
        self.costs, self.places = costs, places
        self.branches = costs.places > 0
        self.widest = max(costs.round_seconds) if self.branches else places
        self.confidence = confidence or Confidence()
        self.pauses = Pauses(patience)

    def next_round(self, *, may_branch: bool, told: float = 0.0) -> Choice:
        if self.pauses.take_rest(lambda: self.costs.worth(told, self.places)):
            return Choice(0, rests=True)
        # What can be told before it is drafted takes no time to draft.
        places = self.places if told else self._places()
        tree = self.widest if self.branches and may_branch else 0
        return Choice(places, tree=tree, scale=self.confidence.calibration)

    def _places(self) -> int:
        if not self.costs.steep:
            return self.places
        values = self.confidence.values
        if values is None:
            return self.places // 2
        return 1 + int(np.argmax(values[1:]))

    def choose(self, forecast: Forecast) -> int:
        drafted = len(forecast.best)
        # Plain rounds are always to be had.
        speed = max(self.pauses.speed, 1.0 / self.costs.plain)
        gains = np.concatenate([[0.0], np.cumsum(forecast.chances)])
        widths = range(len(gains)) if self.costs.steep else [0, *self.costs.round_seconds]
        values = {
            width: gains[width] - speed * self.costs.round(width, drafted=drafted)
            for width in sorted(widths)
            if width < len(gains)
        }
        if drafted and self.costs.steep:
            self._weigh_places(forecast.best, speed)
        best = max(values, key=lambda width: values[width])
        self.pauses.note_use(best > 0, cost=self.costs.round(0, drafted=drafted) / self.costs.plain - 1)
        return best

    def _weigh_places(self, best: np.ndarray, speed: float) -> None:
        """Note what drafting any number of places would have been worth in this round, with chains.

        Places that were not drafted are taken to be a little less sure, each, than the one before.
        """
        now, costs, places = self.confidence, self.costs, range(self.places + 1)
        sure = np.minimum(best * now.calibration, SUREST)
        further = sure[-1] * _LESS_SURE ** np.arange(1, self.places - len(sure) + 1)
        sure = np.concatenate([sure, further])
        gains = np.concatenate([[0.0], np.cumprod(sure).cumsum()])
        worth = 1.0 + gains - speed * np.array([costs.round(width, drafted=0) for width in places])
        drafting = np.array([costs.round(0, drafted=drafted) for drafted in places]) - costs.plain
        values = np.maximum.accumulate(worth) - speed * drafting
        now.values = values if now.values is None else _PLACES_FADE * now.values + (1 - _PLACES_FADE) * values

    def observe(self, round: Observation) -> None:
        if round.seconds is not None:
            self.costs.observe(round.seconds, round.width, round.drafted)
        self.costs.depth += round.num_accepted + 1
        if round.drafted == 0:
            return
        self.confidence.observe(round.num_accepted - round.with_text, round.promised)
        seconds = self.costs.round(round.width, drafted=round.drafted)
        self.pauses.observe(round.num_accepted + 1, seconds, self.costs.plain)

    def take_notice(self) -> str | None:
        notice, self.pauses.notice = self.pauses.notice, None
        return notice
