"""Copies of a session, whole or of its beginning, and what they weigh."""

from typing import Any

from dflash_mlx.caches.own import SLICED, OwnCaches, arrays_of, copies
from dflash_mlx.caches.target_caches import BatchCaches
from dflash_mlx.caches.trimming import can_trim, is_trimmed, leaves
from dflash_mlx.decoding.session import Session


def can_cut(session: Session) -> bool:
    """Whether any beginning of the session can be had: its caches keep every position apart (full attention)."""
    return all(type(layer_cache) in SLICED for layer_cache in [*session.target_cache, *session.draft_cache])


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
    row, draft_cache = 0, list[Any](session.draft_cache)
    target_cache: OwnCaches | BatchCaches = session.target_cache
    if session.away is not None:
        row, target_cache, draft_cache = session.away.layers_of(session)
    twin.target_cache = session.target.copy_caches(target_cache, row, length)
    twin.draft_cache = copies(draft_cache, row, length)
    return twin


def session_bytes(session: Session) -> int:
    """Memory that a session at home holds."""
    return sum(array.nbytes for array in arrays_of([session.target_cache, session.draft_cache]))
