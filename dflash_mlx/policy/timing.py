"""Timing rounds of the decode loop on this machine, the way they will run.

A round's time depends on shapes and not on what is computed, so the context is rows of zeros and nothing is read.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx

from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.batch import Batch
from dflash_mlx.decoding.engine import Engine
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.policies import Choice, Forecast, Observation, WidthPolicy
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.steps import propose
from dflash_mlx.drafters.contract import Drafter, DraftState
from dflash_mlx.drafters.ranking import BRANCHES, rank
from dflash_mlx.policy.width import SHALLOW, FixedWidth
from dflash_mlx.runtime import backend
from dflash_mlx.targets.target import Target

# Rounds of a kind: some to warm up, then some in each of a number of turns, until they took `_SECONDS_A_WIDTH`.
_FEWEST_TURNS, _MOST_TURNS = 3, 10
# How long the rounds of a turn are timed, and the most of them.
_SECONDS_A_TURN, _MOST_TIMED = 0.05, 5
_SECONDS_A_WIDTH = 0.3
# A computer is slower for a while, and never faster: of several times the one counts that this share of them is below.
_LOW = 0.2
# Drafts that are timed.
_TIMED_DRAFTS = 3
# Of those that change their width every few rounds.
_TIMED_IN_TURN = 2
# One round that takes this long is enough: other work changes it little.
_LONG_ROUND = 0.5
# No answer ends before it was timed.
_TOKENS = 1 << 20


class Rounds(NamedTuple):
    """What is timed: rounds by this policy, after `depth` tokens of context."""

    policy: FixedWidth
    depth: int = SHALLOW


class Timer:
    """Times rounds and drafts of a target and a drafter."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter

    def rounds(self, kinds: Sequence[Rounds]) -> list[float]:
        """Rounds of some kinds, which take turns of a few rounds each."""
        engines, turns = [self._warm(*kind) for kind in kinds], []
        started = time.perf_counter()
        while True:
            turns.append([_some_seconds_of(engine) for engine in engines])
            spent, quick = time.perf_counter() - started, max(map(min, turns[-1])) < _LONG_ROUND
            enough = spent > _SECONDS_A_WIDTH * len(engines) or len(turns) == _MOST_TURNS
            if not quick or (enough and len(turns) >= _FEWEST_TURNS):
                break
        for engine in engines:
            _end(engine)
        return compared(turns)

    def _warm(self, policy: FixedWidth, depth: int) -> Engine:
        """An answer with such rounds, which has begun."""
        engine = self._engine(policy, depth)
        # The first one is the prompt's own.
        for _ in range(1 + (1 if backend().kind == "cpu" else 3)):
            engine.advance()
        return engine

    def in_turns(self, widths: Sequence[int], *, places: int, tree: int, depth: int = SHALLOW) -> dict[int, float]:
        """Rounds of each width, of chains or of a tree of at most so many drafts. All wait for drafts of all places.

        A round's time is that between two looks at its like: on its way there the next one is launched, and MLX may
        take until then to do the first.
        """
        policy = _InTurns([width for width in widths for _ in range(1 + _TIMED_IN_TURN)], places=places, tree=tree)
        engine = self._engine(policy, depth)
        # The prompt's own round, at whose end the first one is launched.
        engine.advance()
        times = [_seconds_of(engine) for _ in policy.widths]
        _end(engine)
        kinds = list(zip(times, pairwise(policy.widths), strict=False))
        return {width: statistics.mean(took for took, kind in kinds if kind == (width, width)) for width in widths}

    def draft(self, places: int) -> float:
        """A draft with its candidates, alone; less than the difference between two rounds, which overlap."""
        state, at, anchors, times = self._draft_state(SHALLOW), mx.array([SHALLOW]), mx.array([0]), []
        for _ in range(1 + _TIMED_DRAFTS):
            started = time.perf_counter()
            drafted = propose([None], state, Choice(places), anchors=anchors, at=at, room=SHALLOW + places + 1)
            ids = state.vocabulary.token_ids if state.vocabulary else None
            ranked = []
            if drafted.logits is not None:
                ranked.append(rank(drafted.logits[0], BRANCHES, ids, steps=self.target.tree_steps).log_probs)
            mx.eval(drafted.tokens, ranked)
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    def _draft_state(self, depth: int) -> DraftState:
        return self.drafter.blank(self.target, 1, depth)

    def _engine(self, policy: WidthPolicy, depth: int) -> Engine:
        """An answer that is about to begin, after so many tokens of context."""
        engine, session = Engine(self.target, self.drafter), Session(self.target, self.drafter, ends_with_answer=True)
        prompt = [i % self.target.vocab_size for i in range(depth + 1)]
        in_rows = self.target.takes_rows()
        if in_rows:
            session.tokens = prompt[:-1]
        else:
            session.feed(prompt[:-1])
        lane = Lane(session=session, prompt=prompt, strategy=Greedy(), policy=policy, max_tokens=_TOKENS, eos_ids=set())
        if not in_rows:
            engine.join(lane)
            return engine
        batch = Batch(self.target, self.drafter)
        batch.caches, batch.state = self.target.blank_rows(1, depth), self._draft_state(depth)
        batch.begin([lane])
        engine.join_all(batch)
        return engine


def compared(turns: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """What rounds of some kinds take, by turns of them all, of each of which some times are known.

    Some computers are slower for a tenth of a second, or for seconds, whatever they do. The former hardly changes a low
    one of all times of a kind. The latter slows down whole turns: each counts by how fast the computer was then.
    """
    by_kind = list(zip(*turns, strict=True))
    usual = [_low(times for turn in kind for times in turn) for kind in by_kind]
    levels = [
        _low(taken / typical for times, typical in zip(turn, usual, strict=True) for taken in times) for turn in turns
    ]
    return [
        _low(taken / level for times, level in zip(kind, levels, strict=True) for taken in times) for kind in by_kind
    ]


def _low(times: Iterable[float]) -> float:
    known = sorted(times)
    return known[int(_LOW * len(known))]


def _some_seconds_of(engine: Engine) -> list[float]:
    """The times of a few rounds; not of the first one, for which nothing was launched ahead."""
    # What others have launched ahead comes before.
    mx.synchronize()
    times = [_seconds_of(engine), _seconds_of(engine)][1:]
    while len(times) < _MOST_TIMED and sum(times) < _SECONDS_A_TURN:
        times.append(_seconds_of(engine))
    return times


def _seconds_of(engine: Engine) -> float:
    started = time.perf_counter()
    engine.advance()
    return time.perf_counter() - started


def _end(engine: Engine) -> None:
    for lane in engine.lanes:
        engine.leave(lane)


class _InTurns:
    """Rounds of these widths, one after another."""

    def __init__(self, widths: Sequence[int], *, places: int, tree: int) -> None:
        self.widths, self.places, self.tree = widths, places, tree
        self.branches = tree > 0
        self._next = 0

    def next_round(self, *, may_branch: bool, told: float = 0.0) -> Choice:
        return Choice(self.places, tree=self.tree if may_branch else 0)

    def choose(self, forecast: Forecast) -> int:
        width, self._next = self.widths[self._next % len(self.widths)], self._next + 1
        return width

    def observe(self, round: Observation) -> None:
        pass

    def take_notice(self) -> str | None:
        return None
