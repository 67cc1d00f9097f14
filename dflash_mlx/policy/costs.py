"""What a round costs on this machine, by width: measured once for a pair and remembered on disk."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.decoding.choosing import can_branch
from dflash_mlx.decoding.tree import wide_sizes
from dflash_mlx.drafters.contract import Drafter
from dflash_mlx.policy.group import rising
from dflash_mlx.policy.stored import UNUSABLE, fingerprint, read_json, store, table_of
from dflash_mlx.policy.timing import PLAIN, Rounds, Timer
from dflash_mlx.policy.trees_or_chains import MOST_GAIN, PairCosts
from dflash_mlx.policy.width import DEPTHS, SHALLOW, STEEP, FixedWidth, RoundCosts
from dflash_mlx.runtime import backend
from dflash_mlx.targets.target import Target

_SCHEMA = 26
# On CUDA rounds are timed after so many tokens, too, since on a fast GPU attention shows only there; unless caches of
# one answer then take more than this share of the memory.
_FURTHER, _MOST_MEMORY = (3840, 16128), 0.02
# A round this much slower than in another turn was disturbed; so was one that is so much slower than a wider one. By
# less it may be slower: 12 rows take OpenBLAS a fifth longer than 16.
_DISTURBED, _IMPLAUSIBLE = 1.25, 1.4
# Everything is measured in turns, until so many have found the same; in so many at the most, and in the second number
# where they take as many seconds. Where rounds wait for drafts, one is enough in which their spread was small.
_AGREEING, _MOST_TURNS, _MOST_LONG, _LONG = 2, 8, 3, 20.0
_SMALL_SPREAD = 0.1
# The share of rounds for which it need not be found twice.
_MOST_FAR = 0.1
# Where width costs much, a round of each width that is timed takes this long in all at the most; where it costs little,
# a few times as long. Other widths are interpolated.
_SECONDS_TO_SPEND = 1.25
# The fewest widths, a tree with more drafts than places among them, and the most where rounds do not wait for their
# drafts: each may have to be compiled.
_FEWEST, _FEW = 4, 10
# Rounds that it takes to time one of those, about.
_ROUNDS_EACH = 12


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
        trees = _from_json(stored["trees"]) if stored["trees"] else None
        return PairCosts(_from_json(stored["chains"]), trees, float(stored["spread"]))
    except UNUSABLE:
        pass  # Not measured yet, or a file that cannot be used: measure.
    if report is not None:
        report("measuring this machine (once for this pair)", None)
    turns: list[PairCosts] = []
    ends_at = time.perf_counter() + _LONG
    while len(turns) < (_MOST_TURNS if time.perf_counter() < ends_at else _MOST_LONG) and not agree(turns):
        turns.append(measure(target, drafter, block_size=block_size))
    usual = alike(turns)
    costs = least(usual)
    # What other work on the machine has spoilt serves for now, and is not remembered.
    good, costs = (len(usual) >= _AGREEING or _is_steady(turns)) and plausible(costs), _smoothed(costs)
    costs.spread = statistics.median(turn.spread for turn in usual)
    if good:
        kinds = {"chains": _to_json(costs.chains), "trees": _to_json(costs.trees) if costs.trees else None}
        store(name, {**kinds, "spread": costs.spread})
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
    """Whether enough turns timed the same rounds, and found for each round about the least time twice; or one did."""
    if _is_steady(turns):
        return True
    usual = alike(turns)
    twice = _found_twice(usual)
    far = sum(times[1] > _DISTURBED * times[0] for times in twice)
    return len(usual) >= _AGREEING and far <= _MOST_FAR * len(twice) and plausible(least(usual))


def _is_steady(turns: Sequence[PairCosts]) -> bool:
    """Whether one turn was enough: width costs much, in the rounds that wait, too, and these had a small spread.

    Where width costs little, rounds are quick, and so is another turn.
    """
    if len(turns) != 1 or not turns[0].chains.steep:
        return False
    kind = turns[0].trees or turns[0].chains
    wide, narrow = kind.round(kind.places or max(kind.round_seconds)), kind.round(1, drafted=1)
    return wide > STEEP * narrow and turns[0].spread <= _SMALL_SPREAD and plausible(turns[0])


def _found_twice(turns: Sequence[PairCosts]) -> list[list[float]]:
    """What turns found for each kind of round that several have timed, the least times first."""
    chains, trees = [turn.chains for turn in turns], [turn.trees for turn in turns if turn.trees is not None]
    tables = [_times([kind.round_seconds for kind in kinds]) for kinds in (chains, trees)]
    return [times for table in tables for times in table.values() if len(times) > 1]


def least(turns: Sequence[PairCosts]) -> PairCosts:
    """The least time of each round in turns that timed the same ones: other work and compiling only add time."""

    def lowest(kinds: Sequence[RoundCosts]) -> RoundCosts:
        return _merged(kinds, lambda tables: {width: times[0] for width, times in _times(tables).items()})

    trees = [turn.trees for turn in turns if turn.trees is not None]
    return PairCosts(lowest([turn.chains for turn in turns]), lowest(trees) if trees else None)


def _merged(kinds: Sequence[RoundCosts], merge: Callable[[Sequence[dict[int, float]]], dict[int, float]]) -> RoundCosts:
    """The last of these, with each table of seconds by width made of theirs."""
    last = kinds[-1]
    return replace(
        last,
        round_seconds=merge([kind.round_seconds for kind in kinds]),
        draft_seconds=merge([kind.draft_seconds for kind in kinds]),
        deeper={depth: merge([kind.deeper[depth] for kind in kinds]) for depth in last.deeper},
    )


def _times(tables: Sequence[dict[int, float]]) -> dict[int, list[float]]:
    """What some turns found for each width, the least time first."""
    widths = dict.fromkeys(width for table in tables for width in table)
    return {width: sorted(table[width] for table in tables if width in table) for width in widths}


def _smoothed(costs: PairCosts) -> PairCosts:
    """With figures that never fall: a wider round does not take less time, since nobody has to use what it drafts."""

    def smooth(kind: RoundCosts) -> RoundCosts:
        return _merged([kind], lambda tables: rising(tables[0]) if tables[0] else {})

    return PairCosts(smooth(costs.chains), smooth(costs.trees) if costs.trees else None)


def plausible(costs: PairCosts) -> bool:
    """Whether no round is measured as much slower than a wider one, which would be other programs' doing."""
    tables = [kind.round_seconds for kind in (costs.chains, costs.trees) if kind is not None]
    return all(
        table[narrow] <= _IMPLAUSIBLE * table[wide]
        for table in tables
        for narrow in table
        for wide in table
        if wide > narrow
    )


def measure(target: Target, drafter: Drafter, *, block_size: int) -> PairCosts:
    """Time real rounds of the decode loop at several widths and after some lengths of context, and drafts alone.

    Rounds are timed the way they will run: a chain's queued after the last one or, where width costs much, after
    waiting for the draft, by which its width is then chosen. Where trees pay there, they are all that is measured
    further.
    """
    places, timer = block_size - 1, Timer(target, drafter)
    tree = [FixedWidth(places, places=places)] if can_branch(target, drafter) else []
    plain, narrow, wide, *branched = timer.rounds(
        [Rounds(kind) for kind in (*map(FixedWidth, (0, 1, places)), *tree)]
    ).times
    steep, chains = wide > STEEP * narrow, {0: plain, 1: narrow, places: wide}
    trees = {0: plain, places: branched[0]} if branched and branched[0] <= MOST_GAIN * wide else {}
    costs = PairCosts(
        RoundCosts(chains, {}, steep=steep),
        RoundCosts(trees, {}, steep=steep, places=places) if trees else None,
    )
    costs.spread = (_measure_waiting if steep else _measure_queued)(costs, places, timer, _depths(target))
    return costs


def _depths(target: Target) -> list[int]:
    """After how many tokens of context rounds are timed, besides `SHALLOW`."""
    further = _FURTHER if backend().kind == "cuda" else ()
    return [
        *(depth for depth in DEPTHS if _may_reach(target, depth)),
        *(depth for depth in further if _may_reach(target, depth) and _has_room(target, depth)),
    ]


def _may_reach(target: Target, depth: int) -> bool:
    """Whether a context of so many tokens can be had without reading it, and rounds after it."""
    return target.takes_rows() and (target.context_length is None or target.context_length >= 2 * depth)


def _has_room(target: Target, depth: int) -> bool:
    """Whether several answers with such a context, which are timed in turns, take little of the machine's memory."""
    layers = target.blank_rows(1, depth).rows.attention
    needed = sum(array.nbytes for layer in layers for array in layer.state)
    return needed <= _MOST_MEMORY * backend().memory_bytes


def _measure_queued(costs: PairCosts, places: int, timer: Timer, depths: Sequence[int]) -> float:
    """Where width costs little: a few widths of chains, and sizes of trees. After a long context fewer, if any.

    Returns the rounds' spread, as `_measure_waiting` does.
    """
    kinds = [kind for kind in (costs.chains, costs.trees) if kind is not None]
    # Each is timed for a few rounds, and some more to warm up.
    rounds = _SECONDS_TO_SPEND / costs.chains.round_seconds[places] / _ROUNDS_EACH
    widths = _order(places)[: max(_FEWEST, min(_FEW, int(rounds / len(kinds))))]
    drafts = {width: timer.draft(width) for width in widths if width <= places}
    few = sorted({places, *wide_sizes(places)} & set(widths))

    def asked(kind: RoundCosts, widths: Sequence[int], depth: int) -> dict[int, Rounds]:
        """By width, plain ones too. Chains have as many drafts as places at the most."""
        own = (width for width in (0, *widths) if kind.places or width <= places)
        return {width: Rounds(FixedWidth(width, places=kind.places if width else 0), depth) for width in own}

    tables = [
        {depth: asked(kind, few if depth > SHALLOW else widths, depth) for depth in (SHALLOW, *depths)}
        for kind in kinds
    ]
    # All in the same turns, since it is by their differences that widths, and lengths of context, are compared.
    together = list(dict.fromkeys(each for of_kind in tables for table in of_kind.values() for each in table.values()))
    found = timer.rounds(together)
    seconds = dict(zip(together, found.times, strict=True))
    for kind, of_kind in zip(kinds, tables, strict=True):
        kind.deeper = {depth: {w: seconds[each] for w, each in table.items()} for depth, table in of_kind.items()}
        kind.round_seconds, kind.draft_seconds = kind.deeper.pop(SHALLOW), drafts
    return found.spread


def _measure_waiting(costs: PairCosts, places: int, timer: Timer, depths: Sequence[int]) -> float:
    """Where width costs much, and in steps: many numbers of drafts, or as many as there is time for."""
    kind = costs.trees or costs.chains
    affordable = max(_FEWEST, int(_SECONDS_TO_SPEND / kind.round_seconds[places]))
    wide, widest = wide_sizes(places)
    widths = [width for width in _order(places) if width <= places or (kind.places and width == wide)][:affordable]
    drafts = {width: timer.draft(width) for width in widths if width <= places}
    few = sorted({1, places} & set(widths))
    asked = {SHALLOW: [PLAIN, 0, *widths], **{depth: [PLAIN, *few] for depth in depths}}
    tree = widest if kind.places else 0
    found, spread = timer.waiting(asked, places=places, tree=tree)
    # Waiting takes time beyond that of the draft.
    waited = max(0.0, found[SHALLOW].pop(0) - found[SHALLOW][PLAIN] - drafts[places])
    costs.chains.draft_seconds = kind.draft_seconds = {width: draft + waited for width, draft in drafts.items()}

    def seconds(times: dict[int, float]) -> dict[int, float]:
        """A chain's rounds with a draft of its own width; all were made after a draft of all places."""
        plain = times.pop(PLAIN)
        return {0: plain} | (times if kind.places else {w: times[w] - drafts[places] + drafts[w] for w in times})

    kind.deeper = {depth: seconds(times) for depth, times in found.items()}
    kind.round_seconds = kind.deeper.pop(SHALLOW)
    if kind.round_seconds.get(wide, math.inf) < STEEP * kind.round_seconds[places]:
        more = timer.waiting({SHALLOW: [places, widest]}, places=places, tree=tree)[0][SHALLOW]
        kind.round_seconds[widest] = kind.round_seconds[places] * more[widest] / more[places]
    return spread


def _order(places: int) -> list[int]:
    """Numbers of drafts in the order in which they are measured, the most telling ones first."""
    wide, widest = wide_sizes(places)
    # Kernels take rows in fours, fives, eights or sixteens, and one row more may take another pass over the weights.
    order = [places, 1, places // 2, wide, 3, widest, 11, 5, 2, 4, 8, 9, 12]
    return [width for width in dict.fromkeys(order) if 0 < width <= places or width in (wide, widest)]


def _to_json(costs: RoundCosts) -> dict[str, Any]:
    return {name: getattr(costs, name) for name in ("round_seconds", "draft_seconds", "deeper", "steep", "places")}


def _from_json(stored: dict[str, Any]) -> RoundCosts:
    deeper = {int(depth): table_of(found) for depth, found in stored["deeper"].items()}
    tables = table_of(stored["round_seconds"]), table_of(stored["draft_seconds"])
    return RoundCosts(*tables, steep=bool(stored["steep"]), places=int(stored["places"]), deeper=deeper)
