"""mlx-lm's own caches of one answer: how tokens leave them, and copies of their beginning."""

import copy
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from dflash_mlx.caches.rollback import Rollback
from dflash_mlx.caches.row_layers import RowKVCache
from dflash_mlx.ranks.mirror import Mirrored, mirrored

SLICED = (KVCache, QuantizedKVCache)


class OwnCaches(list[Any], Mirrored):
    """A cache for each layer, as mlx-lm makes them; `rollback` takes out what was rejected."""

    def __init__(self, layers: Iterable[Any], rollback: Rollback) -> None:
        super().__init__(layers)
        self.rollback = rollback

    @mirrored
    def trim(self, count: int) -> bool:
        """Take out the last `count` positions; False, and nothing done, if these caches cannot."""
        return self.rollback.trim(self, count)

    def arrays(self) -> list[mx.array]:
        return arrays_of(list(self))


def copies(layers: Iterable[Any], row: int, length: int) -> list[Any]:
    """Copies of a row's first `length` positions in the caches of a batch, or of one answer's own (row 0).

    Of other kinds than full attention everything is copied. The copies are computed before this returns.
    """
    found = [_copy_layer(layer, row, length) for layer in layers]
    mx.eval(arrays_of(found))
    return found


def arrays_of(value: Any) -> list[mx.array]:
    """Every array in caches and in lists, tuples and dicts of them."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, dict):
        return [array for item in value.values() for array in arrays_of(item)]
    if isinstance(value, list | tuple):
        return [array for item in value for array in arrays_of(item)]
    return arrays_of(vars(value)) if _is_cache(value) else []


def _is_cache(value: Any) -> bool:
    return hasattr(value, "state") and hasattr(value, "is_trimmable")


def _copy_layer(layer_cache: Any, row: int, length: int) -> Any:
    if isinstance(layer_cache, RowKVCache):
        twin = KVCache()
        twin.keys, twin.values = (
            mx.contiguous(layer_cache.in_order(array, length)[row : row + 1])
            for array in (layer_cache.keys, layer_cache.values)
        )
        twin.offset = length
        return twin
    if type(layer_cache) not in SLICED:
        return _copy(layer_cache)
    twin = copy.copy(layer_cache)
    twin.offset = min(length, layer_cache.offset)
    if twin.offset == 0:
        twin.keys = twin.values = None
    else:
        twin.keys = _cut(layer_cache.keys, twin.offset)
        twin.values = _cut(layer_cache.values, twin.offset)
    return twin


def _cut(value: Any, length: int) -> Any:
    """The first positions of keys or values (..., L, D); of quantized ones, a tuple of such arrays."""
    if isinstance(value, list | tuple):
        return type(value)(_cut(part, length) for part in value)
    return mx.contiguous(value[..., :length, :])


def _copy(value: Any) -> Any:
    """Copy caches and containers, with array objects of their own: a cache writes into its arrays in place."""
    if isinstance(value, mx.array):
        return copy.copy(value)
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy(item) for item in value)
    if _is_cache(value):
        twin = copy.copy(value)
        vars(twin).update(_copy(vars(value)))
        return twin
    return value
