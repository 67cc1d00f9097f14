"""Trees of drafts or chains: whichever gains more tokens a second on this machine, for this pair and this text.

A tree gains more tokens than a chain, the more so the less the drafter is sure of; but its round takes longer. Trees
are compared with chains while they are used: the drafter's probabilities say what either would gain, and the machine
was measured. While chains are used, nothing is known of trees, so now and then a few rounds go to them.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

import numpy as np

from dflash_mlx.decoding.policies import Choice, Forecast, Observation, WidthPolicy
from dflash_mlx.policy.confidence import Confidence, ConfidentWidth
from dflash_mlx.policy.drift import Drift, Lessons
from dflash_mlx.policy.pauses import Patience, Pauses
from dflash_mlx.policy.width import FADE, AcceptanceEstimate, RoundCosts, SteadyWidth

# More than trees have been seen to gain by a chain's tokens: the demo pair's gain 1.42 times as many on the built-in
# prompts and 1.14 times on its own answers. Where they take so much longer, they are not tried.
MOST_GAIN = 1.6
# A size of trees is left out whose rounds take so many times as long as those of the next smaller one.
_TOO_MUCH = 1.25
# A change to chains must promise this much, and this is a clear lead of trees.
_HYSTERESIS, _CLEARLY = 1.05, 1.1
# Rounds of trees before a change to chains, and of chains before the next look at trees, which comes less and less
# often while it changes nothing.
_LOOK, _FIRST_STAY, _LONGEST_STAY = 4, 64, 2048
# How much a round lets fade what trees and chains kept of what they promised; for so many tokens it is taken to be all.
_SLOW_FADE, _PRIOR_TOKENS = 0.98, 100.0


@dataclass
class PairCosts:
    """What rounds of chains and, where the target takes them and they may pay, of trees cost.

    They drift together: what slows one kind slows the other, and only one is timed at a time. spread: of the rounds
    that were measured, as in `timing.Compared`.
    """

    chains: RoundCosts
    trees: RoundCosts | None = None
    spread: float = 0.0

    def __post_init__(self) -> None:
        self.follow(self.chains.drift)

    def follow(self, drift: Drift) -> None:
        """Let this be the drift of all rounds."""
        self.chains.follow(drift)
        if self.trees is not None:
            self.trees.follow(drift)

    def after(self, tokens: int) -> "PairCosts":
        """A copy for an answer that begins after so many tokens, which it may change."""
        costs = copy.deepcopy(self)
        for kind in (costs.chains, costs.trees):
            if kind is not None:
                kind.depth = tokens
        return costs

    @property
    def too_high(self) -> bool:
        """Whether rounds of an answer took clearly less than was measured."""
        return self.chains.too_high


@dataclass
class Comparison:
    """Rounds of trees compared with chains of the same drafts, in decayed sums.

    seconds: of trees; chain_seconds: what chains would need for the same tokens, by their width, as promised by the
    drafter's probabilities. Not what chains would gain in as many rounds as trees: where the drafter is unsure
    chains stop more often, and so would make more of their rounds there.

    gained, promised: tokens of trees by their outcome, and what was promised of them; chain_gained, chain_promised:
    likewise of a chain as long as the tree is deep. A drafter may promise more than it keeps of one kind.
    """

    seconds: float = 0.0
    chain_seconds: dict[int, float] = field(default_factory=dict)
    gained: float = _PRIOR_TOKENS
    promised: float = _PRIOR_TOKENS
    chain_gained: float = _PRIOR_TOKENS
    chain_promised: float = _PRIOR_TOKENS

    def add(self, round: Observation, calibration: float, seconds: float, chains: Mapping[int, float]) -> None:
        """A round of trees, which takes so many `seconds`; chains: those of rounds of chains, by their width."""
        # Numbers, not arrays: these are few, and on a fast GPU rounds wait for this.
        forecast = round.forecast
        assert forecast is not None
        tokens = forecast.tokens[min(round.width, len(forecast.chances))]
        survivals = accumulate([min(chance * calibration, 1.0) for chance in forecast.best.tolist()], mul)
        chain = list(accumulate(survivals, initial=1.0))
        self.seconds = FADE * self.seconds + seconds
        for width, took in chains.items():
            rounds = tokens / chain[min(width, len(chain) - 1)]
            self.chain_seconds[width] = FADE * self.chain_seconds.get(width, 0.0) + rounds * took
        self.gained = _SLOW_FADE * self.gained + round.num_accepted + 1
        self.promised = _SLOW_FADE * self.promised + tokens
        self.chain_gained = _SLOW_FADE * self.chain_gained + round.firsts + 1
        self.chain_promised = _SLOW_FADE * self.chain_promised + chain[min(round.depth, len(chain) - 1)]

    @property
    def lead(self) -> float:
        """How many times as fast trees are as chains of the best width."""
        kept, kept_of_chains = self.gained / self.promised, self.chain_gained / self.chain_promised
        return min(self.chain_seconds.values()) / self.seconds * kept / kept_of_chains


@dataclass
class Experience:
    """What answers teach the next one: which drafts are kept, and which kind of drafts is used.

    chains: not trees; stayed: rounds drafted with chains since the last look at trees; stay: how many to the next one.
    lead: how many times as fast as chains trees were when last compared, None before. costs: by which an answer chose,
    and what they became; lessons: about these costs.
    """

    estimate: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    confidence: Confidence = field(default_factory=Confidence)
    patience: Patience = field(default_factory=Patience)
    patience_with_trees: Patience = field(default_factory=Patience)
    comparison: Comparison = field(default_factory=Comparison)
    chains: bool = False
    stayed: int = 0
    stay: int = _FIRST_STAY
    lead: float | None = None
    costs: PairCosts | None = None
    lessons: Lessons = field(default_factory=Lessons)

    @classmethod
    def of_failure(cls) -> "Experience":
        """As after answers of which no draft was kept."""
        return cls(patience=Patience.worn_out(), patience_with_trees=Patience.worn_out())

    def merged(self, newest: "Experience") -> "Experience":
        """This and what a finished answer has learnt since, which counts as much as everything before.

        Costs are the pair's, and given to each answer anew.
        """
        return replace(newest, estimate=self.estimate.merged(newest.estimate), costs=None)


def choose_policy(
    costs: PairCosts, places: int, experience: Experience | None = None, *, by_confidence: bool = False
) -> WidthPolicy:
    """The policy for a machine with these costs and a drafter that drafts at most `places` places.

    by_confidence: chains go by the drafter's confidence even where width costs little, since it costs no wait.
    """
    experience = experience or Experience()
    experience.costs = costs
    costs.follow(Drift(lessons=experience.lessons))
    if costs.trees is None:
        if costs.chains.steep or by_confidence:
            return ConfidentWidth(costs.chains, places, experience.confidence, experience.patience)
        return SteadyWidth(costs.chains, places, experience.estimate, experience.patience)
    if costs.chains.steep:
        return ConfidentWidth(costs.trees, places, experience.confidence, experience.patience)
    return TreesOrChains(costs.chains, costs.trees, places, experience)


class SteadyTree:
    """Trees of the one size with the most expected tokens a second, by what the drafter held likely in the last rounds.

    Only sizes that were measured: a GPU may compile anew for each. The host never waits for a draft.
    """

    branches = True

    def __init__(
        self, costs: RoundCosts, places: int, confidence: Confidence, patience: Patience | None = None
    ) -> None:
        self.costs, self.places, self.confidence = costs, places, confidence
        self.sizes = sorted(size for size in costs.round_seconds if size)
        # Twice as many drafts never gain so many more tokens, and to find them takes time in each round.
        while len(self.sizes) > 1 and costs.round(self.sizes[-1]) > _TOO_MUCH * costs.round(self.sizes[-2]):
            self.sizes.pop()
        # Ratios matter, and drift is common to all.
        self.seconds = {size: costs.round(size) for size in self.sizes}
        # The one nearest to a chain's, until something is known.
        self.size = min(self.sizes, key=lambda size: abs(size - places))
        self.pauses = Pauses(patience)
        self._settle()

    @property
    def listens_after(self) -> int:
        return self.pauses.listens_after

    def next_round(self, *, may_branch: bool, told: float = 0.0) -> Choice:
        if self.pauses.take_rest(lambda: self.costs.worth(told, self.size)):
            return Choice(0, rests=True)
        return self._choice

    def choose(self, forecast: Forecast) -> int:
        return self.size

    def observe(self, round: Observation) -> None:
        if round.seconds is not None:
            self.costs.observe(round.seconds, round.width, round.drafted)
        if round.drafted == 0:
            return
        self.confidence.observe(round.num_accepted, round.promised)
        self.pauses.observe(round.num_accepted + 1, self.costs.round(round.width), self.costs.plain)
        if round.branched and round.forecast is not None:
            tokens = round.forecast.tokens
            self.confidence.weigh_sizes([tokens[min(size, len(tokens) - 1)] for size in self.sizes])
            self._settle()

    def seconds_of(self, width: int) -> float:
        """What a round takes, drift left out. At an answer's end a tree may have fewer drafts than was chosen."""
        found = self.seconds.get(width)
        return found if found is not None else float(np.interp(width, self.sizes, list(self.seconds.values())))

    def _settle(self) -> None:
        """Choose the size that promises most."""
        tokens = self.confidence.tokens
        if len(tokens) == len(self.sizes):
            speeds = {size: kept / self.seconds[size] for size, kept in zip(self.sizes, tokens, strict=True)}
            self.size = max(speeds, key=speeds.__getitem__)
        # In hundredths, so that few scales come up: a GPU is handed each but once.
        scale = max(round(self.confidence.calibration, 2), 0.01)
        self._choice = Choice(self.places, tree=self.sizes[-1], scale=scale, width=self.size)

    def take_notice(self) -> str | None:
        notice, self.pauses.notice = self.pauses.notice, None
        return notice


class TreesOrChains:
    """Rounds of trees by `SteadyTree` or of chains by `SteadyWidth`."""

    branches = True

    def __init__(self, chains: RoundCosts, trees: RoundCosts, places: int, experience: Experience) -> None:
        self.chains = SteadyWidth(chains, places, experience.estimate, experience.patience)
        self.trees = SteadyTree(trees, places, experience.confidence, experience.patience_with_trees)
        self.experience = experience
        # Rounds of trees since the last change, or the beginning.
        self._looked = 0
        # Whether this answer's rounds can be trees.
        self._may_branch = True
        self._seconds_of_chains = {width: chains.round(width) for width in self.chains.widths}

    @property
    def _used(self) -> SteadyTree | SteadyWidth:
        return self.trees if self._may_branch and not self.experience.chains else self.chains

    @property
    def listens_after(self) -> int:
        used, lead = self._used, self.experience.lead
        # While trees and chains are about equal, each forecast counts.
        compares = used is self.trees and used.pauses.resting == 0 and (lead is None or lead < _CLEARLY)
        return 1 if compares else used.listens_after

    def next_round(self, *, may_branch: bool, told: float = 0.0) -> Choice:
        self._may_branch = may_branch
        return self._used.next_round(may_branch=may_branch, told=told)

    def choose(self, forecast: Forecast) -> int:
        raise AssertionError("neither trees nor chains wait here")

    def observe(self, round: Observation) -> None:
        now = self.experience
        # A plain round, at an answer's ends or in a pause, tells something of the kind that is used.
        policy = (self.trees if round.tree else self.chains) if round.drafted else self._used
        if round.branched and round.forecast is not None:
            calibration, seconds = self.trees.confidence.calibration, self.trees.seconds_of(round.width)
            now.comparison.add(round, calibration, seconds, self._seconds_of_chains)
            self._looked += 1
        policy.observe(round)
        if round.drafted == 0:
            return
        if now.chains:
            now.stayed += 1
            # Where chains do not pay, trees still may.
            paused = self.chains.pauses.resting > 0 and (now.lead is None or now.lead > 1)
            if now.stayed >= now.stay or paused:
                now.chains, now.stayed, now.stay = False, 0, min(2 * now.stay, _LONGEST_STAY)
                self._looked = 0
                now.patience.warn(now.patience_with_trees)
        elif self._looked >= _LOOK or (self._looked and self.trees.pauses.resting > 0):
            now.lead = now.comparison.lead
            if now.lead < 1 / _HYSTERESIS:
                now.chains = True
                now.patience_with_trees.warn(now.patience)
            else:
                now.stay = _FIRST_STAY

    def take_notice(self) -> str | None:
        """A pause of either kind matters only while that kind is used."""
        of_trees, of_chains = self.trees.take_notice(), self.chains.take_notice()
        return of_trees if self._used is self.trees else of_chains
