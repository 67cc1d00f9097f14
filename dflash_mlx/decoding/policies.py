"""What the decode loop asks of a policy: how many drafts to verify, and which. Policies are in `dflash_mlx.policy`."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np

from dflash_mlx.decoding.session import common_prefix
from dflash_mlx.tree_steps import SUREST


@dataclass(frozen=True)
class Choice:
    """What to draft for a round, and how many drafts to verify.

    places: to draft; 0: a plain round. tree: the drafts are a tree of at most so many, found by the drafter's
    probabilities times `scale`; 0: a chain. width: how many to verify; None: `choose` says it, by the forecast, for
    which the round has to wait. rests: after a plain round, many more follow.
    """

    places: int
    tree: int = 0
    scale: float = 1.0
    width: int | None = None
    rests: bool = False

    @property
    def waits(self) -> bool:
        return self.places > 0 and self.width is None


@dataclass(frozen=True)
class Forecast:
    """What a drafter's probabilities say of its drafts.

    best: (W,), of the likeliest token at each place, `firsts` (W,), known of trees. chances: (N,), of drafts that are
    kept, after a choice's `scale`: of a chain's in order, or of a tree's likeliest in falling order. text: tokens that
    the text said, too, where it was asked, and `chances` go by both.
    """

    best: np.ndarray
    chances: np.ndarray
    firsts: list[int] | None = None
    text: list[int] | None = None

    @classmethod
    def of_chain(cls, best: np.ndarray, scale: float) -> "Forecast":
        return cls(best, np.cumprod(np.minimum(best * scale, SUREST)))

    @cached_property
    def tokens(self) -> list[float]:
        """What rounds of the first 0, 1, 2, ... N of these drafts are expected to gain, with the target's own token."""
        return list(accumulate(self.chances.tolist(), initial=1.0))

    def promised(self, reached: int) -> float:
        """How many drafts of a chain would be kept, given that so many of its places were reached."""
        return float(self.best[:reached].sum())

    def kept_of_firsts(self, tokens: Sequence[int]) -> int:
        """How many drafts of a chain a text of these `tokens` would have kept, 0 where that is not known."""
        return common_prefix(self.firsts or [], tokens)

    def kept_with_text(self, tokens: Sequence[int], num_accepted: int) -> int:
        """How many of so many drafts kept, of a text of these `tokens`, came where the text was asked, too."""
        return min(common_prefix(self.text, tokens) + 1, num_accepted) if self.text else 0


@dataclass(frozen=True)
class Observation:
    """What a round brought: of `width` drafts, made for `drafted` places, `num_accepted` were kept.

    tree: they were one, up to `depth` places deep. forecast: None where it was not read; else `branched` says whether
    the tree had several tokens a place, and a chain as long as it is deep would have kept `firsts`. promised: by the
    drafter's probabilities, how many drafts would be kept, given which were: at each place that was reached, the chance
    to go on. seconds: None where it could not be timed. with_text: so many of the kept came where the text was asked,
    too, which `promised` leaves out.
    """

    drafted: int
    width: int
    num_accepted: int
    tree: bool = False
    branched: bool = False
    depth: int = 0
    firsts: int = 0
    forecast: Forecast | None = None
    promised: float = 0.0
    seconds: float | None = None
    with_text: int = 0


class WidthPolicy(Protocol):
    """The policy of one answer. It learns from that answer alone."""

    @property
    def branches(self) -> bool:
        """Whether rounds may be trees. Stays the same for a whole answer."""

    @property
    def listens_after(self) -> int:
        """How many rounds it may be told of together, later: on a fast GPU, rounds wait for what the host does after
        each. Of trees, one in so many has a forecast. 1: of each at once; 0: of none, as long as it is 0."""

    def next_round(self, *, may_branch: bool, told: float = 0.0) -> Choice:
        """The next round; called before the outcome of the current one is known. may_branch: it can be a tree.

        told: how many drafts are likely to be kept, where that can be told before they are made, which takes no time
        then; else 0. A choice to draft may be asked for twice, which changes nothing.
        """

    def choose(self, forecast: Forecast) -> int:
        """How many drafts to verify. Called for rounds that wait for it."""

    def observe(self, round: Observation) -> None:
        """What a round brought."""

    def take_notice(self) -> str | None:
        """Something the user should be told, once."""


@dataclass(frozen=True)
class RoundReport:
    """What a round brought: `width` drafts verified in each of `rows` rows, of `drafted` places.

    kept: of each lane that is still there, the lane and the drafts kept. seconds: of the device's time, None where it
    could not be told from other work.
    """

    rows: int
    drafted: int
    width: int
    kept: Sequence[tuple[Hashable, int]]
    seconds: float | None


class GroupPolicy(Protocol):
    """The policy of several lanes that share their rounds: chains of one width."""

    def next_round(self, lanes: int) -> Choice:
        """The next round, of chains; called before the outcome of the current one is known."""

    def choose(self, best: np.ndarray, *, rows: int) -> int:
        """How many drafts of each lane to verify, by the chances (lanes, W) of all lanes' drafts at each place.

        As many `rows` are computed.
        """

    def observe(self, report: RoundReport) -> None:
        """What a round brought."""
