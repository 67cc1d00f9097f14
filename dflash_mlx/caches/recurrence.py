"""Replaying only the recurrences of a block: of its accepted part, from the states before it.

A recurrent layer (GatedDeltaNet, Mamba, a short convolution) projects its input, runs a convolution and a recurrence
over time, and projects the result. While a block is verified, this records what goes into such a mixer and what comes
out of its linear projections. To keep only the first tokens of the block, the mixer itself is called again with their
inputs, its projections answer from the recording, and only the convolution and the recurrence are computed: no weight
matrix is read a second time (the last projection's result is not used, so MLX never computes it). The arithmetic is
mlx-lm's own, whatever its version.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.caches.tree_recurrence import BranchedRecurrences
from dflash_mlx.hooks import subclassed

# What mlx-lm's decoder layers call the part that alone reads and writes a recurrent cache; "self_attn" in those layers
# that say of themselves that they are linear.
_MIXERS = ("linear_attn", "mixer", "mamba", "conv", "temporal_block")
_HOOK = "_dflash_recurrence_hook"


@dataclass
class _Call:
    mixer: nn.Module
    kind: type[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def values(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]


@dataclass
class Recording:
    """The mixers' calls in one forward and the outputs of their projections; None where one ran more than once."""

    calls: list[_Call] = field(default_factory=list)
    outputs: dict[int, mx.array | None] = field(default_factory=dict)

    def of(self, rows: mx.array | slice) -> "Recording":
        """The same for some rows only of each answer's block."""

        def taken(value: Any) -> Any:
            return value[:, rows] if isinstance(value, mx.array) else value

        calls = [
            _Call(call.mixer, call.kind, tuple(map(taken, call.args)), {n: taken(v) for n, v in call.kwargs.items()})
            for call in self.calls
        ]
        return Recording(calls, {key: taken(output) for key, output in self.outputs.items()})

    def is_complete(self, recurrent: Sequence[Any], fed: int, *, answers: int = 1) -> bool:
        """Whether replaying the calls brings all `recurrent` caches forward, of (answers, fed, ...) arguments."""
        seen = {id(value) for call in self.calls for value in call.values()}
        arrays = [value for call in self.calls for value in call.values() if isinstance(value, mx.array)]
        return all(id(leaf) in seen for leaf in recurrent) and all(a.shape[:2] == (answers, fed) for a in arrays)


class Recorder:
    """Records and replays the recurrent mixers of a model's layers."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._mixers = [mixer for layer in layers for mixer in mixers_of(layer)]
        self._linears = [
            module
            for mixer in self._mixers
            for module in mixer.modules()
            if isinstance(module, nn.Linear | nn.QuantizedLinear)
        ]
        self._branched = BranchedRecurrences(self._mixers)

    @contextmanager
    def recording(self, recurrent: Sequence[Any], tree: Sequence[mx.array] | None = None) -> Iterator[Recording]:
        """Record the calls that get one of the `recurrent` caches, for one forward over a block, or a `tree`'s rows."""
        recording = Recording()
        caches = {id(leaf) for leaf in recurrent}

        def on_mixer(mixer: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if any(id(value) in caches for value in (*args, *kwargs.values())):
                recording.calls.append(_Call(mixer, type(mixer).__bases__[0], args, kwargs))
            return call(mixer, *args, **kwargs)

        def on_linear(linear: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            output = call(linear, *args)
            recording.outputs[id(linear)] = output if id(linear) not in recording.outputs else None
            return output

        with (
            self._branched.over(*tree) if tree is not None else nullcontext(),
            _hooked(self._mixers, on_mixer),
            _hooked(self._linears, on_linear),
        ):
            yield recording

    def replay(self, recording: Recording, keep: int) -> None:
        """Run the recorded calls again with their first `keep` tokens; their caches hold the states before them."""

        def on_linear(linear: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            recorded = recording.outputs.get(id(linear))
            if recorded is None or recorded.ndim != 3 or args[0].shape[:2] != (1, keep):
                return call(linear, *args)
            return recorded[:, :keep]

        with _hooked(self._linears, on_linear):
            for call in recording.calls:
                kwargs = {name: _first(value, keep) for name, value in call.kwargs.items()}
                call.mixer(*[_first(value, keep) for value in call.args], **kwargs)

    def replay_rows(self, recording: Recording, mask: mx.array) -> None:
        """Run the recorded calls of several answers again with only the tokens of `mask` (B, L), the first of each row.

        Their caches hold the states before them, and in `lengths` how many tokens of each row those are. What does not
        count is masked by mlx-lm's own code, which takes a mask for its batches; a mixer without one is refused by
        `takes_rows`.
        """

        def on_linear(linear: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], _: dict[str, Any]) -> Any:
            recorded = recording.outputs.get(id(linear))
            if recorded is None or args[0].shape[:-1] != recorded.shape[:-1]:
                return call(linear, *args)
            return recorded

        with _hooked(self._linears, on_linear):
            for call in recording.calls:
                bound = _signature(call.kind).bind(call.mixer, *call.args, **call.kwargs)
                bound.arguments["mask"] = mask
                call.mixer(*bound.args[1:], **bound.kwargs)

    def takes_rows(self, recording: Recording) -> bool:
        """Whether every recorded mixer takes a mask of the tokens that count."""
        return all("mask" in _signature(call.kind).parameters for call in recording.calls)


def mixers_of(layer: nn.Module) -> list[nn.Module]:
    """The parts of a layer that may have a recurrent cache."""
    names = (*_MIXERS, "self_attn") if getattr(layer, "is_linear", False) else _MIXERS
    return [mixer for name in names if isinstance(mixer := layer.get(name), nn.Module)]


@cache
def _signature(kind: type[nn.Module]) -> inspect.Signature:
    return inspect.signature(kind.__call__)


def _first(value: Any, keep: int) -> Any:
    return value[:, :keep] if isinstance(value, mx.array) else value


def _hooked(modules: Sequence[nn.Module], hook: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let `hook(module, original_call, args, kwargs)` answer the calls of these instances."""
    return subclassed(modules, _hooked_class, notes={_HOOK: [hook] * len(modules)})


@cache
def _hooked_class(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_HOOK](self, kind.__call__, args, kwargs)

    return type(f"Hooked{kind.__name__}", (kind,), {"__call__": call})
