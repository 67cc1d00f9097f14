"""Taking rejected tokens back out of a target's cache.

A round feeds the anchor and some drafts; `keep` of them stay. How the others leave depends on the cache:

- full attention (`KVCache` and its quantized form): the length is set back (`trim`);
- sliding-window and recurrent layers need more (slack, or a replay of the recurrence) and get their own
  `Rollback` here when their families are added.
"""

from typing import Any, Protocol

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from dflash_mlx.errors import PairError


class Rollback(Protocol):
    """What the decode loop needs of a target's cache around one verify forward."""

    def begin(self, cache: list[Any]) -> None:
        """Called before a block is fed: remember what `commit` will need."""

    def commit(self, cache: list[Any], *, fed: int, keep: int) -> None:
        """Called after it: leave the first `keep` of the `fed` positions in the cache."""

    def trim(self, cache: list[Any], count: int) -> bool:
        """Take the last `count` positions out between requests; False if this cache cannot."""


class TrimRollback:
    """For caches whose length can simply be set back."""

    def begin(self, cache: list[Any]) -> None:
        pass

    def commit(self, cache: list[Any], *, fed: int, keep: int) -> None:
        self.trim(cache, fed - keep)

    def trim(self, cache: list[Any], count: int) -> bool:
        if count:
            for layer_cache in cache:
                trimmed = layer_cache.trim(count)
                assert trimmed == count, f"asked a cache to trim {count} positions, it trimmed {trimmed}"
        return True


def choose_rollback(cache: list[Any]) -> Rollback:
    """The rollback for a model's cache. Raises PairError for caches that cannot be rolled back yet."""
    others = sorted({type(c).__name__ for c in cache if type(c) not in (KVCache, QuantizedKVCache)})
    if others:
        raise PairError(
            f"drafting needs a target whose caches can be rolled back; this one uses {', '.join(others)} "
            "(sliding-window or recurrent layers), which this version cannot. Run it with --no-draft."
        )
    return TrimRollback()
