"""A round that was launched, and what is settled of the next one before it is read."""

from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.steps import Drafts, Verdict


@dataclass
class Round:
    """A launched round: the lanes of its rows, the positions `at` (B,) of their anchors, the verdict on its drafts.

    drafted: places that were drafted for it. room: no row has more positions after it, rejected drafts included.
    absorbed: the drafter has its features.
    """

    lanes: list[Lane | None]
    at: mx.array
    verdict: Verdict
    width: int
    drafted: int
    room: int
    is_tree: bool
    absorbed: bool = False

    @property
    def fed(self) -> int:
        return self.width + 1


@dataclass
class Plan:
    """What is settled of the next round before the last one is read: its drafts, or all of it, `launched`.

    With neither it is a plain round that has to wait.
    """

    drafts: Drafts | None = None
    launched: Round | None = None
