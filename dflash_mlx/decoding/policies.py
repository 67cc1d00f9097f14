"""What the decode loop asks of a policy: how many drafts to verify, and which. Policies are in `dflash_mlx.policy`."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dflash_mlx.decoding.tree import Candidates, DraftTree


class WidthPolicy(Protocol):
    """The policy of one answer. It learns from that answer alone."""

    @property
    def reads_confidence(self) -> bool:
        """Whether `choose` wants to see the drafter's candidates for the next round."""

    @property
    def branches(self) -> bool:
        """Whether what it chooses may be trees. Stays the same for a whole answer."""

    def next_width(self) -> int:
        """Places to draft for the next round; called before the outcome of the current one is known."""

    def choose(self, candidates: Candidates) -> DraftTree:
        """What to verify; a chain when there is one candidate a place. Called for rounds that `reads_confidence`."""

    def observe(
        self, *, drafted: int, width: int, num_accepted: int, path: Sequence[int], seconds: float | None
    ) -> None:
        """What a round brought: `width` drafts verified, of `drafted` places; its rows gone through.

        `seconds` is None where it could not be timed.
        """

    def take_notice(self) -> str | None:
        """Something the user should be told, once."""


@dataclass(frozen=True)
class RoundReport:
    """What a round brought: `width` drafts verified in each of `rows` rows, of `drafted` places.

    kept: of each lane that is still there, the lane, the drafts kept and the rows gone through. seconds: of the
    device's time, None where it could not be told from other work.
    """

    rows: int
    drafted: int
    width: int
    kept: Sequence[tuple[Hashable, int, Sequence[int]]]
    seconds: float | None


class GroupPolicy(Protocol):
    """The policy of several lanes that share their rounds: chains of one width."""

    @property
    def reads_confidence(self) -> bool:
        """Whether `choose` wants to see the drafter's candidates for the next round."""

    def next_width(self, lanes: int) -> int:
        """Places to draft for the next round; called before the outcome of the current one is known."""

    def choose(self, candidates: Sequence[Candidates], *, rows: int) -> int:
        """How many drafts of each lane to verify, by the candidates of all; as many `rows` are computed."""

    def observe(self, report: RoundReport) -> None:
        """What a round brought."""
