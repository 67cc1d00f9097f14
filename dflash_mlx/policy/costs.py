"""What a round costs on this machine, by width: measured once for a pair and remembered on disk."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.engine import can_branch
from dflash_mlx.decoding.fork import fork
from dflash_mlx.decoding.policies import Choice
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.steps import propose
from dflash_mlx.decoding.tree import wide_sizes
from dflash_mlx.drafters.contract import Drafter
from dflash_mlx.drafters.ranking import BRANCHES, rank
from dflash_mlx.policy.group import rising
from dflash_mlx.policy.stored import fingerprint, read_json, store
from dflash_mlx.policy.trees_or_chains import MOST_GAIN, PairCosts
from dflash_mlx.policy.width import STEEP, FixedWidth, RoundCosts
from dflash_mlx.runtime import backend
from dflash_mlx.targets.target import Target

_SCHEMA = 13
_PROMPT_TOKENS = 64
# Rounds of a width: some to warm up, then at least `_TIMED_ROUNDS` and as many as take `_SECONDS_A_WIDTH` when nothing
# stalls; a GPU stalls at first, while it compiles.
_TIMED_ROUNDS, _MOST_ROUNDS = 3, 40
_SECONDS_A_WIDTH = 0.2
# One round that takes this long is enough: other work changes it little.
_LONG_ROUND = 0.5
# A round this much slower than a wider one, or than in another turn, was disturbed.
_DISTURBED = 1.25
# Everything is measured in turns, until so many have found the same, and in so many at the most.
_AGREEING, _MOST_TURNS = 2, 4
# A turn stops after about this long; widths not reached are interpolated.
_SECONDS_TO_SPEND = 4.0


def load_or_measure(
    target: Target,
    drafter: Drafter,
    *,
    block_size: int,
    folders: tuple[Path, ...],
    dtype: mx.Dtype,
    report: Callable[[str, float | None], None] | None = None,
) -> PairCosts:
    """The costs of a round, from disk when this pair was measured on this machine before."""
    name = stored_name(target, drafter, block_size=block_size, folders=folders, dtype=dtype)
    try:
        stored = read_json(name)
        return PairCosts(_from_json(stored["chains"]), _from_json(stored["trees"]) if stored["trees"] else None)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        pass  # Not measured yet, or a file that cannot be used: measure.
    if report is not None:
        report("measuring this machine (once for this pair)", None)
    turns: list[PairCosts] = []
    while len(turns) < _MOST_TURNS and not agree(turns):
        turns.append(measure(target, drafter, block_size=block_size))
    usual = alike(turns)
    costs = least(usual)
    # What other work on the machine has spoilt serves for now, and is not remembered.
    good, costs = len(usual) >= _AGREEING and plausible(costs), _smoothed(costs)
    if good:
        store(name, {"chains": _to_json(costs.chains), "trees": _to_json(costs.trees) if costs.trees else None})
    return costs


def stored_name(
    target: Target, drafter: Drafter, *, block_size: int, folders: tuple[Path, ...], dtype: mx.Dtype
) -> str:
    """Under which a pair's costs are remembered."""
    settings = _SCHEMA, drafter.method, block_size, dtype, *target.ways
    return f"round-costs/{fingerprint(folders, *settings)}"


def alike(turns: Sequence[PairCosts]) -> list[PairCosts]:
    """The turns that timed the same rounds as most did.

    Other work may have made the others take width for costly, or trees for too slow.
    """

    def kind(turn: PairCosts) -> tuple[bool, bool]:
        return turn.chains.steep, turn.trees is not None

    usual = Counter(map(kind, turns)).most_common(1)
    return [turn for turn in turns if kind(turn) == usual[0][0]]


def agree(turns: Sequence[PairCosts]) -> bool:
    """Whether enough turns timed the same rounds, and found for each round about the least time twice."""
    usual = alike(turns)
    tables = _times([turn.chains for turn in usual]), _times([turn.trees for turn in usual if turn.trees is not None])
    close = all(times[1] <= _DISTURBED * times[0] for table in tables for times in table.values() if len(times) > 1)
    return len(usual) >= _AGREEING and close and plausible(least(usual))


def least(turns: Sequence[PairCosts]) -> PairCosts:
    """The least time of each round in turns that timed the same ones: other work and compiling only add time."""

    def lowest(kinds: list[RoundCosts]) -> RoundCosts:
        return replace(kinds[-1], round_seconds={width: times[0] for width, times in _times(kinds).items()})

    trees = [turn.trees for turn in turns if turn.trees is not None]
    return PairCosts(lowest([turn.chains for turn in turns]), lowest(trees) if trees else None)


def _times(kinds: Sequence[RoundCosts]) -> dict[int, list[float]]:
    """What some turns found for each width, the least time first."""
    widths = dict.fromkeys(width for kind in kinds for width in kind.round_seconds)
    return {width: sorted(k.round_seconds[width] for k in kinds if width in k.round_seconds) for width in widths}


def _smoothed(costs: PairCosts) -> PairCosts:
    """With figures that never fall: a wider round does not take less time."""

    def smooth(kind: RoundCosts) -> RoundCosts:
        return replace(kind, round_seconds=rising(kind.round_seconds))

    return PairCosts(smooth(costs.chains), smooth(costs.trees) if costs.trees else None)


def plausible(costs: PairCosts) -> bool:
    """Whether no round is measured as much slower than a wider one, which would be other programs' doing."""
    tables = [kind.round_seconds for kind in (costs.chains, costs.trees) if kind is not None]
    return all(
        table[narrow] <= _DISTURBED * table[wide]
        for table in tables
        for narrow in table
        for wide in table
        if wide > narrow
    )


def measure(target: Target, drafter: Drafter, *, block_size: int) -> PairCosts:
    """Time real rounds of the decode loop at several widths, and drafts alone; the most telling widths first.

    Rounds are timed the way they will run: a chain's queued after the last one or, where width costs much, after
    waiting for the draft, by which its width is then chosen. Where trees pay there, they are all that is measured
    further.
    """
    ends_at = time.perf_counter() + _SECONDS_TO_SPEND
    places, session, read = block_size - 1, Session(target, drafter), Session(target, drafter)
    read.feed([0] * _PROMPT_TOKENS)

    def timed(width: int, *, tree: bool = False, waits: bool = False) -> float:
        policy = FixedWidth(width, places=places if tree else 0, waits=waits)
        return _round_seconds(session, policy)

    chains = {width: timed(width) for width in {1, places}}
    steep = chains[places] > STEEP * chains[1]
    trees: dict[int, float] = {}
    if can_branch(target, drafter):
        seconds = timed(places, tree=True, waits=steep)
        if seconds <= MOST_GAIN * chains[places]:
            trees[places] = seconds
    if steep and not trees:
        chains.clear()

    plain = timed(0)
    chains[0] = plain
    if trees:
        trees[0] = plain
    drafts: dict[int, float] = {}
    wide = wide_sizes(places)
    for width in dict.fromkeys([places, 1, places // 2, wide[0], 3, wide[1], 2, 5, 4, 11]):
        if len(drafts) >= 3 and time.perf_counter() > ends_at:
            break
        if 0 < width <= places:
            drafts[width] = _draft_seconds(read, width)
            if width not in chains and not (steep and trees):
                chains[width] = timed(width, waits=steep)
        if trees and width not in trees and (width <= places or width in wide):
            trees[width] = timed(width, tree=True, waits=steep)
    return PairCosts(
        RoundCosts(chains, drafts, steep=steep),
        RoundCosts(trees, drafts, steep=steep, places=places) if trees else None,
    )


def _round_seconds(session: Session, policy: FixedWidth) -> float:
    """A round after a prompt, which the session may hold already."""
    session.rewind(_PROMPT_TOKENS - 1)
    prompt = [i % session.target.vocab_size for i in range(1, _PROMPT_TOKENS + 1)]
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
    warm_up = 1 if backend().kind == "cpu" else 3
    for _, _ in zip(range(_MOST_ROUNDS), steps, strict=False):
        now = time.perf_counter()
        times.append(now - last)
        last = now
        timed = times[warm_up:]
        if timed and min(timed) > _LONG_ROUND:
            break
        if len(timed) >= _TIMED_ROUNDS and len(timed) * min(timed) > _SECONDS_A_WIDTH:
            break
    steps.close()
    return statistics.median(times[warm_up:])


def _draft_seconds(read: Session, width: int) -> float:
    """A draft with its candidates after what was `read`, alone; less than the difference between two rounds, which
    overlap."""
    assert read.drafter is not None
    state = read.drafter.open(read.target, fork(read, _PROMPT_TOKENS).draft_cache, _PROMPT_TOKENS)
    at, anchors = mx.array([_PROMPT_TOKENS]), mx.array([0])
    times = []
    for _ in range(1 + _TIMED_ROUNDS):
        started = time.perf_counter()
        drafted = propose([None], state, Choice(width), anchors=anchors, at=at, room=_PROMPT_TOKENS + width + 1)
        ids = state.vocabulary.token_ids if state.vocabulary else None
        mx.eval(drafted.tokens, rank(drafted.logits[0], BRANCHES, ids).log_probs if drafted.logits is not None else [])
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def _to_json(costs: RoundCosts) -> dict[str, Any]:
    return {
        "round_seconds": costs.round_seconds,
        "draft_seconds": costs.draft_seconds,
        "steep": costs.steep,
        "places": costs.places,
    }


def _from_json(stored: dict[str, Any]) -> RoundCosts:
    rounds, drafts = (
        {int(width): float(seconds) for width, seconds in stored[name].items()}
        for name in ("round_seconds", "draft_seconds")
    )
    return RoundCosts(rounds, drafts, steep=bool(stored["steep"]), places=int(stored["places"]))
