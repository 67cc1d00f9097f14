"""Where a round's time goes, and how much of the memory's speed it uses: what the runs themselves do not show."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import mlx.core as mx

from dflash_mlx.bench.record import Round
from dflash_mlx.decoding.policies import Choice
from dflash_mlx.decoding.steps import propose
from dflash_mlx.pair import ModelPair
from dflash_mlx.targets.target import weight_bytes

_CONTEXT = 64  # tokens in the cache while a pass is timed
_ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class Split:
    """A round of the commonest width, in milliseconds. rest_ms: what neither the draft nor the pass explains.

    Draft and verification are timed by themselves after the runs, each to its end. In the loop they overlap with the
    host's work, so the rest is what the host adds, and can be next to nothing. None where they overlap so much that the
    parts alone take longer than the whole.
    """

    width: int
    round_ms: float
    draft_ms: float
    verify_ms: float
    rest_ms: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def split_round(pair: ModelPair, rounds: Sequence[Round]) -> Split | None:
    """Measure the parts of the commonest kind of round; None without rounds that drafted."""
    counted = Counter((r.width, r.depth) for r in rounds)
    if not counted or pair.drafter is None:
        return None
    [((width, depth), _)] = counted.most_common(1)
    whole = median(r.ms for r in rounds if (r.width, r.depth) == (width, depth))
    # A tree holds several drafts for a place, and its draft always fills all places. A small one may be a chain.
    places = pair.block_size - 1 if any(r.depth < r.width for r in rounds) else width
    draft = draft_ms(pair, places)
    verify = pass_ms(pair, width + 1)
    rest = whole - draft - verify
    return Split(width=width, round_ms=whole, draft_ms=draft, verify_ms=verify, rest_ms=rest if rest >= 0 else None)


def draft_ms(pair: ModelPair, places: int) -> float:
    """A draft of this many places, alone, to its end."""
    assert pair.drafter is not None
    session = pair.new_session()
    session.feed([0] * _CONTEXT)
    state = pair.drafter.open(pair.target, session.draft_cache, _CONTEXT)
    anchors, at = mx.array([0]), mx.array([_CONTEXT])
    room = _CONTEXT + places + 1
    return _shortest_ms(lambda: propose([None], state, Choice(places), anchors=anchors, at=at, room=room).tokens)


def pass_ms(pair: ModelPair, rows: int) -> float:
    """The target's pass over this many rows, alone, to its end."""
    cache = pair.target.make_cache()
    mx.eval(pair.target.forward(mx.zeros((1, _CONTEXT), mx.int32), cache))
    tokens = mx.zeros((1, rows), mx.int32)
    return _shortest_ms(lambda: pair.target.forward(tokens, cache))


def _shortest_ms(compute: Callable[[], mx.array]) -> float:
    """Of some rounds, after one that does not count: what other programs add is no part of it."""
    times = []
    for _ in range(1 + _ROUNDS):
        started = time.perf_counter()
        mx.eval(compute())
        times.append(time.perf_counter() - started)
    return min(times[1:]) * 1000


def bytes_a_pass(pair: ModelPair, *, draft: bool) -> int:
    """The weights that a round reads: the target's and, with drafts, the drafter's."""
    networks = pair.drafter.networks if draft and pair.drafter is not None else ()
    return pair.target.weight_bytes + sum(weight_bytes(network) for network in networks)


def share_of_bandwidth(bytes_read: float, seconds: float, bandwidth: float) -> float | None:
    """How much of the memory's measured speed reading the weights alone takes; 1 is all of it."""
    return bytes_read / seconds / bandwidth if seconds > 0 and bandwidth > 0 else None
