"""Taking rejected tokens back out of a target's caches.

A round feeds the anchor and some drafts; the first `keep` of them stay. How the others leave depends on the cache:

- full attention and sliding windows: the newest positions are cut off (`trimming.py`);
- recurrent layers, and any cache that this project does not know: its state is remembered before each forward. After
  a rejection it is put back and the kept tokens go through the layer again: through its recurrence only, where that
  could be recorded (`recurrence.py`), otherwise through the whole model.

So every architecture of mlx-lm is right, and those with public drafters do not pay for a second forward.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.caches.recurrence import Recorder, Recording
from dflash_mlx.caches.trimming import can_trim, is_trimmed, leaves, trim


class Rollback(Protocol):
    """What the decode loop needs of a target's caches around its forwards."""

    def feeding(self, cache: list[Any], tokens: mx.array, *, revocable: bool) -> AbstractContextManager[None]:
        """Around each forward of tokens (1, L); `revocable` if `commit` may keep only some of them."""

    def commit(self, cache: list[Any], *, fed: int, keep: int) -> None:
        """Once for each forward, oldest first: leave the first `keep` of its `fed` positions in the cache."""

    def trim(self, cache: list[Any], count: int) -> bool:
        """Take out the last `count` positions, committed or not; False, and nothing done, if this cache cannot."""


class TrimRollback:
    """For caches that are all trimmed."""

    def feeding(self, cache: list[Any], tokens: mx.array, *, revocable: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def commit(self, cache: list[Any], *, fed: int, keep: int) -> None:
        trimmed = self.trim(cache, fed - keep)
        assert trimmed, f"cannot take the last {fed - keep} of {fed} positions out of the cache"

    def trim(self, cache: list[Any], count: int) -> bool:
        parts = leaves(cache)
        if not all(can_trim(leaf, count) for leaf in parts):
            return False
        for leaf in parts:
            trim(leaf, count)
        return True


@dataclass
class _Forward:
    """A forward that is not committed: its tokens (1, L) and the recurrent states before it."""

    tokens: mx.array
    states: list[dict[str, Any]]
    recording: Recording | None = None

    @property
    def fed(self) -> int:
        return int(self.tokens.shape[1])


class ReplayRollback:
    """For models with caches that cannot be trimmed; attention layers among them are trimmed all the same."""

    def __init__(self, layers: Sequence[nn.Module], forward: Callable[[mx.array, list[Any]], mx.array]) -> None:
        self._forward = forward
        self._recorder = Recorder(layers)
        self._forwards: list[_Forward] = []

    @contextmanager
    def feeding(self, cache: list[Any], tokens: mx.array, *, revocable: bool) -> Iterator[None]:
        recurrent = _recurrent(cache)
        forward = _Forward(tokens, [_save(leaf) for leaf in recurrent])
        self._forwards.append(forward)
        if not revocable:
            yield
            return
        with self._recorder.recording(recurrent) as forward.recording:
            yield

    def commit(self, cache: list[Any], *, fed: int, keep: int) -> None:
        forward = self._forwards.pop(0)
        assert forward.fed == fed, f"a forward of {forward.fed} positions was committed as one of {fed}"
        if keep == fed:
            return
        assert not self._forwards, "a block was only partly kept, and more had been fed after it"
        recording = forward.recording
        if keep and recording is not None and recording.is_complete(_recurrent(cache), fed):
            _restore(cache, forward, drop=fed - keep)
            self._recorder.replay(recording, keep)
            return
        _restore(cache, forward, drop=fed)
        if keep:
            self._forward(forward.tokens[:, :keep], cache)

    def trim(self, cache: list[Any], count: int) -> bool:
        """Whole forwards that are not committed can be taken out; what was committed cannot."""
        if count == 0:
            return True
        first, total = len(self._forwards), 0
        while first and total < count:
            first -= 1
            total += self._forwards[first].fed
        attention = [leaf for leaf in leaves(cache) if is_trimmed(leaf)]
        if total != count or not all(can_trim(leaf, count) for leaf in attention):
            return False
        _restore(cache, self._forwards[first], drop=count)
        del self._forwards[first:]
        return True


def choose_rollback(
    cache: list[Any], layers: Sequence[nn.Module], forward: Callable[[mx.array, list[Any]], mx.array]
) -> Rollback:
    """The rollback for a model's caches; `layers` and `forward` (tokens (1, L), caches) are the model's."""
    return TrimRollback() if not _recurrent(cache) else ReplayRollback(layers, forward)


def _recurrent(cache: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves(cache) if not is_trimmed(leaf)]


def _restore(cache: list[Any], forward: _Forward, *, drop: int) -> None:
    """Trim the attention layers by `drop` positions and put the recurrent ones back to before a forward."""
    for leaf in leaves(cache):
        if is_trimmed(leaf):
            assert can_trim(leaf, drop), f"cannot take the last {drop} positions out of a {type(leaf).__name__}"
            trim(leaf, drop)
    for leaf, state in zip(_recurrent(cache), forward.states, strict=True):
        vars(leaf).clear()
        vars(leaf).update(state)


def _save(leaf: Any) -> dict[str, Any]:
    return {name: _copied(value) for name, value in vars(leaf).items()}


def _copied(value: Any) -> Any:
    """A copy whose arrays are new handles on the same data: an assignment into the original does not reach it."""
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return copy.copy(value) if isinstance(value, mx.array) or value is None else copy.deepcopy(value)
