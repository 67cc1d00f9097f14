"""Whether a kernel is used for a shape: a race against MLX's own operation on this machine, remembered on disk.

A kernel wins where it gives the same numbers up to rounding, takes at least 5 % less time and never stalls. Races are
run for several numbers of rows, since MLX's own operations take turns for the worse at some of them, and at others on
another chip. Anything odd is a lost race, with a note that says why.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx

from dflash_mlx.policy.stored import fingerprint, read_json, store
from dflash_mlx.rounding import relative_difference

# Numbers of rows that are raced; what lies between two of them follows both.
ROWS = (2, 4, 6, 8, 12, 16, 24, 32)
# Root mean square of the difference between two ways to a product, relative to its spread, that is rounding.
DIFFERENCE = {mx.float32: 1e-5, mx.float16: 5e-3, mx.bfloat16: 2e-2}
# A kernel must be this much faster: less would be noise. No run may take longer than a stall.
_GAIN, _STALL_SECONDS = 0.05, 0.1
# Turns that are timed: so many, and more where they are quick, until they have taken this long together.
_TIMED, _MOST_TIMED, _SECONDS = 3, 12, 0.1
# Operands of one kind in a race: the most, and the bytes that are enough.
_OPERANDS, _BYTES = 16, 100_000_000
_SCHEMA = 3

W = TypeVar("W")
Report = Callable[[str, float | None], None]
# Computes several products of one kind, so that a run takes long enough to be timed.
Way = Callable[[mx.array], Sequence[mx.array]]


@dataclass(frozen=True)
class Verdict:
    """What a race for one shape found. `seconds`: by rows, MLX's operation and the kernel; `note`: what was odd."""

    seconds: dict[int, tuple[float, float]] = field(default_factory=dict)
    note: str = ""

    def won(self, rows: int) -> bool:
        """Whether the kernel is used for this many rows: where those that were raced, below and above, were won."""
        if rows in self.seconds:
            ordinary, own = self.seconds[rows]
            return is_faster(own, ordinary)
        below, above = ([raced for raced in self.seconds if (raced < rows) == smaller] for smaller in (True, False))
        return bool(below and above) and self.won(max(below)) and self.won(min(above))

    def used_for(self) -> tuple[bool, ...]:
        """By number of rows, from 0 up to the most that were raced."""
        return tuple(self.won(rows) for rows in range(max(self.seconds, default=-1) + 1))

    def to_json(self) -> dict[str, Any]:
        return {"seconds": {str(rows): list(pair) for rows, pair in self.seconds.items()}, "note": self.note}


def verdict_from_json(stored: dict[str, Any]) -> Verdict:
    """Raises KeyError, TypeError and ValueError for what is no verdict."""
    seconds = {int(rows): (float(ordinary), float(own)) for rows, (ordinary, own) in stored["seconds"].items()}
    return Verdict(seconds, str(stored["note"]))


def race(ordinary: Way, own: Way, inputs: Callable[[int], mx.array], rows: Sequence[int] = ROWS) -> Verdict:
    """Let two ways take turns. inputs: a number of rows -> what both compute with.

    The first number of rows at which something is odd ends the race; what was won before counts.
    """
    seconds: dict[int, tuple[float, float]] = {}
    for count in rows:
        try:
            x = inputs(count)
            for found, expected in zip(own(x), ordinary(x), strict=True):
                difference = relative_difference(found, expected)
                # The comparison is false for NaN, too.
                if not difference <= DIFFERENCE[expected.dtype]:
                    return Verdict(seconds, f"{count} rows differ from MLX's by {difference:.2g}")
            times = take_turns((ordinary, own), partial(_seconds, x=x), most=_MOST_TIMED, enough=_SECONDS)
        except (RuntimeError, ValueError) as error:  # no compiler, or one that refuses the kernel
            return Verdict(seconds, f"{count} rows: {' '.join(str(error).split())[:200]}")
        slowest = max(times[own])
        if slowest > _STALL_SECONDS + max(times[ordinary]):
            return Verdict(seconds, f"{count} rows stalled for {slowest * 1000:.0f} ms")
        seconds[count] = min(times[ordinary]), min(times[own])
    return Verdict(seconds)


def take_turns(
    ways: Sequence[W],
    seconds: Callable[[W], float],
    *,
    times: int = _TIMED,
    most: int = 0,
    enough: float = 0.0,
) -> dict[W, list[float]]:
    """What each way takes, so many times; the first turn, in which things are compiled, does not count.

    most: so many times, until all turns together have taken `enough` seconds. Take the least of them where other work
    may have disturbed them, as on a computer that launches what a GPU does: it only makes them longer. Where it may
    last for several turns, compare turn by turn.
    """
    taken: dict[W, list[float]] = {way: [] for way in ways}
    spent = 0.0
    for turn in range(1 + max(times, most)):
        if turn > times and spent > enough:
            break
        for way in ways:
            taken[way].append(seconds(way))
            spent += taken[way][-1]
    return {way: found[1:] for way, found in taken.items()}


def is_faster(seconds: float, ordinary: float) -> bool:
    """Whether a way is so much faster than the ordinary one that it is no noise."""
    return seconds <= (1 - _GAIN) * ordinary


def one_by_one(operation: Callable[..., mx.array], x: mx.array, others: Iterable[Sequence[mx.array]]) -> list[mx.array]:
    """operation(x, *arrays) for each of `others`, each after the last one: a GPU computes what is independent at the
    same time, which the layers of a model are not."""
    found = []
    for arrays in others:
        found.append(operation(x, *arrays))
        x = _wait(x, found[-1])
    return found


@mx.compile
def _wait(x: mx.array, product: mx.array) -> mx.array:
    """x as it is, but after a product."""
    return x + 0 * product[..., :1]


def repeats(size: int) -> int:
    """With how many operands of so many bytes a race computes, so that they are read from memory, not from a cache."""
    return max(1, min(_OPERANDS, -(-_BYTES // size)))


def _seconds(way: Way, x: mx.array) -> float:
    started = time.perf_counter()
    mx.eval(way(x))
    return time.perf_counter() - started


class Verdicts:
    """The verdicts on one kernel on this machine, by shape; with another chip, MLX or source they are others."""

    def __init__(self, kernel: str, source: str) -> None:
        self._name = f"kernels/{fingerprint((), _SCHEMA, kernel, source)}"
        try:
            stored = read_json(self._name)
            self._known = {shape: verdict_from_json(verdict) for shape, verdict in stored["verdicts"].items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            self._known = {}  # not raced yet, or a file that cannot be used

    def _put(self, shape: str, verdict: Verdict) -> None:
        """Remember a verdict, on disk, too; one on a stall, which other programs can cause, only for now."""
        self._known[shape] = verdict
        lasting = {key: one.to_json() for key, one in self._known.items() if "stalled" not in one.note}
        store(self._name, {"verdicts": lasting})

    def complete(
        self, races: Mapping[str, Callable[[], Verdict]], report: Report | None = None
    ) -> tuple[dict[str, Verdict], list[str]]:
        """Verdicts for these shapes, of which those that are not known are raced now; and notes on what was odd."""
        found: dict[str, Verdict] = {}
        odd: dict[str, list[str]] = {}
        for shape, run in races.items():
            verdict = self._known.get(shape)
            if verdict is None:
                if report is not None:
                    report("measuring kernels on this machine (once for this kind of model)", None)
                verdict = run()
                self._put(shape, verdict)
            found[shape] = verdict
            if verdict.note:
                odd.setdefault(verdict.note, []).append(shape)
        return found, [_note(*each) for each in odd.items()]


def _note(what: str, shapes: Sequence[str]) -> str:
    others = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
    return f"a kernel is not used where its race came to no end, for {shapes[0]}{others}: {what}"


def in_words(shape: str, used: Iterable[object]) -> str:
    """For what a kernel is used, numbers of rows for example."""
    return f"{shape}: {','.join(map(str, used))}"
