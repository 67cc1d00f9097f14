"""Making a target exact: what it computes with is found out, replaced where need be, and checked by running it."""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from dflash_mlx.caches.row_layers import RowKVCache
from dflash_mlx.caches.rows import Rows, fits
from dflash_mlx.caches.target_caches import BatchCaches
from dflash_mlx.caches.tree_recurrence import convolutions, recurrences
from dflash_mlx.caches.tree_rows import keep_path
from dflash_mlx.errors import UsageError
from dflash_mlx.hooks import renamed, subclassed
from dflash_mlx.kernels.attention import NAME, Mask, as_array, attention_layers, set_attention
from dflash_mlx.kernels.exact.attention import ROWS, Blocks, attention_in, compare_attention
from dflash_mlx.kernels.exact.blocks import SIZES, Agreement, largest_difference
from dflash_mlx.kernels.exact.layers import EXACT_KINDS, KernelLinear, compare_products, kind_of_product, set_exact
from dflash_mlx.kernels.exact.recurrence import exact_convolution, without_recurrence
from dflash_mlx.kernels.few_rows_linear import fitting_layers, is_large, products_work
from dflash_mlx.kernels.rows_attention.layers import Heads, Rival, ways, works
from dflash_mlx.runtime import backend
from dflash_mlx.targets.loading import activation_dtype
from dflash_mlx.targets.target import Target

# MLX's operations that add up numbers in an order that may depend on shapes, and kernels of which nothing is known.
_IN_DOUBT = re.compile(r"(?i)matmul|mm$|conv|attention|kernel|cumsum|fft|hadamard")
_NOTES = "_dflash_exact_notes"
# Of the check: positions before its rows, which lie on both sides of a multiple of 256, the rooms of the caches, and
# tokens, which two trees have on their paths.
_BEFORE, _ROOM, _MORE_ROOM, _TOKENS = 255, 300, 1000, 5
_TREE_DEPTHS, _TREE_PATHS = (0, 1, 1, 2, 2), ((0, 2, 4), (0, 1))


@dataclass
class Uses:
    """What a pass computes with: layers, each with the type of its rows, and attention by its numbers of heads, of
    heads of keys, and the sizes of their keys and values."""

    layers: dict[int, tuple[Any, mx.Dtype]] = field(default_factory=dict)
    attentions: set[tuple[int, int, int, int]] = field(default_factory=set)


def make_exact(
    target: Target, *, kernels: bool = True, report: Callable[[str, float | None], None] | None = None
) -> str:
    """Have each row of a target's passes come out the same, bit for bit, whatever is computed with it.

    kernels=False leaves out the kernels for few rows. Returns what was found, in a line. Raises UsageError where
    the target computes in a way that cannot be made so.
    """
    if report is not None:
        report("looking for ways to compute each token alike", None)
    uses = find_uses(target)
    kinds: dict[Any, Agreement] = {}
    by_kernel = _layers_of_kernel(target, uses) if kernels and backend().kind == "cuda" else set[int]()
    for layer, dtype in uses.layers.values():
        if id(layer) in by_kernel:
            layer.__class__ = KernelLinear
            continue
        kind = kind_of_product(layer, dtype)
        if kind not in kinds:
            kinds[kind] = compare_products(layer, dtype)
        if not kinds[kind].sizes:
            raise _refusal(f"{type(layer).__name__}, which does not give the same numbers twice")
        set_exact(layer, kinds[kind].sizes)
    use_kernels = kernels and backend().kind != "cpu"
    attend = attention_in(attention_blocks(uses), kernels=_attention_kernels(target, uses) if use_kernels else ())
    set_attention(attention_layers(target.model), attend)
    for layer in convolutions(target.model):
        layer.__class__ = exact_convolution(type(layer))
    target.kernels = "exact"
    if not target.takes_rows():
        raise _refusal("code that answers one prompt at a time")
    for what, difference in differences(target).items():
        if difference != 0:
            raise _refusal(f"something that gives other numbers for {what} (they differ by up to {difference:.2g})")
    return (
        f"a token's logits are the same in any pass ({len(kinds)} kinds of products and {len(uses.attentions)} of "
        "attention, computed in blocks)"
    )


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"--exact needs a target whose rows can be computed apart from each other, and this one has {what}. "
        "Leave --exact out; in float32 the answers are the same without it."
    )


def _layers_of_kernel(target: Target, uses: Uses) -> set[int]:
    """Ids of the layers whose rows the CUDA kernel for few rows multiplies, which takes fewer launches than blocks. It
    would read a large matrix too many times for the rows of a prompt."""
    layers = fitting_layers(target.model, without=[target.head_module])
    fitting = {id(layer) for layer in layers if not is_large(layer)}
    found = [(layer, dtype) for key, (layer, dtype) in uses.layers.items() if key in fitting]
    works = {dtype: products_work(dtype, together=False) for _, dtype in found}
    return {id(layer) for layer, dtype in found if works[dtype] and layer["weight"].dtype == dtype}


def _attention_kernels(target: Target, uses: Uses) -> tuple[Rival, ...]:
    """The kernels that give a row the same numbers whatever the others are, and compute these attentions right here."""
    dtype = activation_dtype(target.model)
    kinds = [Heads(*attention[:3], dtype) for attention in uses.attentions]
    # Those for long contexts only would round in another way than what serves short ones.
    able = [one for one in ways().values() if one.part and not one.for_long]
    return tuple(one for one in able if all(works(one, heads) for heads in kinds))


def find_uses(target: Target) -> Uses:
    """Write down a pass in which what can be made exact computes nothing, and look at what is left.

    Raises UsageError with the name of what cannot be made exact.
    """
    caches = target.make_cache()
    if not fits(caches):
        raise _refusal(f"another memory than keys and values ({', '.join(sorted({type(c).__name__ for c in caches}))})")
    uses, rows = Uses(), Rows.blank(target.blank_caches, 1, 2)
    layers = [layer for layer in target.model.modules() if type(layer) in EXACT_KINDS]
    attention = _noting_attention(uses)
    try:
        with (
            subclassed(layers, _noting, notes={_NOTES: [uses] * len(layers)}),
            subclassed(attention_layers(target.model), lambda kind: renamed(kind, NAME, attention)),
            subclassed(convolutions(target.model), exact_convolution),
            subclassed(recurrences(target.model), without_recurrence),
        ):
            logits = target.forward(mx.zeros((1, 2), dtype=mx.int32), rows.layers)
    except NotImplementedError as error:
        raise _refusal(str(error)) from error
    graph = io.StringIO()
    mx.export_to_dot(graph, logits)
    left = {name for name in re.findall(r'label ="([^"]*)"', graph.getvalue()) if _IN_DOUBT.search(name)}
    if left:
        raise _refusal(f"{', '.join(sorted(left))} outside of linear layers and attention")
    return uses


@cache
def _noting(kind: type[nn.Module]) -> type[nn.Module]:
    """A layer that notes the type of its rows in its `Uses`, and computes nothing."""

    def product(self: Any, x: mx.array, *indices: mx.array, **_: Any) -> mx.array:
        self.__dict__[_NOTES].layers[id(self)] = self, x.dtype
        numbers = x[..., :1] + (self["scales"] if "scales" in self else self["weight"]).flatten()[0]
        # The experts' indices are computed, too, from something.
        shape = (*indices[0].shape, 1) if indices else x.shape[:-1]
        numbers = numbers + indices[0][..., None, None].astype(numbers.dtype) if indices else numbers
        return mx.broadcast_to(numbers, (*shape, self["weight"].shape[-2]))

    return type(f"Noting{kind.__name__}", (kind,), {EXACT_KINDS[kind]: product})


def _noting_attention(uses: Uses) -> Callable[..., mx.array]:
    """Attention that notes its sizes and computes nothing."""

    def attend(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if not isinstance(cache, RowKVCache):
            raise NotImplementedError("layers that share the keys of others")
        as_array(mask, queries.shape[2], keys.shape[2])
        uses.attentions.add((queries.shape[1], keys.shape[1], keys.shape[3], values.shape[3]))
        numbers = queries[..., :1] + keys[:, :1, :1, :1] + values[:, :1, :1, :1]
        return mx.broadcast_to(numbers, (*queries.shape[:3], values.shape[3]))

    return attend


def attention_blocks(uses: Uses) -> Blocks:
    """The largest blocks of rows whose places do not count in any of the attentions, and how many go at once."""
    for rows in ROWS:
        found = [compare_attention(*attention, rows=rows) for attention in uses.attentions]
        if all(difference == 0 for _, difference in found):
            return Blocks(rows, tuple(size for size in SIZES if all(size in one.sizes for one, _ in found)))
    raise _refusal("attention that does not give the same numbers twice")


def differences(target: Target) -> dict[str, float]:
    """By a way to compute the same few rows, the most by which their logits differ from those of one row at a time."""
    rng = np.random.default_rng(0)
    tokens = mx.array(rng.integers(0, target.vocab_size, (2, _TOKENS)))
    blank = Rows.blank(target.blank_caches, 1, _BEFORE)
    context = [_random_like(array, rng)[:, :, :_BEFORE] for array in blank.take_arrays()]
    memory = [[_random_like(array, rng) for array in state.cache] for state in blank.states]

    def rows(answers: int = 1, room: int = _ROOM) -> Rows:
        """Rows whose last answer has the context, and the others its first half, turned round."""
        found = Rows.blank(target.blank_caches, answers, room)
        for state, parts in zip(found.states, memory, strict=True):
            state.cache = [mx.concatenate([-part] * (answers - 1) + [part]) for part in parts]
        arrays = found.take_arrays()
        for array, part in zip(arrays, context, strict=True):
            array[:, :, : _BEFORE // 2] = -part[:, :, : _BEFORE // 2]
            array[-1:, :, :_BEFORE] = part
        found.put_arrays(arrays)
        found.reserve(room)
        found.lengths.value = mx.array([_BEFORE // 2] * (answers - 1) + [_BEFORE], dtype=mx.int32)
        return found

    def one_by_one(caches: Sequence[Any], after: Callable[[], None]) -> Iterator[mx.array]:
        for i in range(_TOKENS):
            yield target.forward(tokens[-1:, i : i + 1], list(caches))[0]
            after()

    alone, single = rows(), target.make_cache()

    def move_on() -> None:
        alone.lengths.value = alone.lengths.value + 1

    expected = mx.concatenate(list(one_by_one(alone.layers, move_on)))
    found = {
        "several tokens at once": target.forward(tokens[-1:], rows().layers)[0],
        "other answers beside it": target.forward(tokens, rows(2, _MORE_ROOM).layers)[-1],
    }
    rows().give_back(0, _BEFORE, single, states=memory)
    found["prompts that are read"] = mx.concatenate(
        [target.forward(part, single)[0] for part in (tokens[-1:, :1], tokens[-1:, 1:])]
    )
    if target.takes_trees():
        found["trees of drafts"] = _trees(target, rows(), tokens[-1])
    if memory:
        found["blocks that are kept in part"] = _kept(target, rows(2), tokens)
    return {what: largest_difference(logits, expected[: logits.shape[0]]) for what, logits in found.items()}


def _random_like(array: mx.array, rng: np.random.Generator) -> mx.array:
    return mx.array(rng.standard_normal(array.shape, dtype=np.float32)).astype(array.dtype)


def _kept(target: Target, rows: Rows, tokens: mx.array) -> mx.array:
    """The last answer's logits for its first tokens (2, L), of which all but one were kept of a block of more."""
    batch, model, fed, count = BatchCaches(rows, target.layers), target.pass_for(()), tokens.shape[1], 3
    at, kept = rows.lengths.value, [fed - 1, count - 1]
    block, _ = batch.feed(model, tokens, at=at, room=_ROOM)
    batch.commit(fed, kept)
    last, _ = batch.feed(model, tokens[:, count - 1 : count], at=at + mx.array(kept), room=_ROOM)
    return mx.concatenate([block[-1, : count - 1], last[-1]])


def _trees(target: Target, rows: Rows, tokens: mx.array) -> mx.array:
    """The logits for some tokens (L,) as paths of trees, one after the other, with others beside them."""
    visible = np.eye(len(_TREE_DEPTHS), dtype=bool)
    for row in range(1, len(_TREE_DEPTHS)):
        visible[row] |= visible[max(0, row - 2)]
    model, logits, fed = target.pass_for(()), [], 0
    for path in map(mx.array, _TREE_PATHS):
        held = mx.zeros((len(_TREE_DEPTHS),), dtype=mx.int32)
        held[path] = tokens[fed : fed + path.size].astype(mx.int32)
        found, _ = model.over(rows, held[None], (mx.array(_TREE_DEPTHS), mx.array(visible)))
        logits.append(found[0, path])
        keep_path(rows, path, target.tree_steps)
        fed += path.size
        rows.lengths.value = rows.lengths.value + path.size
    return mx.concatenate(logits)
