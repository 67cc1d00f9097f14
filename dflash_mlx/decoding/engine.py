"""The decode loop: rounds of propose, verify, accept and commit, for one answer or many at once. Token ids only.

A round feeds each lane's anchor (newest token, not yet in the target's cache) and W drafts to the target in one pass; W
may be 0, which is plain decoding. What a round keeps is decided on the device, lane by lane, and the host reads it once
a round. Until then it launches what does not depend on that reading: the next draft at least, and where nothing needs
the host (`_may_launch_ahead`) the whole next round, so that the device waits for Python as little as it can.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.caches.own import OwnCaches
from dflash_mlx.caches.target_caches import BatchCaches
from dflash_mlx.decoding.accept import Reading, for_trees
from dflash_mlx.decoding.batch import Batch
from dflash_mlx.decoding.choosing import Choosing
from dflash_mlx.decoding.constraint import Bits, limit
from dflash_mlx.decoding.lane import Lane, Step
from dflash_mlx.decoding.policies import Choice, GroupPolicy
from dflash_mlx.decoding.round import Plan, Round
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.steps import Chances, Drafts, accept, consider, propose
from dflash_mlx.decoding.tree import DraftTree
from dflash_mlx.drafters.contract import Drafter, Outlook
from dflash_mlx.targets.target import Target

# What a lane gained in a round, or what went wrong with it alone.
Result = tuple[Lane, Step | Exception]


class Engine:
    """Answers made together; `policy` chooses the width for several lanes, a single lane has a policy of its own."""

    def __init__(self, target: Target, drafter: Drafter | None, *, policy: GroupPolicy | None = None) -> None:
        self.target, self.drafter = target, drafter
        self._batch = Batch(target, drafter)
        self.choosing = Choosing(target, self._batch, policy)
        self._joining: list[Batch] = []
        self._round: Round | None = None
        # Lanes that cannot go on, which is said with the next results.
        self._failed: list[Result] = []
        self._left_at = self._read_at = time.perf_counter()
        # Whether prompts may still be being read when the round on its way was launched.
        self._reading = False

    @property
    def lanes(self) -> list[Lane]:
        """Those whose answers are not finished."""
        return [lane for batch in (self._batch, *self._joining) for lane in batch.lanes]

    def join(self, lane: Lane) -> None:
        """Let a lane take part from the next round on. Its session's caches come here."""
        assert lane.session.away is None
        self.join_all(Batch.of(lane, self.drafter))

    def join_all(self, batch: Batch) -> None:
        """The same for lanes that are in a batch already (`Batch.reading`)."""
        assert self.target.takes_rows() or not self.lanes, "this target's answers are made one at a time"
        for lane in batch.lanes:
            lane.session.away = self
            if self.choosing.may_branch(lane) or not (self.drafter is None or self.drafter.allows_rejection):
                lane.strategy = for_trees(lane.strategy)
        self._joining.append(batch)

    def leave(self, lane: Lane) -> None:
        """End a lane's answer, at any time: its session has its caches back, with what was committed."""
        if lane.session.away is not self:
            return
        self.choosing.tell()
        [batch] = [batch for batch in (self._batch, *self._joining) if lane in batch.rows]
        batch.give_back(batch.row_of(lane))
        self._joining = [batch for batch in self._joining if batch.rows]
        if not self._batch.rows:
            self._round = None
            self.target.drain()
        lane.session.away = None

    def advance(self) -> list[Result]:
        """A round of every lane: launch what can be, wait for the round on its way, and say what each lane gained.

        After an error of the models nothing of the lanes is left: their sessions are empty.
        """
        with self._whole_or_reset():
            arriving = bool(self._joining)
            if self._round is None:
                self._round = self._launch_next(None)
            if self._round is None:
                return []
            idle = time.perf_counter() - self._left_at
            current, plan = self._round, self._prepare(self._round)
            # Reading prompts is not a round's own time, and cannot be told from it.
            results = self._settle(current, plan, None if arriving or self._reading else idle)
            self._reading = False
            # The device works while the caller looks at the results.
            launched = plan.launched if plan is not None and self._batch.rows else None
            self._round = launched or self._launch_next(plan)
            self._left_at = time.perf_counter()
            return results

    # Before the round on its way is read.

    def _prepare(self, current: Round) -> Plan | None:
        """Draft for the round after `current`, and launch it if nothing of it waits for the host.

        None where the rows are about to change, or drafting needs what the round on its way brings.
        """
        batch = self._batch
        if self._joining or not batch.is_arranged:
            return None
        outlook = self.choosing.outlook
        waits = outlook is Outlook.HOST
        if waits and self.choosing.lone is None:
            return None
        # The round on its way yields one token at least, and the next one its own.
        wanted = max(lane.remaining for lane in batch.lanes)
        choice = self.choosing.next_round(outlook, wanted - 2)
        if waits and choice.places:
            # Asked again when the newest tokens are known. A pause does not need them.
            return None
        if choice.places == 0:
            if choice.rests and current.width:
                assert batch.caches is not None
                batch.caches.tidy()
            ahead = wanted > 1 and self._may_launch_ahead(current, drafting=False)
            return Plan(choice, launched=self._launch(None, ahead=True) if ahead else None)
        self._absorb(current)
        drafts = self._draft(choice)
        if choice.width is not None and self._may_launch_ahead(current, drafting=True):
            return Plan(choice, launched=self._launch_drafts(drafts, choice.width, ahead=True))
        mx.async_eval(drafts.arrays)
        return Plan(choice, drafts)

    def _may_launch_ahead(self, current: Round, *, drafting: bool) -> bool:
        """Whether the round after `current` can be launched before that is read: nothing of it depends on the host."""
        lanes = self._batch.lanes
        if any(lane.guide is not None for lane in lanes):
            return False
        if current.width == 0 and not drafting:
            return True
        processed = any(lane.processors for lane in lanes)
        return not (processed or self._batch.commits_on_host)

    def _draft(self, choice: Choice) -> Drafts:
        """Draft for all lanes. What the last round keeps, and so where the drafts begin, only the device may know."""
        batch = self._batch
        assert batch.state is not None
        room = max(batch.bounds) + 1 + choice.places
        drafted = propose(batch.rows, batch.state, choice, anchors=batch.anchors, at=batch.at, room=room)
        vocabulary, steps = batch.state.vocabulary, self.target.tree_steps
        chances = consider(batch.rows, drafted, vocabulary, batch.at, choice, steps=steps)
        return Drafts(drafted.tokens, drafted.proposals, chances=chances)

    def _absorb(self, current: Round) -> None:
        """Hand a round to the drafter, all of it: what is rejected is masked, and then written over."""
        batch, verdict = self._batch, current.verdict
        if batch.state is not None and not current.absorbed:
            current.absorbed = True
            batch.state.extend(
                verdict.fed, verdict.features, current.at, room=current.room, all_kept=current.width == 0
            )

    # Reading it.

    def _settle(self, current: Round, plan: Plan | None, idle: float | None) -> list[Result]:
        """Wait for a round, commit what it kept, let finished lanes leave, and tell the policy."""
        batch = self._batch
        mx.eval(current.arrays, plan.drafts.arrays if plan is not None and plan.drafts is not None else [])
        ahead = plan.launched.verdict.outcome.depth + 1 if plan is not None and plan.launched is not None else 0
        results: list[Result] = [(lane, error) for lane, error in self._failed if lane in batch.rows]
        self._failed, finished, report = [], [], []
        for failed, _ in results:
            self.leave(failed)
        if not batch.rows:
            return results
        kept = [current.fed] * len(current.lanes)
        for row, (lane, reading) in enumerate(zip(current.lanes, current.verdict.outcome.read(), strict=True)):
            if lane is None or batch.rows[row] is not lane:
                continue
            result, kept[row] = self._take(lane, reading, current, row)
            batch.bounds[row] = len(lane.session.tokens) + ahead
            results.append((lane, result))
            report.append((lane, reading, min(reading.num_accepted, kept[row])))
            if isinstance(result, Exception) or result.finish_reason is not None:
                finished.append(lane)
        assert batch.caches is not None
        batch.caches.commit(current.fed, kept)
        self._absorb(current)
        for lane in finished:
            self.leave(lane)
        seconds = self._seconds(idle)
        self.choosing.observe(current, report, seconds)
        if finished:
            self.choosing.tell()
        for _, result in results:
            if isinstance(result, Step):
                result.seconds = seconds
        return results

    def _take(self, lane: Lane, reading: Reading, current: Round, row: int) -> tuple[Step | Exception, int]:
        """What a round brought to a lane, and how many of its rows stay."""
        tokens, finish_reason = lane.take(reading.tokens)
        step = Step(
            tokens,
            current.width,
            reading.depth,
            min(reading.num_accepted, len(tokens)),
            finish_reason,
            current.verdict.read_logprobs(row)[: len(tokens)],
        )
        if lane.guide is not None and finish_reason is None:
            try:
                lane.guide.advance(tokens)
            except Exception as error:  # the others go on
                return error, len(tokens)
            if lane.guide.done:
                lane.guide = None  # what waits for guides on the host need wait no longer
        return step, len(tokens)

    def _seconds(self, idle: float | None) -> float | None:
        """From the round before to the one just read; None if half of that was the caller's time, `idle`, or if that is
        not known."""
        now = time.perf_counter()
        spent, self._read_at = now - self._read_at, now
        return spent if idle is not None and idle < 0.5 * spent else None

    # Launching the next one.

    def _launch_next(self, plan: Plan | None) -> Round | None:
        """Launch a round of the lanes that go on and those that join, of the drafts that are worth their time."""
        batch, joining = self._batch, self._joining
        was_empty = not batch.rows
        left = batch.arrange(joining)
        self._joining = []
        if not batch.rows:
            return None
        if joining:
            # Where passes are replayed, nobody has waited for the prompts to be read (`Batch.reading`).
            self._reading, self._read_at = self.target.replays, time.perf_counter()
        if plan is not None and not joining:
            if plan.drafts is None:
                return self._launch(None)
            return self._launch_chosen(plan.choice, plan.drafts.take(left))
        if was_empty and len(batch.rows) == 1:
            # A lone answer's first token comes soonest from a plain round.
            return self._launch(None)
        wanted = max(lane.remaining for lane in batch.lanes)
        choice = self.choosing.next_round(self.choosing.outlook, wanted - 1)
        return self._launch_chosen(choice, self._draft(choice)) if choice.places else self._launch(None)

    def _launch_chosen(self, choice: Choice, drafts: Drafts) -> Round:
        """Launch the round with those of the drafts that the policy chooses and the lanes' guides allow."""
        drafts, width = self.choosing.of_drafts(choice, drafts)
        return self._launch_drafts(drafts, width)

    def _launch_drafts(self, drafts: Drafts, width: int, *, ahead: bool = False) -> Round:
        """Launch the round with the first `width` drafts, or a tree's likeliest."""
        chances = drafts.chances
        if chances is None or chances.likeliest is None:
            chosen: Drafts | DraftTree | None = drafts.shortened(width)
        else:
            chosen = chances.likeliest.tree(width) if width else None
        return self._launch(chosen, drafted=drafts.width, chances=chances, ahead=ahead)

    def _launch(
        self,
        drafts: Drafts | DraftTree | None,
        *,
        drafted: int = 0,
        chances: Chances | None = None,
        ahead: bool = False,
    ) -> Round:
        """Launch the target over the anchors and the drafts, and the judgement of them.

        drafted: places that were, and the chances of what was, where somebody wants to know them. ahead: the last round
        is not read yet, so each lane's newest token is known to the device alone.
        """
        batch = self._batch
        drafts, bits = (drafts, {}) if isinstance(drafts, DraftTree) else self._limited(drafts)
        width = 0 if drafts is None else drafts.size if isinstance(drafts, DraftTree) else drafts.width
        at, rows = batch.at, list(batch.rows)
        histories = {
            row: lane.history_after(batch.anchors[row : row + 1]) if ahead else lane.history
            for row, lane in enumerate(rows)
            if lane is not None and lane.history is not None
        }
        fed, logits, features = batch.forward(drafts)
        further = self.choosing.unread(chances)
        verdict = accept(rows, drafts, fed, logits, features, at=at, histories=histories, bits=bits, further=further)
        batch.move_on(verdict)
        launched = Round(rows, at, verdict, width, drafted=drafted, room=max(batch.bounds), chances=chances)
        # All that the host will read of it: what is not launched now would wait for the next round, too. The features
        # of a plain round are put together when the drafter takes them in: many of these follow each other.
        mx.async_eval(launched.arrays, [verdict.features] if width and verdict.features is not None else [])
        return launched

    def _limited(self, drafts: Drafts | None) -> tuple[Drafts | None, dict[int, Bits]]:
        """Drafts cut where a lane's guide does not allow them, and which tokens it allows."""
        guides = {row: lane.guide for row, lane in enumerate(self._batch.rows) if lane is not None and lane.guide}
        if not guides:
            return drafts, {}
        bits: dict[int, Bits] = {}
        tokens = np.array(drafts.tokens).tolist() if drafts is not None else None
        for row, guide in guides.items():
            try:
                if drafts is None or tokens is None:
                    bits[row] = guide.allowed([])[1]
                    continue
                proposal, bits[row] = limit(guide, drafts.of(row), tokens[row])
                drafts.limits[row] = proposal.width if proposal is not None else 0
            except Exception as error:  # the others go on
                lane = self._batch.rows[row]
                assert lane is not None
                self._failed.append((lane, error))
        return drafts.narrowed() if drafts is not None else None, bits

    # What sessions ask of where their caches are (`session.Away`).

    def bring_home(self, session: Session) -> None:
        self.leave(next(lane for lane in self.lanes if lane.session is session))

    def layers_of(self, session: Session) -> tuple[int, OwnCaches | BatchCaches, list[Any]]:
        [lane] = [lane for lane in self.lanes if lane.session is session]
        [batch] = [batch for batch in (self._batch, *self._joining) if lane in batch.rows]
        target = batch.caches if isinstance(batch.caches, BatchCaches) else session.target_cache
        return batch.row_of(lane), target, batch.state.layers() if batch.state is not None else []

    @contextmanager
    def _whole_or_reset(self) -> Iterator[None]:
        """Forget everything if a change to the caches fails in some layer, after others have made it."""
        try:
            yield
        except BaseException:
            lanes = self.lanes
            self._batch.clear()
            self.choosing.forget()
            self._round, self._joining = None, []
            for lane in lanes:
                lane.session.reset()
            self.target.drain()
            raise
