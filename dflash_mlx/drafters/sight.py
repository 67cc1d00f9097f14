"""What the rows of a block see: of the cached positions before it, and of each other."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Sight:
    """The rows to read, `count` from `first` on (all of them when None), and what each row of the block sees of them.

    mask: boolean, (block, rows read) and behind those the block's own where they are not among them; None where
    everything is visible.
    """

    mask: mx.array | None
    first: int | mx.array = 0
    count: int | None = None

    def read(self, rows: mx.array) -> mx.array:
        """The rows in sight, out of all (1, heads, rows, head_dim)."""
        if self.count is None:
            return rows
        if isinstance(self.first, int):
            return rows[..., self.first : self.first + self.count, :]
        size = (*rows.shape[:2], self.count, rows.shape[3])
        return mx.slice(rows, self.first.reshape(1), (2,), size)


def look(block: int, held: int, valid: int | mx.array | None, *, causal: bool, window: int | None) -> Sight:
    """The sight of `block` rows behind `valid` of `held` cached positions (all of them when None).

    With a window a row sees positions less than `window` away, and what no row sees is not even read. Inside the
    block a row sees all rows, or those up to itself when `causal`.
    """
    if valid is None and not causal and window is None:
        return Sight(None)
    if valid is None:
        valid = held
    if window is None or held < window:
        return Sight(_mask(block, mx.arange(held), valid, causal=causal, window=window))
    count = window - 1
    oldest = valid - count
    first = max(0, oldest) if isinstance(oldest, int) else mx.maximum(oldest, 0)
    return Sight(_mask(block, first + mx.arange(count), valid, causal=causal, window=window), first, count)


def look_in_place(block: int, rows: int, valid: int | mx.array, *, causal: bool, window: int | None) -> Sight:
    """`look` for a block that is written into a cache of `rows` rows, behind the `valid` positions of its context."""
    count = rows if window is None else min(rows, window - 1 + block)
    first = mx.clip(mx.array(valid) - (count - block), 0, rows - count) if count < rows else 0
    positions = first + mx.arange(count)
    own = valid + mx.arange(block)[:, None]
    mask = positions <= own if causal else mx.broadcast_to(positions < valid + block, (block, count))
    if window is not None:
        mask = mask & (mx.abs(own - positions) < window)
    return Sight(mask, first, count if count < rows else None)


def _mask(block: int, positions: mx.array, valid: int | mx.array, *, causal: bool, window: int | None) -> mx.array:
    """positions: (n,), those of the cached rows -> (block, n + block)."""
    rows = mx.arange(block)[:, None]
    context = mx.broadcast_to(positions < valid, (block, positions.shape[0]))
    inside = rows >= rows.T if causal else mx.ones((block, block), dtype=mx.bool_)
    if window is not None:
        context = context & (valid + rows - positions < window)
        inside = inside & (mx.abs(rows.T - rows) < window)
    return mx.concatenate([context, inside], axis=1)
