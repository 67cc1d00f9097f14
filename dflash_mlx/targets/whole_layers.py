"""A target divided by whole layers: each machine has some layers that follow each other.

mlx-lm has a `pipeline` for models whose layers need nothing but the hidden state of the layer before and a cache of
their own. Here such a model runs as it is on every machine, with all of its layers. Of those that another machine has,
only the form is left: no weights, and hidden states go through them as they are. They keep their caches in step with
those of the real layer: as long, and of the same kind, but a number wide. So all that is decided by caches and layers
(masks, what can be taken out, what is computed again) is decided alike everywhere.

Where the owner changes, the hidden states of the last layer's owner reach all machines by one sum, to which the others
add zeros. The last layers are rank 0's, since rank 0 alone has use for the logits. Each sum is launched where it is
made, so that all machines launch the same ones in the same order.
"""

import inspect
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, wraps
from itertools import accumulate, combinations
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from dflash_mlx.caches.recurrence import mixers_of
from dflash_mlx.caches.trimming import leaves
from dflash_mlx.ranks.group import Group
from dflash_mlx.targets.parts import candidates

# What a layer may take, beside its hidden states: things that are the same for all layers, and its own cache.
_ARGUMENTS = {"cache", "mask", "offset", "attn_scale"}
_END = "_dflash_end_of_run"


class WholeLayers:
    """A rank's part of a model: `own` layers, by number; the others lose their weights here.

    sizes: what the layers take.
    """

    def __init__(self, layers: Sequence[nn.Module], sizes: Sequence[int], group: Group) -> None:
        self._group, runs = group, runs_of_layers(sizes, group.size)
        self.own, self._of_rank_0 = runs[-1 - group.rank], runs[-1]
        self._ends = {run[-1] for run in runs[:-1]}
        # How many runs of layers were passed since somebody set this to 0.
        self._passed = 0
        # Own layers may share parts with others.
        kept = {id(module) for i in self.own for module in layers[i].modules()}
        for i, layer in enumerate(layers):
            if i not in self.own:
                _empty(layer, kept)
            if i in self._ends:
                object.__setattr__(layer, _END, (self._pass_on, i in self.own))
                layer.__class__ = _with_end(type(layer))

    def complete(self, outputs: dict[int, mx.array]) -> None:
        """Put the outputs of layers (B, L, D), by their numbers, in the place of those that rank 0 does not have."""
        missing = [i for i in sorted(outputs) if i < self._of_rank_0.start and i not in self._ends]
        if not missing:
            return
        parts = [outputs[i] if i in self.own else mx.zeros_like(outputs[i]) for i in missing]
        outputs.update(zip(missing, mx.split(self._on_all(mx.concatenate(parts)), len(missing)), strict=True))

    def attempt(self, model: nn.Module, embedded: mx.array, tokens: mx.array, caches: Any) -> mx.array:
        """Run a model that may fail with such caches: if it does on one rank, all of them raise RuntimeError.

        Without this, the others would wait for the one that fails.
        embedded: hidden states of the pass, for their shape.
        """
        self._passed, found = 0, None
        try:
            found = model(tokens, cache=caches)
        except Exception:  # which is what is to be found out
            for _ in range(len(self._ends) - self._passed):
                self._on_all(mx.zeros_like(embedded))
        if self._on_all(mx.array(int(found is None))).item() or found is None:
            raise RuntimeError("the model does not run with these caches")
        return found

    def _pass_on(self, part: mx.array) -> mx.array:
        self._passed += 1
        return self._on_all(part)

    def _on_all(self, part: mx.array) -> mx.array:
        """What one rank has and the others add zeros to, on all of them."""
        whole = mx.distributed.all_sum(part, group=self._group.ranks)
        mx.async_eval(whole)
        return whole


class Attempting(nn.Module):
    """A model whose passes are attempts (see `WholeLayers.attempt`)."""

    def __init__(self, model: nn.Module, parts: WholeLayers, embed: Callable[[mx.array], mx.array]) -> None:
        super().__init__()
        self.model, self._parts, self._embed = model, parts, embed

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self._parts.attempt(self.model, self._embed(tokens), tokens, cache)


def runs_of_layers(sizes: Sequence[int], machines: int) -> list[range]:
    """One run of layers for each machine, in the order of the layers, such that the largest takes as little as it can.

    There have to be as many layers as machines, or more.
    """
    ends = [0, *accumulate(sizes)]
    limits = sorted({end - start for start, end in combinations(ends, 2)})
    found = bisect_left(limits, True, key=lambda limit: _filled(sizes, machines, limit) is not None)
    runs = _filled(sizes, machines, limits[found])
    assert runs is not None
    return runs


def _filled(sizes: Sequence[int], machines: int, limit: int) -> list[range] | None:
    """Runs that take at most `limit` each, the first ones as long as can be; None where there are none."""
    runs, start = [], 0
    for after in reversed(range(machines)):
        end, taken = start, 0
        while end < len(sizes) - after and taken + sizes[end] <= limit:
            taken += sizes[end]
            end += 1
        if end == start:
            return None
        runs.append(range(start, end))
        start = end
    return runs if start == len(sizes) else None


def takes_whole_layers(model: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Whether mlx-lm can run a model's layers on several machines, and they take nothing from each other."""
    if not any("layers" in part and hasattr(part, "pipeline") for part in candidates(model)):
        return False
    for kind in {type(layer) for layer in layers}:
        _, _, *others = inspect.signature(kind.__call__).parameters
        if "cache" not in others or not _ARGUMENTS.issuperset(others):
            return False
    return True


def _empty(layer: nn.Module, kept: set[int]) -> None:
    """Take a layer's weights away, but for `kept` modules; hidden states go through it, and its caches stay in step."""
    for module in layer.modules():
        for name, value in list(module.items()):
            if id(module) not in kept and _has_arrays(value):
                del module[name]
    for mixer in mixers_of(layer):
        mixer.__class__ = _empty_mixer(type(mixer))
    layer.__class__ = _empty_layer(type(layer))


def _has_arrays(value: Any) -> bool:
    """Whether something of a module's own is an array, or holds one."""
    if isinstance(value, dict | list | tuple) and not isinstance(value, nn.Module):
        return any(_has_arrays(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, mx.array)


@cache
def _empty_layer(kind: type[nn.Module]) -> type[nn.Module]:
    cache_in = _finder(kind)

    def call(self: nn.Module, hidden: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        mixer = next(iter(mixers_of(self)), None)
        for leaf in leaves([cache_in(args, kwargs)]):
            if isinstance(leaf, ArraysCache) and mixer is not None:
                # As the layer would call it, so that it is recorded and replayed (`caches.recurrence`).
                mixer(hidden, mask=None, cache=leaf)
            else:
                _keep_in_step(leaf, hidden)
        return hidden

    return type(f"Empty{kind.__name__}", (kind,), {"__call__": call})


@cache
def _empty_mixer(kind: type[nn.Module]) -> type[nn.Module]:
    cache_in = _finder(kind)

    @wraps(kind.__call__)
    def call(self: nn.Module, hidden: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        _keep_in_step(cache_in(args, kwargs), hidden)
        return hidden

    return type(f"Empty{kind.__name__}", (kind,), {"__call__": call})


@cache
def _with_end(kind: type[nn.Module]) -> type[nn.Module]:
    """The last layer of a run: what it puts out is needed on all ranks."""

    def call(self: nn.Module, hidden: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        result: mx.array = kind.__call__(self, hidden, *args, **kwargs)
        pass_on, is_own = self.__dict__[_END]
        if not is_own:
            # After what was summed before it.
            result = mx.depends(mx.zeros_like(hidden), hidden)
        elif (result.shape, result.dtype) != (hidden.shape, hidden.dtype):
            raise ValueError(f"a layer made {result.dtype} {result.shape} of {hidden.dtype} {hidden.shape}")
        whole: mx.array = pass_on(result)
        return whole

    return type(f"EndOfRun{kind.__name__}", (kind,), {"__call__": call})


def _finder(kind: type[nn.Module]) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
    """Finds the cache among what a layer is called with after its hidden states."""
    place = list(inspect.signature(kind.__call__).parameters).index("cache") - 2
    return lambda args, kwargs: args[place] if place < len(args) else kwargs["cache"]


def _keep_in_step(leaf: Any, hidden: mx.array) -> None:
    """Let a cache go on as the real layer's does for these hidden states (B, L, D)."""
    rows, count, _ = hidden.shape
    if isinstance(leaf, ArraysCache):
        for i in range(len(leaf.cache)):
            leaf[i] = mx.zeros((rows, 1), hidden.dtype)
        leaf.advance(count)
    else:
        nothing = mx.zeros((rows, 1, count, 1), hidden.dtype)
        leaf.update_and_fetch(nothing, nothing)
