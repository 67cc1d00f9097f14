"""Layers whose attention over a cache is computed, for a few rows, in the way that won its races on this machine."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.hooks import renamed, subclassed
from dflash_mlx.kernels.attention import NAME, Mask, Way, attention_layers, instead_of_ordinary, set_attention
from dflash_mlx.kernels.race import DIFFERENCE, Report, Verdict, Verdicts, in_words, one_by_one, race, repeats
from dflash_mlx.kernels.rows_attention import on_matrix_units, one_launch, passes
from dflash_mlx.kernels.sources import source
from dflash_mlx.rounding import relative_difference
from dflash_mlx.runtime import backend

# Numbers of rows and of positions that are raced. What lies between two of them follows both; shorter caches are left
# to MLX, and longer ones follow the longest. One row, too: in rows it has a mask, with which MLX has no kernel on CUDA.
ROWS, LENGTHS = (1, 2, 4, 8, 16, 32, 64), (256, 1024, 2048, 4096, 16384)
# Answers at once that are raced on CUDA, where so many decide otherwise; numbers between two of them follow the lower.
# Their caches take much memory, so the longest are left to MLX when there are several.
LANES, _LONGEST_OF_SEVERAL = (1, 16, 64), 4096
# A context from which on ways that were made for long ones are raced.
_LONG = 1024
# MLX's kernel for a few rows takes so many, and so many of all query heads that share one of keys.
_MLX_ROWS, _MLX_ROWS_OF_HEADS = 8, 32
# Heads of common models (heads, those of keys, size) that `doctor --kernels` races.
_TYPICAL = ((9, 3, 64), (32, 8, 128), (24, 4, 256))


class Heads(NamedTuple):
    """What decides how attention is computed, besides the numbers of rows and positions."""

    heads: int
    groups: int
    head_dim: int
    dtype: mx.Dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).rpartition(".")[2]
        return f"attention, {self.heads} heads on {self.groups} of size {self.head_dim}, {dtype}"


class Rival(NamedTuple):
    """A way to compute attention, and whether it was made for some queries, keys and values.

    part: a row's numbers do not depend on other rows if the first position is at a multiple of this; 0: they may.
    for_long: it was made for long contexts of few answers, and takes part in no other races.
    """

    attention: Callable[[mx.array, mx.array, mx.array, float, Mask], mx.array]
    made_for: Callable[[mx.array, mx.array, mx.array], bool]
    part: int
    for_long: bool = False


def in_calls(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> mx.array:
    """MLX's own attention, in calls of so few rows that each goes through its kernel for a few."""
    rows, length = queries.shape[2], keys.shape[2]
    step = max(1, min(_MLX_ROWS, _MLX_ROWS_OF_HEADS * keys.shape[1] // queries.shape[1]))
    parts = []
    for first in range(0, rows, step):
        end = min(first + step, rows)
        seen = length - rows + end if isinstance(mask, str) else length
        parts.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, first:end],
                keys[:, :, :seen],
                values[:, :, :seen],
                scale=scale,
                mask=mask[..., first:end, :] if isinstance(mask, mx.array) else mask,
            )
        )
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def ways() -> dict[str, Rival]:
    """The ways to compute attention that this machine has besides MLX's own, by their names."""
    if backend().kind == "cuda":
        return {
            "on matrix units": Rival(on_matrix_units.attention, on_matrix_units.made_for, on_matrix_units.POSITIONS),
            "on matrix units in parts": Rival(
                on_matrix_units.attention_in_parts,
                on_matrix_units.made_for,
                on_matrix_units.IN_A_PART,
                for_long=True,
            ),
            "in one launch": Rival(one_launch.attention, one_launch.made_for, one_launch.MOST_KEYS),
        }
    return {
        "in calls of a few rows": Rival(in_calls, lambda *_: True, 0),
        "in two passes": Rival(passes.attention, passes.made_for, passes.POSITIONS),
    }


def heads_used(layers: Sequence[nn.Module], run: Callable[[], object]) -> list[Heads]:
    """The kinds of heads with which these `attention_layers` compute while something runs."""
    found: dict[Heads, None] = {}

    def note(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> None:
        if _is_plain(queries, keys, values):
            found[_heads_of(queries, keys)] = None

    attend = instead_of_ordinary(note)
    with subclassed(layers, lambda kind: renamed(kind, NAME, attend)):
        run()
    return list(found)


def use_where_faster(
    models: Iterable[nn.Module], run: Callable[[], object], *, report: Report | None = None
) -> tuple[str, list[str]]:
    """Race the ways for the heads of these models, and use those that won. run: has the models compute something.

    Returns what is used, in words that change with it, and notes on races that something odd ended.
    """
    layers = [layer for model in models for layer in attention_layers(model)]
    kinds = heads_used(layers, run)
    verdicts, notes = known_verdicts().complete({k: v for heads in kinds for k, v in races(heads).items()}, report)
    table: dict[tuple[Heads, int, int, int], Way] = {}
    words = []
    for heads, lanes in ((heads, lanes) for heads in kinds for lanes in _lanes()):
        for name, places in chosen(heads, verdicts, lanes).items():
            table |= {(heads, lanes, rows, span): ways()[name].attention for rows, span in places}
            shape = f"{heads} {name}" + (f", {lanes} answers" if lanes > 1 else "")
            words.append(in_words(shape, (f"{rows}/{LENGTHS[span - 1]}" for rows, span in places)))
    if table:
        set_attention(layers, _by_table(table))
    return "; ".join(words), notes


def _lanes() -> tuple[int, ...]:
    """Numbers of answers at once that are raced on this machine."""
    return LANES if backend().kind == "cuda" else LANES[:1]


def _by_table(table: Mapping[tuple[Heads, int, int, int], Way]) -> Callable[..., mx.array]:
    raced = _lanes()

    @instead_of_ordinary
    def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask) -> mx.array | None:
        (batch, _, rows, _), length = queries.shape, keys.shape[2]
        lanes = raced[bisect_right(raced, batch) - 1]
        way = table.get((_heads_of(queries, keys), lanes, rows, bisect_right(LENGTHS, length)))
        whole = mask.shape == (batch, 1, rows, length) if isinstance(mask, mx.array) else mask == "causal"
        if way is None or not whole or not _is_plain(queries, keys, values):
            return None
        return way(queries, keys, values, scale, mask)

    return attend


def _heads_of(queries: mx.array, keys: mx.array) -> Heads:
    return Heads(queries.shape[1], keys.shape[1], queries.shape[3], queries.dtype)


def _is_plain(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    same = queries.dtype == keys.dtype == values.dtype and keys.shape == values.shape
    return same and queries.shape[3] == keys.shape[3]


def chosen(heads: Heads, verdicts: Mapping[str, Verdict], lanes: int = 1) -> dict[str, list[tuple[int, int]]]:
    """By way, for which numbers of rows and between which `LENGTHS` it is used: where it won at both ends, and fastest.

    lanes: answers at once, of the LANES. A number of positions that has `span` of the LENGTHS up to it lies between the
    last of these and the next one.
    """
    used: dict[str, list[tuple[int, int]]] = {}
    for span in range(1, len(LENGTHS) + 1):
        ends = {LENGTHS[span - 1], LENGTHS[min(span, len(LENGTHS) - 1)]}
        for rows in range(min(ROWS), max(ROWS) + 1):
            raced = min(count for count in ROWS if count >= rows)
            seconds = {
                name: sum(verdicts[_shape(heads, length, name, lanes)].seconds[raced][1] for length in ends)
                for name in ways()
                if all(_won(verdicts.get(_shape(heads, length, name, lanes)), rows) for length in ends)
            }
            if seconds:
                used.setdefault(min(seconds, key=lambda name: seconds[name]), []).append((rows, span))
    return used


def _won(verdict: Verdict | None, rows: int) -> bool:
    return verdict is not None and verdict.won(rows)


def works(rival: Rival, heads: Heads) -> bool:
    """Whether a way can be compiled here and gives what MLX's attention gives; True where it was not made for this."""
    batch, rows, length = 2, 5, 70
    keys = mx.random.split(mx.random.key(0), 4)
    queries, held, values = (
        mx.random.normal((batch, count, n, heads.head_dim), key=key).astype(heads.dtype)
        for count, n, key in ((heads.heads, rows, keys[0]), *((heads.groups, length, key) for key in keys[1:3]))
    )
    if not rival.made_for(queries, held, values):
        return True
    tree = (mx.random.uniform(shape=(batch, 1, rows, length), key=keys[3]) > 0.5) | mx.eye(rows, length, dtype=mx.bool_)
    try:
        return all(
            relative_difference(
                rival.attention(queries, held, values, heads.head_dim**-0.5, mask),
                _mlx(queries, held, values, heads.head_dim**-0.5, mask),
            )
            <= DIFFERENCE[heads.dtype]
            for mask in (None, "causal", tree)
        )
    except (RuntimeError, ValueError):  # no compiler, or one that refuses it
        return False


def races(heads: Heads) -> dict[str, Callable[[], Verdict]]:
    """Races for one kind of heads, by what they are about."""
    like = [mx.zeros((1, count, 1, heads.head_dim), heads.dtype) for count in (heads.heads, heads.groups, heads.groups)]
    return {
        _shape(heads, length, name, lanes): partial(race_rival, rival.attention, heads, length, lanes)
        for name, rival in ways().items()
        if rival.made_for(*like)
        for lanes in _lanes()
        for length in LENGTHS
        if lanes == 1 or length <= _LONGEST_OF_SEVERAL
        if not rival.for_long or (lanes == 1 and length >= _LONG)
    }


def _shape(heads: Heads, length: int, name: str, lanes: int = 1) -> str:
    return f"{heads}, over {length} positions {name}" + (f", {lanes} answers" if lanes > 1 else "")


def races_typical() -> dict[str, Callable[[], Verdict]]:
    """Races for heads of common models, by what they are about."""
    found: dict[str, Callable[[], Verdict]] = {}
    for shape in _TYPICAL:
        found |= races(Heads(*shape, mx.bfloat16))
    return found


def race_rival(attention: Callable[..., mx.array], heads: Heads, length: int, lanes: int = 1) -> Verdict:
    """One way against MLX's own attention, over several caches of this length, each of so many answers."""
    size = 2 * lanes * heads.groups * length * heads.head_dim * heads.dtype.size
    caches = [_cache(heads, length, lanes, seed) for seed in range(repeats(size))]
    masks = {
        rows: mx.repeat(mx.tri(rows, length, length - rows, dtype=mx.bool_)[None, None], lanes, axis=0) for rows in ROWS
    }
    mx.eval(list(masks.values()))
    scale = heads.head_dim**-0.5

    def own(x: mx.array) -> list[mx.array]:
        return one_by_one(partial(_with_mask, attention, scale, masks[x.shape[2]]), x, caches)

    def ordinary(x: mx.array) -> list[mx.array]:
        return one_by_one(partial(_with_mask, _mlx, scale, masks[x.shape[2]]), x, caches)

    def inputs(rows: int) -> mx.array:
        x = mx.random.normal((lanes, heads.heads, rows, heads.head_dim), key=mx.random.key(rows)).astype(heads.dtype)
        mx.eval(x)
        return x

    return race(ordinary, own, inputs, ROWS)


def _with_mask(
    attention: Callable[..., mx.array], scale: float, mask: mx.array, x: mx.array, keys: mx.array, values: mx.array
) -> mx.array:
    return attention(x, keys, values, scale, mask)


def _mlx(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def _cache(heads: Heads, length: int, lanes: int, seed: int) -> tuple[mx.array, mx.array]:
    """Keys and values that are parts of larger arrays, like those of a cache with room to spare."""
    shape = (lanes, heads.groups, length + 256, heads.head_dim)
    keys, values = (
        mx.random.normal(shape, key=key).astype(heads.dtype) for key in mx.random.split(mx.random.key(seed))
    )
    mx.eval(keys, values)
    return keys[:, :, :length], values[:, :, :length]


def known_verdicts() -> Verdicts:
    """What is known of these races here, as long as the sources stay as they are."""
    ours = (f"rows_attention/{name}.cu" for name in ("on_matrix_units", "put_together", "one_launch"))
    metal = (f"rows_attention/{name}.metal" for name in ("loading", "first_pass", "second_pass"))
    sources = map(source, ["matrix_units.cu", *ours] if backend().kind == "cuda" else metal)
    return Verdicts("rows_attention", "".join([*sources, str(ROWS), str(LENGTHS), str(_lanes())]))
