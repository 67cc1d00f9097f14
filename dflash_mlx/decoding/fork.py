"""Copies of a session, whole or of its beginning, and what they weigh."""

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from dflash_mlx.caches.rows import RowKVCache
from dflash_mlx.caches.trimming import can_trim, is_trimmed, leaves
from dflash_mlx.decoding.session import Session

_SLICED = (KVCache, QuantizedKVCache)


def can_cut(session: Session) -> bool:
    """Whether any beginning of the session can be had: its caches keep every position apart (full attention)."""
    return all(type(layer_cache) in _SLICED for layer_cache in [*session.target_cache, *session.draft_cache])


def can_rewind(session: Session, length: int) -> bool:
    """Whether `session.rewind(length)` would keep the first `length` tokens, and not forget everything."""
    count = len(session.tokens) - length
    return count == 0 or all(is_trimmed(leaf) and can_trim(leaf, count) for leaf in leaves(session.target_cache))


def fork(session: Session, length: int) -> Session:
    """A session of its own with the first `length` of these tokens; the original may go on, even in mid-answer.

    Caches of other kinds than full attention can only be copied whole: between answers, and with `length` all tokens.
    """
    assert length <= len(session.tokens)
    assert can_cut(session) or (length == len(session.tokens) and session.away is None)
    twin = Session(session.target, session.drafter)
    twin.tokens = session.tokens[:length]
    # In mid-answer the caches are a row of a batch; what is committed is the same there.
    row, target_cache, draft_cache = 0, session.target_cache, list[Any](session.draft_cache)
    if session.away is not None:
        row, target_cache, draft_cache = session.away.layers_of(session)
    twin.target_cache = [_copy_cache(layer_cache, row, length) for layer_cache in target_cache]
    twin.draft_cache = [_copy_cache(layer_cache, row, length) for layer_cache in draft_cache]
    mx.eval([*arrays_of(twin.target_cache), *arrays_of(twin.draft_cache)])
    return twin


def session_bytes(session: Session) -> int:
    """Memory that a session at home holds."""
    return sum(array.nbytes for array in arrays_of([session.target_cache, session.draft_cache]))


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


def _copy_cache(layer_cache: Any, row: int, length: int) -> Any:
    if isinstance(layer_cache, RowKVCache):
        twin = KVCache()
        twin.keys, twin.values = (
            _cut(array[row : row + 1], length) for array in (layer_cache.keys, layer_cache.values)
        )
        twin.offset = length
        return twin
    if type(layer_cache) not in _SLICED:
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
