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
    # Numbers of a kind that differ from call to call come from arrays: MLX compiles anew for each that it is given.
    rows, places = mx.arange(block), mx.arange(positions)
    first = mx.clip(at - (window - 1), 0, places[-count]) if window is not None and count < positions else None
    read = places if first is None else places[:count] + first[:, None, None, None]
    own = at[:, None, None, None] + rows[:, None]
    mask = read <= (own if causal else own[:, :, -1:])
    if window is not None:
        mask = mask & (mx.abs(own - read) < window)
    return BlockMask(mx.broadcast_to(mask, (*own.shape[:3], count)), first, count)
