"""Who decides what a batch's rounds draft and verify: the policy of its only lane, or the one of several lanes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.decoding.accept import Reading
from dflash_mlx.decoding.batch import Batch
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.policies import Choice, GroupPolicy, Observation, RoundReport
from dflash_mlx.decoding.round import Round
from dflash_mlx.decoding.steps import Chances, Drafts
from dflash_mlx.drafters.contract import Drafter, Outlook
from dflash_mlx.runtime import backend
from dflash_mlx.targets.target import Target


class _Untold(NamedTuple):
    """What a lane's round brought, for its policy. The round's arrays are left out: they need not stay until then.

    tree: the drafts were one. chances: theirs, if the host has read them.
    """

    lane: Lane
    drafted: int
    width: int
    tree: bool
    reading: Reading
    num_accepted: int
    seconds: float | None
    chances: Chances | None

    @classmethod
    def of(cls, round: Round, lane: Lane, reading: Reading, num_accepted: int, seconds: float | None) -> "_Untold":
        chances = round.chances
        tree = chances is not None and chances.likeliest is not None
        if chances is not None and reading.further is not None:
            chances.known = reading.further
        known = chances if chances is not None and chances.known is not None else None
        return cls(lane, round.drafted, round.width, tree, reading, num_accepted, seconds, known)

    def observation(self) -> Observation:
        reading, num_accepted, chances = self.reading, self.num_accepted, self.chances
        forecast = chances.forecast() if chances is not None else None
        promised = reading.promised
        if promised is None:
            promised = forecast.promised(min(num_accepted + 1, self.width)) if forecast is not None else 0.0
        return Observation(
            self.drafted,
            self.width,
            num_accepted,
            tree=self.tree,
            branched=chances is not None and chances.branched,
            depth=reading.depth,
            firsts=forecast.kept_of_firsts(reading.tokens) if forecast is not None else 0,
            forecast=forecast,
            promised=promised,
            seconds=self.seconds,
            with_text=forecast.kept_with_text(reading.tokens, num_accepted) if forecast is not None else 0,
        )


@dataclass
class Choosing:
    """What the rounds of a batch draft and verify. group: decides while there are several rows."""

    target: Target
    batch: Batch
    group: GroupPolicy | None
    # Of the lone lane: rounds that its policy has not been told of yet.
    _untold: list[_Untold] = field(default_factory=list, init=False)
    # Of its rounds of trees, those since the last one whose chances are read.
    _unread: int = field(default=0, init=False)

    @property
    def lone(self) -> Lane | None:
        """The lane, if there is one row only."""
        return self.batch.rows[0] if len(self.batch.rows) == 1 else None

    @property
    def outlook(self) -> Outlook:
        """What drafting for the next round takes. Looks into the text of each answer."""
        state = self.batch.state
        return Outlook.NOTHING if state is None else state.outlook(self.batch.lanes)

    def next_round(self, outlook: Outlook, most: int) -> Choice:
        """What to draft, of at most so many places, with this `outlook`."""
        if most <= 0 or outlook is Outlook.NOTHING:
            return Choice(0)
        if (lone := self.lone) is not None:
            assert self.batch.state is not None
            told = self.batch.state.told(lone)
            choice = lone.policy.next_round(may_branch=self.may_branch(lone), told=told)
        else:
            choice = self._shared.next_round(len(self.batch.rows))
        return choice if choice.places <= most else replace(choice, places=self._fitting(choice.places, most))

    def of_drafts(self, choice: Choice, drafts: Drafts) -> tuple[Drafts, int]:
        """How many of a choice's drafts to verify; a lone lane's tree may have drafts of its text then, too.

        Waits for the drafts where the policy decides by their chances.
        """
        batch, width, chances = self.batch, choice.width, drafts.chances
        room = self._fitting(drafts.width, max(lane.remaining for lane in batch.lanes) - 1)
        if room <= 0:
            # All lanes are about to end.
            return drafts, 0
        if width is None:
            assert chances is not None
            if self.lone is not None:
                assert batch.state is not None
                text = batch.state.continuation(self.lone, drafts.width)
                chances = chances.joined(text) if text is not None else chances
                drafts = replace(drafts, chances=chances)
                width = self.lone.policy.choose(chances.forecast(room))
            else:
                rows = [row for row, lane in enumerate(batch.rows) if lane is not None]
                width = self._shared.choose(chances.read()[rows, :room], rows=len(batch.rows))
        return drafts, width if choice.tree else min(width, room)

    def observe(self, round: Round, kept: Sequence[tuple[Lane, Reading, int]], seconds: float | None) -> None:
        """Note what a round brought: of each lane that is still there, what it read and the drafts kept.

        seconds: what it took, None where that is not known. A lone lane's policy is told when it listens.
        """
        if len(round.lanes) > 1:
            self.tell()
            counts = [(lane, num_accepted) for lane, _, num_accepted in kept]
            self._shared.observe(RoundReport(len(round.lanes), round.drafted, round.width, counts, seconds))
            return
        for lane, reading, num_accepted in kept:
            if after := lane.policy.listens_after:
                self._untold.append(_Untold.of(round, lane, reading, num_accepted, seconds))
                if len(self._untold) >= after:
                    self.tell()

    def unread(self, chances: Chances | None) -> mx.array | None:
        """What is still to be read of a round's chances, if the lone lane's policy is to be told of them.

        The host reads it with the round's outcome: to read an array of its own takes as long as many launches on CUDA.
        """
        if chances is None or chances.known is not None or self.lone is None:
            return None
        self._unread += 1
        after = self.lone.policy.listens_after
        if not after or self._unread < after:
            return None
        self._unread = 0
        return chances.said

    def tell(self) -> None:
        """Tell the lone lane's policy of all rounds that it has not been told of."""
        untold, self._untold = self._untold, []
        for one in untold:
            one.lane.taught = True
            one.lane.policy.observe(one.observation())

    def forget(self) -> None:
        """Forget rounds that nobody was told of."""
        self._untold.clear()

    def may_branch(self, lane: Lane) -> bool:
        """Whether rounds of this lane may be trees, if it is alone: both models take them, and the lane as well.

        A tree has many rows, so several lanes have chains.
        """
        return lane.policy.branches and not lane.processors and lane.guide is None and self._models_branch

    @cached_property
    def _models_branch(self) -> bool:
        return self.batch.drafter is not None and can_branch(self.target, self.batch.drafter)

    def _fitting(self, places: int, most: int) -> int:
        """No more places than tokens are wanted, unless another width would have to be written down and compiled."""
        return places if self.target.replays or backend().kind == "cuda" else min(places, most)

    @property
    def _shared(self) -> GroupPolicy:
        assert self.group is not None, "several lanes need a policy of their own"
        return self.group


def can_branch(target: Target, drafter: Drafter) -> bool:
    """Whether rounds may be trees of drafts."""
    return drafter.supports_trees and target.takes_rows() and target.takes_trees()
