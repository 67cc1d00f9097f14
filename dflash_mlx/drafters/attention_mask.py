"""What the rows of a block see: of the positions before it, and of each other."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class BlockMask:
    """The positions to read, `count` from `first` (B,) on (all of them when None), and what each row sees of them.

    mask: boolean, (B, 1, block, positions read).
    """

    mask: mx.array
    first: mx.array | None = None
    count: int = 0

    def read(self, rows: mx.array) -> mx.array:
        """The positions that are seen, out of all (B, heads, positions, head_dim)."""
        if self.first is None:
            return rows
        if rows.shape[0] == 1:
            return mx.slice(rows, self.first, (2,), (*rows.shape[:2], self.count, rows.shape[3]))
        index = self.first[:, None] + mx.arange(self.count)
        return mx.take_along_axis(rows, index[:, None, :, None], axis=2)


def block_mask(block: int, positions: int, at: mx.array, *, causal: bool, window: int | None) -> BlockMask:
    """The mask of blocks of `block` rows, written at the positions `at` (B,) of caches with so many `positions`.

    A row sees the context before its block. With a window it sees rows less than `window` away, and what no row sees is
    not even read. Inside the block a row sees all rows, or those up to itself when `causal`.
    """
    count = positions if window is None else min(positions, window - 1 + block)
    first = mx.clip(at - (count - block), 0, positions - count) if count < positions else None
    start = at[:, None, None, None]
    read = mx.arange(count) + (0 if first is None else first[:, None, None, None])
    own = start + mx.arange(block)[:, None]
    last = own if causal else mx.broadcast_to(start + block - 1, own.shape)
    mask = read <= last
    if window is not None:
        mask = mask & (mx.abs(own - read) < window)
    return BlockMask(mask, first, count)
