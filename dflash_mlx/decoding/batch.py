"""The lanes of a batch, a row for each, and what the device holds for them: caches, drafter, anchors and positions.

Lanes come and go between rounds. A row whose lane has left stays until the rows are put in order (`arrange`): it is
computed along, and nobody looks at it.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.caches.replay import Pass
from dflash_mlx.caches.target_caches import BatchCaches, TargetCaches
from dflash_mlx.constants import constant
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.steps import Drafts, Verdict, block_of
from dflash_mlx.decoding.tree import DraftTree
from dflash_mlx.drafters.contract import Drafter, DraftState
from dflash_mlx.runtime import backend
from dflash_mlx.targets.target import Target

# Rounds for which a row without a lane stays. To move the rows takes as long as some rounds.
_ROUNDS_UNUSED = 8
# Tokens by which the lengths of what is read together differ on CUDA, where MLX compiles anew for each.
_READING_STEP = 64


class Batch:
    """Answers of one target, and of one drafter or none.

    rows: the lanes, None where one has left. at, anchors: (B,), where the next token of each row goes and which it is,
    on the device. bounds: the most positions that each row can have then.
    """

    def __init__(self, target: Target, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        self.clear()

    def clear(self) -> None:
        """No lanes, no caches."""
        self.rows: list[Lane | None] = []
        self.bounds: list[int] = []
        self.caches: TargetCaches | None = None
        self.state: DraftState | None = None
        self.at = self.anchors = mx.array([], dtype=mx.int32)
        # Rounds since every row had a lane.
        self._rounds_unused = 0

    @property
    def lanes(self) -> list[Lane]:
        return [lane for lane in self.rows if lane is not None]

    @property
    def commits_on_host(self) -> bool:
        """Whether a round that is kept in part has to be committed before the next one is launched."""
        assert self.caches is not None
        return self.caches.commits_on_host

    def forward(self, drafts: Drafts | DraftTree | None) -> tuple[mx.array, mx.array, mx.array | None]:
        """Launch the target over each row's anchor and drafts.

        Returns these tokens (B, W + 1), the logits (B, W + 1, V) and features for the drafter.
        """
        assert self.caches is not None
        block = block_of(self.anchors, drafts)
        self._rounds_unused = self._rounds_unused + 1 if None in self.rows else 0
        self.bounds = [bound if lane else 0 for lane, bound in zip(self.rows, self.bounds, strict=True)]
        tree = drafts.shape if isinstance(drafts, DraftTree) else None
        room = max(self.bounds) + block.shape[1]
        return block, *self.caches.feed(self.model, block, at=self.at, room=room, tree=tree)

    def move_on(self, verdict: Verdict) -> None:
        """Let the next round begin where a round ends; what it keeps need not be known to the host."""
        assert self.caches is not None
        if verdict.path is not None:
            self.caches.keep_path(verdict.path)
        self.bounds = [bound + verdict.outcome.depth + 1 for bound in self.bounds]
        self.at = self.at + constant(1, mx.int32)
        if verdict.outcome.depth:
            self.at = self.at + verdict.outcome.num_accepted
        self.anchors = verdict.outcome.next_anchors
        self._empty_rows()

    def _empty_rows(self) -> None:
        """Let rows without a lane begin at 0 again, so that they never need room."""
        if None in self.rows:
            self.at = mx.where(mx.array([lane is not None for lane in self.rows]), self.at, 0)

    @property
    def model(self) -> Pass:
        """The target's, with features for the drafter if there is one."""
        return self.target.pass_for(() if self.drafter is None else self.drafter.taps)

    def row_of(self, lane: Lane) -> int:
        return self.rows.index(lane)

    def give_back(self, row: int) -> None:
        """Let a row's lane go: its session gets the caches of what was committed, or ends with the answer."""
        lane, self.rows[row] = self.rows[row], None
        assert lane is not None
        assert self.caches is not None
        length = len(lane.session.tokens)
        if lane.session.ends_with_answer:
            lane.session.reset()
        else:
            self.caches.give_back(row, length, lane.session.target_cache)
            if self.state is not None:
                self.state.give_back(row, length, lane.session.draft_cache)
        self._empty_rows()
        if not self.lanes:
            self.clear()

    @property
    def is_arranged(self) -> bool:
        """Whether the rows can stay as they are, those included whose lanes have left."""
        return len(self.rows) == self._wanted_rows()

    def _wanted_rows(self, arriving: int = 0) -> int:
        """How many rows there should be: those that are free stay for a while, since another lane may come."""
        wanted = rows_for(len(self.lanes) + arriving)
        return max(wanted, len(self.rows)) if arriving or self._rounds_unused < _ROUNDS_UNUSED else wanted

    def arrange(self, arriving: Sequence["Batch"]) -> list[int]:
        """Put the rows in order between rounds: there are as many as there should be, and new lanes take free ones.

        Returns which of the rows that there were are left, in their order.
        """
        before = len(self.rows)
        if not self.rows and arriving:
            vars(self).update(vars(arriving[0]))
            arriving = arriving[1:]
        count = self._wanted_rows(sum(len(other.rows) for other in arriving))
        if not arriving and count == len(self.rows):
            return list(range(before))
        self._settle()
        if count > len(self.rows):
            self._add(count - len(self.rows))
        for other in arriving:
            other._settle()
            self._take_over(other)
        if len(self.rows) <= count:
            return list(range(before))
        # Rows without a lane go, the last ones first, until as many are left as there should be; those after take
        # the places of those that go.
        empty = [row for row, lane in enumerate(self.rows) if lane is None]
        gone = set(empty[count - len(self.rows) :])
        last = iter([row for row in range(count, len(self.rows)) if row not in gone])
        kept = [next(last) if row in gone else row for row in range(count)]
        self._keep(kept)
        return [row for row in kept if row < before]

    def _settle(self) -> None:
        """Bring the drafter up to date."""
        if self.state is not None:
            self.state.settle(self.at)
            self._compute()

    def _compute(self) -> None:
        """Launch what is still to be computed of the rows, by itself, where passes are replayed.

        On CUDA, MLX plans about a hundred operations together, and again for each new sequence of them. So what comes
        now and then should not stand at the beginning of a pass, nor several such things together.
        """
        if not self.target.replays:
            return
        assert isinstance(self.caches, BatchCaches)
        drafting: list[Any] = [leaf.state for leaf in self.state.layers()] if self.state is not None else []
        mx.async_eval(self.caches.arrays(), drafting, self.at, self.anchors)

    def _add(self, count: int) -> None:
        """Add rows without lanes."""
        assert isinstance(self.caches, BatchCaches)
        self.caches.add(count)
        if self.state is not None:
            self.state.add(count)
        self.at, self.anchors = mx.pad(self.at, (0, count)), mx.pad(self.anchors, (0, count))
        self.rows += [None] * count
        self.bounds += [0] * count
        self._compute()

    def _take_over(self, other: "Batch") -> None:
        """Let the lanes of another take the first rows that are free."""
        assert isinstance(self.caches, BatchCaches)
        assert isinstance(other.caches, BatchCaches)
        places = [row for row, lane in enumerate(self.rows) if lane is None][: len(other.rows)]
        self.caches.take_over(other.caches, places)
        if self.state is not None and other.state is not None:
            self.state.take_over(other.state, places)
        index = mx.array(places)
        self.at, self.anchors = mx.array(self.at), mx.array(self.anchors)
        self.at[index], self.anchors[index] = other.at, other.anchors
        for place, lane, bound in zip(places, other.rows, other.bounds, strict=True):
            self.rows[place], self.bounds[place] = lane, bound
        self._compute()

    @classmethod
    def of(cls, lane: Lane, drafter: Drafter | None) -> "Batch":
        """A batch of one lane, whose session's caches move there."""
        session, length = lane.session, len(lane.session.tokens)
        batch = cls(session.target, drafter)
        batch.caches = open_caches(session)
        if drafter is not None:
            batch.state = drafter.open(session.target, session.draft_cache, length)
        batch.begin([lane])
        return batch

    @classmethod
    def reading(cls, target: Target, drafter: Drafter | None, prompts: Sequence[Sequence[int]]) -> "Batch":
        """Read the prompts of new answers in one pass, all but their last tokens; `begin` then gives the rows lanes."""
        batch = cls(target, drafter)
        wanted = len(prompts)
        rows, room = reading_shape(wanted, max(len(prompt) for prompt in prompts) - 1)
        counts = [len(prompt) - 1 for prompt in prompts] + [0] * (rows - wanted)
        caches = target.blank_rows(rows, room)
        if drafter is not None:
            batch.state = drafter.blank(target, rows, room)
        padded = np.zeros((rows, room), dtype=np.uint32)
        for row, prompt in enumerate(prompts):
            padded[row, : counts[row]] = prompt[:-1]
        tokens, at = mx.array(padded), mx.zeros((rows,), dtype=mx.int32)
        features = caches.read(batch.model, tokens, counts, at=at, room=room)
        held: list[Any] = [leaf.state for leaf in caches.rows.attention]
        if batch.state is not None:
            batch.state.extend(tokens, features, at, room=room, all_kept=False)
            batch.state.settle(mx.array(counts))
            held += [leaf.state for leaf in batch.state.layers()]
        held += [state.cache for state in caches.rows.states]
        # Where passes are replayed, the GPU is the quicker one: the next round can be launched after them at once.
        (mx.async_eval if target.replays else mx.eval)(held)
        batch.caches = caches
        if rows > wanted:
            caches.keep(range(wanted))
            if batch.state is not None:
                batch.state.keep(range(wanted))
        return batch

    def begin(self, lanes: Sequence[Lane]) -> None:
        """Give the rows their lanes, whose prompts have been read."""
        self.rows, self.bounds = list(lanes), [len(lane.session.tokens) for lane in lanes]
        self.at = mx.array(self.bounds, dtype=mx.int32)
        self.anchors = mx.array([lane.anchor for lane in lanes], dtype=mx.uint32)

    def _keep(self, rows: list[int]) -> None:
        assert isinstance(self.caches, BatchCaches)
        self.caches.keep(rows)
        if self.state is not None:
            self.state.keep(rows)
        index = mx.array(rows)
        self.at, self.anchors = self.at[index], self.anchors[index]
        self.rows, self.bounds = [self.rows[row] for row in rows], [self.bounds[row] for row in rows]
        self._compute()


def rows_for(lanes: int) -> int:
    """How many rows this many lanes should have.

    On CUDA, MLX compiles and plans anew for each number of rows (up to 150 ms at a time on an H200), and rows cost
    little; so some stay empty there until a smaller number does.
    """
    if backend().kind != "cuda" or lanes < 4:
        return lanes
    step = 1 << (lanes.bit_length() - 2)
    return -(-lanes // step) * step


def reading_shape(prompts: int, tokens: int) -> tuple[int, int]:
    """How many rows of how many tokens to feed for prompts of at most this many tokens: few shapes on CUDA."""
    if backend().kind != "cuda":
        return prompts, tokens
    return rows_for(prompts), -(-tokens // _READING_STEP) * _READING_STEP


def open_caches(session: Session) -> TargetCaches:
    """A session's caches of the target as a batch of one row. They move there, until they are given back."""
    target = session.target
    if not target.takes_rows():
        return target.alone(session.target_cache)
    session.fill_empty()
    return target.as_row(session.target_cache, len(session.tokens))
