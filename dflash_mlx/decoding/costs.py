"""What a round costs on this machine, by width: measured once for a pair and remembered on disk."""

import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.engine import consider, decode, draft, verify
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.tree import wide_sizes
from dflash_mlx.decoding.width import STEEP, FixedWidth, RoundCosts
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.hub.registry import cache_home
from dflash_mlx.runtime import backend
from dflash_mlx.targets.target import Target

_SCHEMA = 6
_PROMPT_TOKENS = 64
# Rounds of a width: some to warm up, then at least `_TIMED_ROUNDS` and `_SECONDS_A_WIDTH`.
_WARM_UP_ROUNDS, _TIMED_ROUNDS, _MOST_ROUNDS = 3, 3, 24
_SECONDS_A_WIDTH = 0.08
# A round this much slower than a wider one was disturbed.
_DISTURBED = 1.25
# Measuring stops after about this long; widths not reached are interpolated.
_SECONDS_TO_SPEND = 4.0
# How many times as many tokens as a chain of all places a round gains at least by a tree of as many drafts, and of
# twice as many and one: for the demo pair 1.23 and 1.35 on the built-in prompts, and 1.14 for the first on its own
# answers. So much longer may it take.
_TREE_GAIN, _WIDE_TREE_GAIN = 1.15, 1.25


def load_or_measure(
    target: Target,
    drafter: DFlashDrafter,
    *,
    block_size: int,
    folders: tuple[Path, ...],
    dtype: mx.Dtype,
    report: Callable[[str, float | None], None] | None = None,
) -> RoundCosts:
    """The costs of a round, from disk when this pair was measured on this machine before."""
    path = cache_home() / "round-costs" / f"{_fingerprint(folders, block_size, dtype)}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        rounds, drafts = _table(stored["round_seconds"]), _table(stored["draft_seconds"])
        return RoundCosts(rounds, drafts, steep=bool(stored["steep"]), places=int(stored["places"]))
    except (OSError, ValueError, KeyError, AttributeError):
        pass  # Not measured yet, or a file that cannot be used: measure.
    if report is not None:
        report("measuring this machine (once for this pair)", None)
    costs = measure(target, drafter, block_size=block_size)
    if not plausible(costs):
        costs = measure(target, drafter, block_size=block_size)
    # What other work on the machine has spoilt serves for now, and is not remembered.
    if plausible(costs):
        _store(path, costs)
    return costs


def plausible(costs: RoundCosts) -> bool:
    """Whether no round is measured as much slower than a wider one, which would be other programs' doing."""
    seconds = [costs.round_seconds[width] for width in sorted(costs.round_seconds)]
    return all(narrow <= _DISTURBED * wide for i, narrow in enumerate(seconds) for wide in seconds[i + 1 :])


def measure(target: Target, drafter: DFlashDrafter, *, block_size: int) -> RoundCosts:
    """Time real rounds of the decode loop at several widths, and drafts alone; the most telling widths first.

    Drafts are a tree where the target takes that and it gains more than the time by which its rounds are longer than a
    chain's, which can be queued ahead. Where width costs much, each round's is chosen by confidence, also a chain's:
    the host then waits for the draft before it builds the round. Rounds are timed the way they will run.
    """
    started = time.perf_counter()
    places = block_size - 1
    ends = {width: _round_seconds(target, drafter, FixedWidth(width)) for width in {1, places}}
    steep = ends[places] > STEEP * ends[1]
    rounds = {} if steep else ends
    branches = False
    if Session(target, drafter).can_branch():
        trees: dict[int, float] = {}
        for width, gain in ((places, _TREE_GAIN), (wide_sizes(places)[0], _WIDE_TREE_GAIN)):
            trees[width] = _round_seconds(target, drafter, FixedWidth(width, places=places))
            branches = trees[width] < gain * ends[places]
            if branches:
                rounds = trees
                break
    drafts: dict[int, float] = {}
    for width in _order(places, branches=branches):
        if len(drafts) >= 3 and time.perf_counter() - started > _SECONDS_TO_SPEND:
            break
        if width not in rounds:
            fixed = FixedWidth(width, places=places if branches else 0, reads_confidence=steep or branches)
            rounds[width] = _round_seconds(target, drafter, fixed)
        if 0 < width <= places:
            drafts[width] = _draft_seconds(target, drafter, width)
    return RoundCosts(rounds, drafts, steep=steep, places=places if branches else 0)


def _order(places: int, *, branches: bool) -> list[int]:
    """Widths to measure, the most telling first. A tree may be wider than the places drafted."""
    wide, widest = wide_sizes(places)
    wanted = [0, places, 1, places // 2, wide, 3, widest, 2, 5, 4, 11]
    return list(dict.fromkeys(w for w in wanted if 0 <= w <= places or (branches and w in (wide, widest))))


def _round_seconds(target: Target, drafter: DFlashDrafter, policy: FixedWidth) -> float:
    session = Session(target, drafter)
    prompt = [i % target.vocab_size for i in range(1, _PROMPT_TOKENS + 1)]
    times: list[float] = []
    steps = decode(
        session,
        prompt,
        strategy=Greedy(),
        policy=policy,
        # As many tokens as rounds could gain, so that none is cut short.
        max_tokens=(_MOST_ROUNDS + 3) * (max(policy.width, policy.places) + 1),
        eos_ids=set(),
    )
    # The first step is the prompt's own.
    next(steps)
    last = time.perf_counter()
    for _, _ in zip(range(_MOST_ROUNDS), steps, strict=False):
        now = time.perf_counter()
        times.append(now - last)
        last = now
        timed = times[_WARM_UP_ROUNDS:]
        if len(timed) >= _TIMED_ROUNDS and sum(timed) > _SECONDS_A_WIDTH:
            break
    steps.close()
    return statistics.median(times[_WARM_UP_ROUNDS:])


def _draft_seconds(target: Target, drafter: DFlashDrafter, width: int) -> float:
    """A draft with its candidates, alone; less than the difference between two rounds, which overlap."""
    session = Session(target, drafter)
    first = verify(session, mx.zeros(_PROMPT_TOKENS, dtype=mx.uint32), None, Greedy(), None, None)
    times = []
    for _ in range(1 + _TIMED_ROUNDS):
        started = time.perf_counter()
        proposal = draft(session, first, width, Greedy())
        mx.eval(proposal.tokens, consider(session, proposal, Greedy(), 0, branches=True).packed)
        times.append(time.perf_counter() - started)
        first.features = None
    return statistics.median(times[1:])


def _table(stored: dict[str, float]) -> dict[int, float]:
    return {int(width): float(seconds) for width, seconds in stored.items()}


def _fingerprint(folders: tuple[Path, ...], block_size: int, dtype: mx.Dtype) -> str:
    """Changes with anything that changes what a round costs."""
    machine = backend()
    parts = [
        _SCHEMA,
        machine.kind,
        machine.chip,
        machine.mlx_version,
        machine.blas,
        os.cpu_count(),
        block_size,
        dtype,
    ]
    digest = hashlib.sha256("|".join(map(str, parts)).encode())
    for folder in folders:
        digest.update((folder / "config.json").read_bytes())
        for file in sorted(folder.glob("*.safetensors")):
            digest.update(f"{file.name}:{file.stat().st_size}".encode())
    return digest.hexdigest()[:24]


def _store(path: Path, costs: RoundCosts) -> None:
    """Write the costs; a read-only cache folder only means that they are measured again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            stored = {
                "round_seconds": costs.round_seconds,
                "draft_seconds": costs.draft_seconds,
                "steep": costs.steep,
                "places": costs.places,
            }
            json.dump(stored, file)
        os.replace(file.name, path)
    except OSError:
        pass
