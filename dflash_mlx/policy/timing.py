"""Timing rounds of the decode loop on this machine, the way they will run.

A round's time depends on shapes and not on what is computed, so the context is rows of zeros and nothing is read.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import mlx.core as mx
import numpy as np

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
# The same where each turn has but one that counts.
_SECONDS_A_WAITING_KIND = 1.25
# A computer is slower for a while, and never faster: of several times, the one counts that this share of them is below.
_LOW = 0.2
# By so many steps the kinds' times are found, and comparisons that are off by less than this are all as good.
_FITS, _NEAR = 30, 0.01
# Drafts that are timed.
_TIMED_DRAFTS = 3
# In the place of a width: a round without drafts.
PLAIN = -1
# One round that takes this long is enough: other work changes it little.
_LONG_ROUND = 0.5
# No answer ends before it was timed.
_TOKENS = 1 << 20


class Compared(NamedTuple):
    """Seconds that some kinds of work take, and the usual distance of a comparison of two of them from the others.

    spread: as a logarithm, 0.1 for about 10 %; infinite after a single turn, which tells nothing of it.
    """

    times: list[float]
    spread: float


class Rounds(NamedTuple):
    """What is timed: rounds by this policy, after `depth` tokens of context."""

    policy: FixedWidth
    depth: int = SHALLOW


class Timer:
    """Times rounds and drafts of a target and a drafter."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target, self.drafter = target, drafter

    def rounds(self, kinds: Sequence[Rounds]) -> Compared:
        """Rounds of some kinds, which take turns of a few rounds each."""
        engines = [self._warm(*kind) for kind in kinds]
        found = taking_turns([partial(_some_seconds_of, engine) for engine in engines])
        for engine in engines:
            _end(engine)
        return found

    def _warm(self, policy: FixedWidth, depth: int) -> Engine:
        """An answer with such rounds, which has begun."""
        engine = self._engine(policy, depth)
        # The first one is the prompt's own.
        for _ in range(1 + (1 if backend().kind == "cpu" else 3)):
            engine.advance()
        return engine

    def waiting(
        self, widths: Mapping[int, Sequence[int]], *, places: int, tree: int
    ) -> tuple[dict[int, dict[int, float]], float]:
        """Rounds of chains or of a tree of at most so many drafts, by tokens of context and width; and their spread.

        widths: by tokens of context. All wait for drafts of all places, those of width 0, too; those of `PLAIN` do not
        draft. All take turns.
        """
        kinds: list[Callable[[], list[float]]] = []
        engines = []
        for depth, asked in widths.items():
            # Before the first ones other answers had rounds, so that one more of them is made.
            policy = _InTurns([asked[0], *(width for width in asked for _ in range(2))], places=places, tree=tree)
            engine = self._engine(policy, depth)
            # The prompt's own round, at whose end the first one is launched.
            engine.advance()
            kinds += [partial(_one_like_the_next, engine, first=i == 0) for i in range(len(asked))]
            engines.append(engine)
        found = taking_turns(kinds, seconds=_SECONDS_A_WAITING_KIND)
        for engine in engines:
            _end(engine)
        times = iter(found.times)
        return {depth: dict(zip(asked, times, strict=False)) for depth, asked in widths.items()}, found.spread

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


def taking_turns(
    kinds: Sequence[Callable[[], Sequence[float]]],
    *,
    first: Sequence[Sequence[float]] | None = None,
    seconds: float | None = None,
    slow: float = _LONG_ROUND,
) -> Compared:
    """What some kinds of work take, each of which tells a few times whenever it is called.

    first: the times of a first turn that was made. seconds: how long to go on for each kind. slow: one turn is enough
    where any of them takes so many seconds.
    """
    to_spend = len(kinds) * (_SECONDS_A_WIDTH if seconds is None else seconds)
    turns, started = [] if first is None else [first], time.perf_counter()
    while not turns or max(map(min, turns[-1])) < slow:
        enough = time.perf_counter() - started > to_spend or len(turns) == _MOST_TURNS
        if enough and len(turns) >= _FEWEST_TURNS:
            break
        turns.append([times() for times in kinds])
    return compared(turns)


def compared(turns: Sequence[Sequence[Sequence[float]]]) -> Compared:
    """What rounds of some kinds take, by turns of them all, of each of which some times are known.

    Some computers are slower for a tenth of a second, or for seconds, whatever they do: a rented one by 1.7 times, for
    two thirds of the time. So each kind is compared with what was timed right before it. The kinds' times are those
    from which the fewest of these comparisons are far off (the least sum of the logarithms' distances), on a computer
    as fast as this one was at its better times.
    """
    count = len(turns[0])
    seen = np.log([_low(times) for turn in turns for times in turn])
    kinds = np.arange(len(seen)) % count
    steps, places = np.diff(seen), np.eye(count)
    design, weights, times = places[kinds[1:]] - places[kinds[:-1]], np.ones(len(steps)), np.zeros(count)
    for _ in range(_FITS):
        root = np.sqrt(weights)
        times = np.linalg.lstsq(design * root[:, None], steps * root, rcond=None)[0]
        weights = 1.0 / np.maximum(np.abs(design @ times - steps), _NEAR)
    off = np.abs(design @ times - steps)
    return Compared(
        np.exp(times + _low(seen - times[kinds])).tolist(), float(np.median(off)) if len(turns) > 1 else math.inf
    )


def _low(times: Iterable[float]) -> float:
    known = sorted(times)
    return known[int(_LOW * len(known))]


def _one_like_the_next(engine: Engine, *, first: bool) -> list[float]:
    """The time of a round after which one of its kind is launched: that between two looks at its like.

    On its way to the second look the next one is launched, and MLX may take until then to do the first. Then another
    round of the kind is made, after which one of the next kind is launched.
    """
    if first:
        mx.synchronize()
        engine.advance()
    seconds = _seconds_of(engine.advance)
    engine.advance()
    return [seconds]


def _some_seconds_of(engine: Engine) -> list[float]:
    """The times of a few rounds; not of the first one, for which nothing was launched ahead."""
    # What others have launched ahead comes before.
    mx.synchronize()
    return some_times(engine.advance, seconds=_SECONDS_A_TURN)


def some_times(work: Callable[[], object], *, seconds: float) -> list[float]:
    """Some times of what is done, which is done once before; more of what is quick, about so many seconds together."""
    work()
    times: list[float] = []
    while not times or (len(times) < _MOST_TIMED and len(times) * min(times) < seconds):
        times.append(_seconds_of(work))
    return times


def _seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _end(engine: Engine) -> None:
    for lane in engine.lanes:
        engine.leave(lane)


class _InTurns:
    """Rounds of these widths, one after another, again and again."""

    listens_after = 0

    def __init__(self, widths: Sequence[int], *, places: int, tree: int) -> None:
        self.widths, self.places, self.tree = widths, places, tree
        self.branches = tree > 0
        self._next = 0

    def next_round(self, *, may_branch: bool, told: float = 0.0) -> Choice:
        if self.widths[self._next % len(self.widths)] == PLAIN:
            self._next += 1
            return Choice(0)
        return Choice(self.places, tree=self.tree if may_branch else 0)

    def choose(self, forecast: Forecast) -> int:
        width, self._next = self.widths[self._next % len(self.widths)], self._next + 1
        return width

    def observe(self, round: Observation) -> None:
        pass

    def take_notice(self) -> str | None:
        return None
