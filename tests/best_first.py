"""Trees of drafts by a plain search on the host, the likeliest first: what is found on the device must be the same."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from dflash_mlx.decoding.tree import DraftTree
from dflash_mlx.tree_steps import SUREST


class Node(NamedTuple):
    """A draft in the order in which it is found.

    chance: its path's; place: 0 right after the anchor; rank: which of the place's candidates it is; parent: the node
    before it on its path, None for the anchor.
    """

    chance: float
    place: int
    rank: int
    parent: int | None


def best_first(log_probs: np.ndarray, *, scale: float = 1.0) -> Iterator[Node]:
    """The ends of all paths through candidates (W, K), the best first at each place, in falling order of their chances.

    `scale` multiplies every probability, which stays below 1.
    """
    if len(log_probs) == 0:
        return
    probabilities = np.minimum(np.exp(log_probs.astype(np.float64)) * scale, SUREST).tolist()
    # Waiting: (minus the chance, place, rank, parent, the parent's chance). A node brings its next sibling and its
    # likeliest child in, so every node waits exactly once.
    waiting = [(-probabilities[0][0], 0, 0, -1, 1.0)]
    count = 0
    while waiting:
        negative, place, rank, parent, before = heapq.heappop(waiting)
        yield Node(-negative, place, rank, parent if parent >= 0 else None)
        if rank + 1 < len(probabilities[place]):
            heapq.heappush(waiting, (-before * probabilities[place][rank + 1], place, rank + 1, parent, before))
        if place + 1 < len(probabilities):
            heapq.heappush(waiting, (negative * probabilities[place + 1][0], place + 1, 0, count, -negative))
        count += 1


@dataclass(frozen=True)
class HostTree:
    """N drafts: their tokens, the rows of their parents, and the drafter's probability of each at its place."""

    tokens: Sequence[int]
    parents: Sequence[int]
    probabilities: Sequence[float]

    @classmethod
    def of(cls, nodes: Sequence[Node], token_ids: np.ndarray, log_probs: np.ndarray) -> "HostTree":
        """The tree of the first nodes that `best_first` gave, path by path, the likeliest first."""
        children: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
        for i, node in enumerate(nodes):
            children[0 if node.parent is None else node.parent + 1].append(i)
        order: list[int] = []
        rows = {0: 0}
        waiting = children[0][::-1]
        while waiting:
            i = waiting.pop()
            order.append(i)
            rows[i + 1] = len(order)
            waiting += children[i + 1][::-1]
        drafted = [nodes[i] for i in order]
        return cls(
            [int(token_ids[node.place, node.rank]) for node in drafted],
            [rows[0 if node.parent is None else node.parent + 1] for node in drafted],
            [float(np.exp(log_probs[node.place, node.rank])) for node in drafted],
        )

    @property
    def size(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> list[int]:
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @cached_property
    def visible(self) -> np.ndarray:
        visible = np.eye(self.size + 1, dtype=bool)
        for row, parent in enumerate(self.parents, start=1):
            visible[row] |= visible[parent]
        return visible

    @property
    def on_device(self) -> DraftTree:
        tokens, depths = mx.array(list(self.tokens), dtype=mx.uint32), mx.array(self.depths)
        visible, probabilities = mx.array(self.visible), mx.array(list(self.probabilities), dtype=mx.float32)
        return DraftTree(tokens, probabilities, depths, visible, max(self.depths))

    def walk(self, tokens: Sequence[int]) -> list[int]:
        """The rows that a text goes through."""
        path = [0]
        for token in tokens:
            found = [i for i, p in enumerate(self.parents, 1) if p == path[-1] and self.tokens[i - 1] == token]
            if not found:
                break
            path += found
        return path

    def promised(self, path: Sequence[int]) -> float:
        """The probability that the path went on, summed over the rows of it that have children."""
        on_path = set(path)
        return sum(p for parent, p in zip(self.parents, self.probabilities, strict=True) if parent in on_path)
