"""Reading the outputs of a model's decoder layers while it runs, without changing the model.

A tap is a hook (`hooks.py`) on one layer *instance* for the length of one forward, so one model can serve any number of
drafters with different taps.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.hooks import subclassed

_SINK = "_dflash_tap_sink"


@contextmanager
def tapped(layers: Sequence[nn.Module], layer_ids: Sequence[int]) -> Iterator[dict[int, mx.array]]:
    """Record the outputs of `layers[i]` for i in `layer_ids` in the dict that is returned.

    Outputs have the layer's own shape, (1, L, D); of a layer that returns a tuple, the first item. If a layer
    runs more than once inside the block, the last output counts.
    """
    outputs: dict[int, mx.array] = {}
    sinks = [(outputs, i) for i in layer_ids]
    with subclassed([layers[i] for i in layer_ids], _tapped_class, notes={_SINK: sinks}):
        yield outputs


@cache
def _tapped_class(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = kind.__call__(self, *args, **kwargs)
        outputs, layer_id = self.__dict__[_SINK]
        # A handle of its own: some models go on to change their hidden states in place.
        outputs[layer_id] = copy.copy(result[0] if isinstance(result, tuple) else result)
        return result

    return type(f"Tapped{kind.__name__}", (kind,), {"__call__": call})
