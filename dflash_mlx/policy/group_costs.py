"""What the parts of a shared round cost on this machine: measured once for a pair and remembered on disk."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.batch import Batch
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.steps import propose
from dflash_mlx.drafters.contract import Drafter
from dflash_mlx.policy.group import GroupCosts, rising
from dflash_mlx.policy.stored import fingerprint, read_stored, store
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.targets.target import Target

_SCHEMA = 2
_PROMPT_TOKENS = 64
_TIMED, _SECONDS_A_POINT = 5, 0.25
# Where a pass of single rows takes this long, measuring stops after about this many seconds; the rest is interpolated.
_SLOW, _SECONDS_TO_SPEND = 0.03, 10.0
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
    tables = read_stored(name, ("plain", "verify", "draft"))
    if tables is None:
        if report is not None:
            report("measuring this machine with several answers at once (once for this pair)", None)
        costs = measure_group(target, drafter, places=places, most_lanes=most_lanes)
        tables = {"plain": dict(costs.plain), "verify": dict(costs.verify), "draft": dict(costs.draft)}
        store(name, tables)
    return GroupCosts(tables["plain"], tables["verify"], tables["draft"])


def measure_group(target: Target, drafter: Drafter, *, places: int, most_lanes: int) -> GroupCosts:
    """Time passes of both models over the rows of 2, 4, 8, ... lanes."""
    started = time.perf_counter()
    plain: dict[int, float] = {}
    verify: dict[int, float] = {}
    draft: dict[int, float] = {}
    lanes = 2
    while lanes <= most_lanes:
        batch = _batch_of(target, drafter, lanes)
        plain[lanes] = _seconds(_verify, batch, 1)
        for rows in _ROWS:
            if rows > places + 1:
                break
            if lanes * rows not in verify:
                verify[lanes * rows] = _seconds(_verify, batch, rows)
                draft[lanes * rows] = _seconds(_draft, batch, rows)
            # Not even if every draft were kept would a wider round be worth it.
            if verify[lanes * rows] > rows * plain[lanes]:
                break
        # A GPU compiles at first, which is no reason to stop; slow passes are.
        if plain[lanes] > _SLOW and time.perf_counter() - started > _SECONDS_TO_SPEND:
            break
        lanes *= 2
    return GroupCosts(rising(plain), rising(verify), rising(draft))


def _batch_of(target: Target, drafter: Drafter, lanes: int) -> Batch:
    prompt = [i % target.vocab_size for i in range(1, _PROMPT_TOKENS + 1)]
    batch = Batch(target, drafter)
    arriving = []
    for _ in range(lanes):
        session = Session(target, drafter)
        session.feed(prompt[:-1])
        arriving.append(
            Lane(session=session, prompt=prompt, strategy=Greedy(), policy=FixedWidth(0), max_tokens=1, eos_ids=set())
        )
    batch.arrange([Batch.of(lane, drafter) for lane in arriving])
    return batch


def _verify(batch: Batch, rows: int) -> None:
    assert batch.caches is not None
    lanes = len(batch.rows)
    block = mx.full((lanes, rows), 1, dtype=mx.uint32)
    logits, features = batch.caches.feed(batch.model, block, at=batch.at, room=_PROMPT_TOKENS + max(_ROWS))
    batch.caches.commit(rows, [1] * lanes)
    mx.eval(mx.argmax(logits, axis=-1), features)


def _draft(batch: Batch, rows: int) -> None:
    assert batch.state is not None
    room = _PROMPT_TOKENS + max(_ROWS)
    drafted = propose(batch.rows, batch.state, rows - 1, anchors=batch.anchors, at=batch.at, room=room)
    mx.eval(drafted.tokens)


def _seconds(work: Callable[[Batch, int], None], batch: Batch, rows: int) -> float:
    """The median of a few runs, after one to warm up; of more where they are quick, since GPUs stall at first."""
    work(batch, rows)
    times: list[float] = []
    while len(times) < _TIMED and (len(times) < 2 or len(times) * min(times) < _SECONDS_A_POINT):
        started = time.perf_counter()
        work(batch, rows)
        times.append(time.perf_counter() - started)
    return statistics.median(times)
