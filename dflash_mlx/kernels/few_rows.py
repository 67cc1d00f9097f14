"""Rounds on a GPU with less work for the computer that feeds it, where that is faster.

A round feeds both models 2 to some dozens of rows. On a GPU much faster than the computer that feeds it, a round of a
small model takes as long as its launches, and MLX's ways for more than one row take more of them than those for one.
On CUDA two kernels take their place: for linear layers (few_rows_linear.py) and for attention (few_rows_attention.py).
And passes can be replayed instead of written down anew each time (`caches.replay`). When a pair is loaded, all are
measured. On an H200 a round of 15 drafts of the demo pair, in bfloat16, went from 7.1 to 6.1 ms by the first and to 5.2
ms by the second.

As with `targets.taps`, layer *instances* get a subclass of their own class; classes and parameter trees stay as they
are.
"""

import statistics
import time
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.caches.rows import Rows
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.drafters.dflash_state import DFlashState
from dflash_mlx.kernels.few_rows_attention import attention_layers, kernel_works, set_attention
from dflash_mlx.kernels.few_rows_linear import fitting_layers, set_few_rows
from dflash_mlx.kernels.few_rows_linear import kernel_works as product_works
from dflash_mlx.rounding import TOLERANCE, relative_difference
from dflash_mlx.runtime import backend
from dflash_mlx.targets.target import Target, activation_dtype

# Numbers of rows that the linear kernel is tried with, rising; the last at which it was faster is the most that it is
# used for.
ROWS = (4, 8, 16, 32, 64, 128, 256, 512)
# A kernel must be this much faster to be used: less would be noise.
_GAIN = 0.05
_TIMED = 5
# A round's rows, for which attention is measured.
_ROUND = 16


def use_where_faster(target: Target, drafter: DFlashDrafter | None) -> None:
    """Have both models compute a round's rows in the ways that are fastest on this machine, a GPU.

    The kernels are for CUDA only: a Mac's GPU has no such cost to avoid, and a CPU neither that nor Python's.
    """
    kind = backend().kind
    if kind == "cpu":
        return
    if kind == "cuda":
        _choose_attention(target, drafter)
        _choose_products(target, drafter)
    if target.takes_rows():
        _choose_replays(target, drafter)


def _choose_attention(target: Target, drafter: DFlashDrafter | None) -> None:
    models: list[nn.Module] = [target.model, *([drafter] if drafter is not None else [])]
    layers = [layer for model in models for layer in attention_layers(model)]
    head_dims = {target.head_dim, drafter.config.head_dim if drafter is not None else None}
    dtype = drafter.dtype if drafter is not None else activation_dtype(target.model)

    def switch(on: bool) -> None:
        set_attention(layers, kernel=on)

    if all(kernel_works(dtype, head_dim) for head_dim in head_dims if head_dim):
        switch(_is_faster(*_compare(target, drafter, _rows(drafter), switch)))


def _choose_replays(target: Target, drafter: DFlashDrafter | None) -> None:
    rows, logits = _rows(drafter), []
    try:
        for on in (False, True):
            target.set_replays(on)
            logits.append(_round(target, drafter, rows)[1])
        right = relative_difference(logits[1], logits[0]) <= TOLERANCE[logits[0].dtype]
    except (RuntimeError, ValueError):  # no compiler, or a model that asks the host
        right = False
    target.set_replays(right and _is_faster(*_compare(target, drafter, rows, target.set_replays)))


def _choose_products(target: Target, drafter: DFlashDrafter | None) -> None:
    if drafter is None:
        return
    layers = fitting_layers(target.model, without=[target.head_module]) + fitting_layers(drafter)
    if not layers or not product_works(drafter.dtype):
        return

    def compare(rows: int) -> tuple[float, float]:
        return _compare(target, drafter, rows, lambda on: set_few_rows(layers, rows if on else 0))

    set_few_rows(layers, most_rows(compare))


def _rows(drafter: DFlashDrafter | None) -> int:
    return _ROUND if drafter is not None else 1


def most_rows(compare: Callable[[int], tuple[float, float]]) -> int:
    """The most of `ROWS` up to which a kernel is faster; `compare` gives seconds for a number: ordinary, kernel."""
    most = 0
    for rows in ROWS:
        if not _is_faster(*compare(rows)):
            break
        most = rows
    return most


def _is_faster(ordinary: float, kernel: float) -> bool:
    return kernel <= (1 - _GAIN) * ordinary


def _compare(
    target: Target, drafter: DFlashDrafter | None, rows: int, switch: Callable[[bool], None]
) -> tuple[float, float]:
    """Medians of what a round's computing takes over `rows` rows, in turns: the ordinary way, and switched."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    try:
        for _ in range(1 + _TIMED):
            for on, times in seconds.items():
                switch(on)
                times.append(_seconds(target, drafter, rows))
    finally:
        switch(False)
    ordinary, kernel = (statistics.median(times[1:]) for times in seconds.values())
    return ordinary, kernel


def _seconds(target: Target, drafter: DFlashDrafter | None, rows: int) -> float:
    """Of a forward of the target and a draft, the second time: what is compiled or recorded at first does not count."""
    _round(target, drafter, rows)
    return _round(target, drafter, rows)[0]


def _round(target: Target, drafter: DFlashDrafter | None, rows: int) -> tuple[float, mx.array]:
    """A forward of the target and a draft, over new caches like those of a round: seconds, and the target's logits.

    So many rows in all, of as many answers as there are then, where the target takes several at once.
    """
    lanes = max(1, rows // _ROUND) if target.takes_rows() else 1
    block = rows // lanes
    tokens = mx.arange(rows).reshape(lanes, block) % target.vocab_size
    at, room = mx.zeros((lanes,), dtype=mx.int32), 2 * block
    model = target.pass_for(drafter.config.target_layer_ids if drafter is not None else ())
    held = Rows.blank(target.blank_cache(), lanes, room) if target.takes_rows() else None
    state = DFlashState.blank(drafter, target, lanes, room) if drafter is not None else None
    started = time.perf_counter()
    logits, features = model(tokens, target.make_cache()) if held is None else model.over(held, tokens)
    if state is None or features is None:
        mx.eval(logits)
    else:
        state.extend(features, at, room=room, all_kept=True)
        mx.eval(logits, state.draft(tokens[:, 0], at + block, block - 1, room=room).hidden)
    return time.perf_counter() - started, logits
