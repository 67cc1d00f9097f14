"""What a round costs on this machine, by width: measured once for a pair and remembered on disk."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.engine import can_branch
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
from dflash_mlx.targets.target import Target

_SCHEMA = 12
_PROMPT_TOKENS = 64
# Rounds of a width: some to warm up, then at least `_TIMED_ROUNDS` and as many as take `_SECONDS_A_WIDTH` when nothing
# stalls; a GPU stalls at first, while it compiles.
_WARM_UP_ROUNDS, _TIMED_ROUNDS, _MOST_ROUNDS = 3, 3, 40
_SECONDS_A_WIDTH = 0.2
# One round that takes this long is enough: other work changes it little.
_LONG_ROUND = 0.5
# A round this much slower than a wider one was disturbed.
_DISTURBED = 1.25
# Measuring stops after about this long; widths not reached are interpolated.
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
    costs = measure(target, drafter, block_size=block_size)
    if not plausible(costs):
        costs = least(costs, measure(target, drafter, block_size=block_size))
    # What other work on the machine has spoilt serves for now, and is not remembered.
    good, costs = plausible(costs), _smoothed(costs)
    if good:
        store(name, {"chains": _to_json(costs.chains), "trees": _to_json(costs.trees) if costs.trees else None})
    return costs


def stored_name(
    target: Target, drafter: Drafter, *, block_size: int, folders: tuple[Path, ...], dtype: mx.Dtype
) -> str:
    """Under which a pair's costs are remembered."""
    settings = _SCHEMA, drafter.method, block_size, dtype, *target.ways
    return f"round-costs/{fingerprint(folders, *settings)}"


def least(first: PairCosts, second: PairCosts) -> PairCosts:
    """The second measurement, with the lower figure for each round: other work, and compiling, only add time."""

    def lower(old: RoundCosts | None, new: RoundCosts | None) -> RoundCosts | None:
        if old is None or new is None or old.steep != new.steep:
            return new
        known, seconds = old.round_seconds, new.round_seconds
        return replace(new, round_seconds={width: min(s, known.get(width, s)) for width, s in seconds.items()})

    return PairCosts(lower(first.chains, second.chains) or second.chains, lower(first.trees, second.trees))


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
    places = block_size - 1

    def timed(width: int, *, tree: bool = False, waits: bool = False) -> float:
        policy = FixedWidth(width, places=places if tree else 0, waits=waits)
        return _round_seconds(target, drafter, policy)

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
            drafts[width] = _draft_seconds(target, drafter, width)
            if width not in chains and not (steep and trees):
                chains[width] = timed(width, waits=steep)
        if trees and width not in trees and (width <= places or width in wide):
            trees[width] = timed(width, tree=True, waits=steep)
    return PairCosts(
        RoundCosts(chains, drafts, steep=steep),
        RoundCosts(trees, drafts, steep=steep, places=places) if trees else None,
    )


def _round_seconds(target: Target, drafter: Drafter, policy: FixedWidth) -> float:
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
        if timed and min(timed) > _LONG_ROUND:
            break
        if len(timed) >= _TIMED_ROUNDS and len(timed) * min(timed) > _SECONDS_A_WIDTH:
            break
    steps.close()
    return statistics.median(times[_WARM_UP_ROUNDS:])


def _draft_seconds(target: Target, drafter: Drafter, width: int) -> float:
    """A draft with its candidates, alone; less than the difference between two rounds, which overlap."""
    session = Session(target, drafter)
    session.feed([0] * _PROMPT_TOKENS)
    state = drafter.open(target, session.draft_cache, _PROMPT_TOKENS)
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
