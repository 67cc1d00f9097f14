"""What the parts of a shared round cost on this machine: measured once for a pair and remembered on disk."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx

from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.batch import Batch
from dflash_mlx.decoding.engine import Engine
from dflash_mlx.decoding.fork import fork
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.policies import Choice
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.steps import propose
from dflash_mlx.drafters.contract import Drafter
from dflash_mlx.policy.group import FixedGroup, GroupCosts, rising, worthwhile_lanes
from dflash_mlx.policy.stored import UNUSABLE, fingerprint, read_json, store, table_of
from dflash_mlx.policy.timing import some_times, taking_turns
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.targets.target import Target

_SCHEMA = 8
_PROMPT_TOKENS = 64
# In a turn something is timed once, and more often until that has taken so many seconds.
_SECONDS_A_TURN = 0.1
# There are turns until each kind has taken so long.
_SECONDS_A_KIND = 0.15
# More tokens than the rounds of an answer gain.
_TOKENS = 1 << 20
# A draft that is waited for takes longer than its share of a round, of which it is taken to be this much at most.
_MOST_DRAFTING = 0.5
# Where a pass of single rows takes this long, measuring stops after about so many seconds; the rest is interpolated.
_SLOW, _SECONDS_TO_SPEND = 0.03, 15.0
# With such a spread, other work took part. It was up to 0.06 on a quiet computer of two cores, where two other programs
# made it 0.3 to 0.7.
_DISTURBED = 0.2
# Where anything takes this long, one turn is enough.
_VERY_SLOW = 1.0
# Rows of each lane that are tried: an anchor and its drafts.
_ROWS = (2, 4, 8, 16)


def load_or_measure_group(
    target: Target,
    drafter: Drafter,
    *,
    places: int,
    most_lanes: int,
    folders: tuple[Path, ...],
    dtype: mx.Dtype,
    report: Callable[[str, float | None], None] | None = None,
) -> GroupCosts:
    """The costs of shared rounds, from disk when this pair was measured on this machine before."""
    settings = _SCHEMA, drafter.method, places, most_lanes, dtype, *target.ways
    name = f"group-costs/{fingerprint(folders, *settings)}"
    costs = _read(name)
    if costs is None:
        if report is not None:
            report("measuring this machine with several answers at once (once for this pair)", None)
        costs, spread = measure_group(target, drafter, places=places, most_lanes=most_lanes)
        # What other work on the machine has spoilt serves for now, and is not remembered.
        if spread <= _DISTURBED:
            store(name, {"plain": costs.plain, "draft": costs.draft, "verify": costs.verify})
    return costs


def _read(name: str) -> GroupCosts | None:
    """What was stored as `name`; None where it is missing or cannot be used."""
    try:
        stored = read_json(name)
        verify = {int(lanes): table_of(table) for lanes, table in stored["verify"].items()}
        return GroupCosts(table_of(stored["plain"]), verify, table_of(stored["draft"]))
    except UNUSABLE:
        return None


def measure_group(target: Target, drafter: Drafter, *, places: int, most_lanes: int) -> tuple[GroupCosts, float]:
    """Time rounds of 2, 4, 8, ... lanes the way they will run, queued one after another, and drafts alone.

    All rounds of so many lanes are timed in turns, since they are what is chosen from. When measuring has taken long
    enough, only those without drafts are timed, as long as more lanes gain by them. Besides the costs it tells the
    worst spread of the rounds of any number of lanes, as in `timing.Compared`.
    """
    started = time.perf_counter()
    plain: dict[int, float] = {}
    verify: dict[int, dict[int, float]] = {}
    draft: dict[int, float] = {}
    spreads = [0.0]
    widths = [rows - 1 for rows in _ROWS if rows <= places + 1]
    prompt = [i % target.vocab_size for i in range(1, _PROMPT_TOKENS + 1)]
    read = Session(target, drafter)
    read.feed(prompt[:-1])
    lanes = 2
    while lanes <= most_lanes:
        batch = _batch_of(read, prompt, lanes)
        rows = {width: lanes * (width + 1) for width in widths}
        alone = _draft_seconds(batch, [width for width in widths if rows[width] not in draft])
        drafts = {width: alone.get(width) or draft[rows[width]] for width in widths}
        policy = FixedGroup(0)
        engine = Engine(target, drafter, policy=policy)
        engine.join_all(batch)
        seconds, spread = _round_seconds(engine, policy, drafts)
        if math.isfinite(spread):
            spreads.append(spread)
        # Drafting never makes a round shorter: where one without seems to be longer, it was disturbed.
        plain[lanes] = min(seconds.values())
        del seconds[0]
        if seconds:
            for width, whole in seconds.items():
                draft.setdefault(rows[width], _drafting(drafts[width], whole))
            passes = {rows[width]: max(0.0, whole - draft[rows[width]]) for width, whole in seconds.items()}
            # A pass of single rows is a plain round. It shows the way where only the narrowest of the others was timed.
            verify[lanes] = rising({lanes: plain[lanes]} | passes)
        for lane in engine.lanes:
            engine.leave(lane)
        # A GPU compiles at first, which is no reason to stop; slow passes are.
        if plain[lanes] > _SLOW and time.perf_counter() - started > _SECONDS_TO_SPEND:
            if not widths and worthwhile_lanes(plain) < lanes:
                break
            widths = []
        lanes *= 2
    return GroupCosts(rising(plain), verify, rising(draft)), max(spreads)


def _draft_seconds(batch: Batch, widths: Sequence[int]) -> dict[int, float]:
    """Of drafts of each number of places, alone."""
    if not widths:
        return {}
    timed = partial(some_times, seconds=_SECONDS_A_TURN)
    kinds = [partial(timed, partial(_draft, batch, width)) for width in widths]
    return dict(zip(widths, taking_turns(kinds, seconds=_SECONDS_A_KIND, slow=_VERY_SLOW).times, strict=True))


def _round_seconds(engine: Engine, policy: FixedGroup, drafts: Mapping[int, float]) -> tuple[dict[int, float], float]:
    """Of rounds without drafts, and of those widths that may be worth it, and their spread.

    drafts: the seconds of drafts alone, by width.
    """
    first = {0: _times_of(engine, policy, 0)}
    for width, alone in drafts.items():
        first[width] = _times_of(engine, policy, width)
        # Not even if every draft were kept would a wider round be worth it.
        if min(first[width]) - _drafting(alone, min(first[width])) > (width + 1) * min(first[0]):
            break
    kinds = [partial(_times_of, engine, policy, width) for width in first]
    found = taking_turns(kinds, first=list(first.values()), seconds=_SECONDS_A_KIND, slow=_VERY_SLOW)
    return dict(zip(first, found.times, strict=True)), found.spread


def _drafting(alone: float, whole: float) -> float:
    """The part of a round that drafting takes: less than a draft alone, which is waited for."""
    return min(alone, _MOST_DRAFTING * whole)


def _batch_of(read: Session, prompt: list[int], lanes: int) -> Batch:
    """So many lanes that answer the prompt, which was `read` but for its last token."""
    assert read.drafter is not None
    batch = Batch(read.target, read.drafter)
    arriving = []
    for _ in range(lanes):
        lane = Lane(
            session=fork(read, len(read.tokens)),
            prompt=prompt,
            strategy=Greedy(),
            policy=FixedWidth(0),
            max_tokens=_TOKENS,
            eos_ids=set(),
        )
        arriving.append(Batch.of(lane, read.drafter))
    batch.arrange(arriving)
    return batch


def _draft(batch: Batch, width: int) -> None:
    assert batch.state is not None
    room = _PROMPT_TOKENS + max(_ROWS)
    drafted = propose(batch.rows, batch.state, Choice(width), anchors=batch.anchors, at=batch.at, room=room)
    mx.eval(drafted.tokens)


def _times_of(engine: Engine, policy: FixedGroup, width: int) -> list[float]:
    """Some times of rounds of a width."""
    # The first one is not timed: it waits for one of the width before, which is on its way.
    policy.width = width
    return some_times(engine.advance, seconds=_SECONDS_A_TURN)
