"""Rounds on a GPU with less work for the computer that feeds it, where that is faster.

A round feeds both models 2 to some dozens of rows. On a GPU much faster than the computer that feeds it, a round of a
small model takes as long as its launches, and MLX's ways for more than one row take more of them than those for one.
On CUDA a kernel for linear layers takes their place (few_rows_linear.py). And passes can be replayed instead of written
down anew each time (`caches.replay`). Whether these pay depends on each other and on all of a round, so rounds are
measured, once for a pair's files: what was chosen is remembered on disk.

On a Mac MLX's own quantized products, and its attention, read weights and caches again for every few rows. Kernels of
their own read them once, for any GPU (quantized_rows/, rows_attention/); each is raced by itself, for each shape
(race.py).

On an H200 kernels for linear layers and for attention brought a round of 15 drafts of the demo pair, in bfloat16, from
7.1 to 5.2 ms, and replaying made it a fifth faster once more.

As with `targets.taps`, layer *instances* get a subclass of their own class; classes and parameter trees stay as they
are.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.caches.rows import Rows
from dflash_mlx.drafters.contract import Drafter, Nobody
from dflash_mlx.kernels import exponentials, rotary
from dflash_mlx.kernels.few_rows_linear import called_together, fitting_layers, products_work, set_few_rows
from dflash_mlx.kernels.quantized_rows import layers as quantized_rows
from dflash_mlx.kernels.race import Report, is_faster, take_turns
from dflash_mlx.kernels.rows_attention import layers as rows_attention
from dflash_mlx.kernels.tree_steps import launches as tree_steps
from dflash_mlx.policy.stored import name_by_files, read_json, store
from dflash_mlx.rounding import TOLERANCE, relative_difference
from dflash_mlx.runtime import backend
from dflash_mlx.targets.loading import activation_dtype
from dflash_mlx.targets.target import Recorded, Target
from dflash_mlx.tree_steps import PLAIN, rank

# A round's rows, for which things are measured, and more, of several answers, for which the linear kernel is tried.
_ROUND, _MORE_ROWS = 16, (512, 256, 64)
# Turns of each way: at least, and at most until the rounds of all have taken so many seconds together. In a turn so
# many rounds are timed in a queue, after some that are not timed.
_TURNS, _MOST_TURNS, _ENOUGH_SECONDS = 4, 16, 1.0
_QUEUED, _UNTIMED = 4, 2
W = TypeVar("W")
# To be raised when it is chosen among other ways.
_SCHEMA = 9


class Way(NamedTuple):
    """How products of rows and passes are made: whether passes are replayed, and up to how many rows the kernel for
    products is used."""

    replays: bool = False
    most: int = 0


_ORDINARY = Way()


@dataclass(frozen=True)
class _Chosen:
    """What was chosen before for a pair: where these other `kernels` won, in words, passes are made this `way`.

    rows, trees: as `Target.takes_rows` and `takes_trees` give them.
    """

    kernels: str
    way: Way
    rows: bool
    trees: bool


def use_where_faster(
    target: Target,
    drafter: Drafter | None,
    *,
    folders: Sequence[Path] = (),
    again: bool = False,
    kernels: bool = True,
    report: Report | None = None,
) -> list[str]:
    """Have both models compute in the ways that are fastest on this machine; returns notes on what was odd.

    folders: what the models were loaded from, if what was chosen for them is to be remembered. again: choose even where
    that was done before. kernels=False leaves out all kernels of this project.
    """
    kind = backend().kind
    models: list[nn.Module] = [target.model, *(drafter.networks if drafter is not None else ())]
    target.kernels = "" if kernels else "none"
    if kind == "cpu":
        if kernels:
            if exponentials.use_where_faster(models):
                target.tree_steps = PLAIN._replace(rank=partial(rank, log_sum=exponentials.log_sum))
            rotary.use_where_faster(models)
        return []
    name = _name(target, drafter, folders, kernels=kernels) if folders else None
    before = _read(name) if name is not None and not again else None
    if before is not None:
        target.assume(rows=before.rows, trees=before.trees)
    notes: list[str] = []

    def run() -> None:
        mx.eval(_launch(target, drafter, _rows(drafter)))

    if kernels:
        products, notes = quantized_rows.use_where_faster(models, head=target.head_module, report=report)
        attention, more = rows_attention.use_where_faster(models, run, report=report)
        target.kernels, notes = "; ".join(filter(None, (products, attention))), notes + more
    layers = _layers(target, drafter) if kernels and kind == "cuda" and drafter is not None else []
    if layers and tree_steps.work(activation_dtype(target.model)):
        target.tree_steps = tree_steps.KERNELS

    groups: list[list[nn.Linear]] = []
    recorded: dict[Way, Recorded] = {}

    def switch(way: Way) -> None:
        set_few_rows(layers, way.most, groups)
        target.set_replays(way.replays, recorded.setdefault(way, Recorded()))

    if layers:
        switch(_ORDINARY)
        groups = called_together(layers, run)
    if before is not None and before.kernels == target.kernels:
        way = before.way
    else:
        way = _fastest_way(target, drafter, switch, kernel=bool(layers))
        if name is not None:
            store(name, asdict(_Chosen(target.kernels, way, target.takes_rows(), target.takes_trees())))
    switch(way)
    if way.most:
        target.kernels = "; ".join(filter(None, (target.kernels, f"products of up to {way.most} rows")))
    return notes


def _name(target: Target, drafter: Drafter | None, folders: Sequence[Path], *, kernels: bool) -> str:
    how = drafter.method if drafter is not None else "plain"
    return name_by_files("ways", folders, _SCHEMA, how, kernels, activation_dtype(target.model))


def _read(name: str) -> _Chosen | None:
    """What was chosen before; None where nothing was, or the file cannot be used."""
    try:
        stored = read_json(name)
        (replays, most), flags = stored["way"], (stored["rows"], stored["trees"])
        if not all(isinstance(flag, bool) for flag in (replays, *flags)):
            return None
        return _Chosen(str(stored["kernels"]), Way(replays, int(most)), *flags)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _layers(target: Target, drafter: Drafter) -> list[nn.Linear]:
    """The linear layers of both models for which there is a kernel, if it can be compiled."""
    layers = fitting_layers(target.model, without=[target.head_module])
    if layers and products_work(activation_dtype(drafter.networks[-1] if drafter.networks else target.model)):
        return [*layers, *(layer for network in drafter.networks for layer in fitting_layers(network))]
    return []


def _fastest_way(target: Target, drafter: Drafter | None, switch: Callable[[Way], None], *, kernel: bool) -> Way:
    """Measure replaying and the kernel for products together: each makes the other worth more, or less."""

    def fastest(rows: int, ways: Sequence[Way]) -> Way:
        shares = _compare(target, drafter, rows, ways, switch)
        best = min(ways, key=lambda way: shares[way])
        return best if is_faster(shares[best], 1.0) else ways[0]

    replays = (False, True) if _can_replay(target, drafter, switch) else (False,)
    ways = [Way(on, most) for on in replays for most in ((0, _ROUND) if kernel else (0,))]
    chosen = fastest(_rows(drafter), ways) if len(ways) > 1 else _ORDINARY
    for rows in _MORE_ROWS if chosen.most and target.takes_rows() else ():
        more = fastest(rows, [chosen, chosen._replace(most=rows)])
        if more != chosen:
            return more
    return chosen


def _can_replay(target: Target, drafter: Drafter | None, switch: Callable[[Way], None]) -> bool:
    """Whether a replayed pass gives the same logits."""
    if not target.takes_rows():
        return False
    logits = []
    try:
        for on in (False, True):
            switch(Way(on))
            found = _launch(target, drafter, _rows(drafter))
            mx.eval(found)
            logits.append(found[0])
        return relative_difference(logits[1], logits[0]) <= TOLERANCE[logits[0].dtype]
    except (RuntimeError, ValueError):  # no compiler, or a model that asks the host
        return False


def _rows(drafter: Drafter | None) -> int:
    return _ROUND if drafter is not None else 1


def _compare(
    target: Target, drafter: Drafter | None, rows: int, ways: Sequence[W], switch: Callable[[W], None]
) -> dict[W, float]:
    """How many times as long as in the first way a round's computing takes over `rows` rows, by the median turn.

    A computer that shares its cores with others may be slow for a second, in all ways alike. So turns are short: each
    way is recorded once, and turns are compared by themselves.
    """

    def timed(way: W) -> float:
        switch(way)
        return _seconds(target, drafter, rows)

    times = take_turns(ways, timed, times=_TURNS, most=_MOST_TURNS, enough=_ENOUGH_SECONDS)
    return {way: median(map(truediv, taken, times[ways[0]])) for way, taken in times.items()}


def _seconds(target: Target, drafter: Drafter | None, rows: int) -> float:
    """Of a forward of the target and a draft, of some that are queued one after another, as rounds are.

    What is compiled or recorded at first does not count. One that is waited for takes longer than its part of a queue,
    and by another factor where the computer has more to do than the GPU.
    """
    for _ in range(_UNTIMED):
        mx.eval(_launch(target, drafter, rows))
    started = time.perf_counter()
    for _ in range(_QUEUED):
        last = _launch(target, drafter, rows)
        mx.async_eval(last)
    mx.eval(last)
    return (time.perf_counter() - started) / _QUEUED


def _launch(target: Target, drafter: Drafter | None, rows: int) -> list[mx.array]:
    """A forward of the target and a draft, over new caches like those of a round: the target's logits, and drafts.

    So many rows in all, of as many answers as there are then, where the target takes several at once.
    """
    lanes = max(1, rows // _ROUND) if target.takes_rows() else 1
    block = rows // lanes
    tokens = mx.arange(rows).reshape(lanes, block) % target.vocab_size
    at, room = mx.zeros((lanes,), dtype=mx.int32), 2 * block
    model = target.pass_for(drafter.taps if drafter is not None else ())
    held = Rows.blank(target.blank_caches, lanes, room) if target.takes_rows() else None
    logits, features = model(tokens, target.make_cache()) if held is None else model.over(held, tokens)
    if drafter is None:
        return [logits]
    state = drafter.blank(target, lanes, room)
    state.extend(tokens, features, at, room=room, all_kept=True)
    places = min(block - 1, drafter.places)
    return [logits, state.propose([Nobody()] * lanes, tokens[:, 0], at + block, places, room=room).tokens]
