"""A round that was launched, and what is settled of the next one before it is read."""

from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.policies import Choice
from dflash_mlx.decoding.steps import Chances, Drafts, Verdict


@dataclass
class Round:
    """A launched round: the lanes of its rows, the positions `at` (B,) of their anchors, the verdict on its drafts.

    drafted: places that were drafted for it. room: no row has more positions after it, rejected drafts included.
    chances: of the drafts, where they are known. absorbed: the drafter has its features.
    """

    lanes: list[Lane | None]
    at: mx.array
    verdict: Verdict
    width: int
    drafted: int
    room: int
    chances: Chances | None = None
    absorbed: bool = False

    @property
    def fed(self) -> int:
        return self.width + 1

    @property
    def arrays(self) -> list[mx.array]:
        """What the host will read."""
        return [*self.verdict.arrays, *([self.chances.said] if self.chances is not None else [])]


@dataclass
class Plan:
    """What is settled of the next round before the last one is read: the choice, its drafts, or all, `launched`.

    With neither of the last two it is a plain round that has to wait.
    """

    choice: Choice
    drafts: Drafts | None = None
    launched: Round | None = None
