"""A tree of drafts: several ways the text may go on, judged in one forward (DDTree, arXiv 2604.12989, section 4).

A drafter says of each place after the anchor how likely each token is there, whatever comes before it. A path's chance
is the product of its tokens' probabilities, so the likeliest paths are found best first, and the sum of their chances
is the number of drafts that the target can be expected to keep.

Rows of a round: row 0 is the anchor, row i the draft i - 1 of the tree. A row comes after its parent's.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from dflash_mlx.sampling import best_columns

# Tokens considered at each place. With 48 instead, a tree of 31 drafts of the demo pair gains 3.67 tokens a round and
# not 3.65 (built-in prompts, replayed).
BRANCHES = 8


@dataclass(frozen=True)
class Candidates:
    """A drafter's K best tokens at each of W places: token_ids and log_probs, (W, K), the best first."""

    token_ids: np.ndarray
    log_probs: np.ndarray

    @property
    def depth(self) -> int:
        return len(self.token_ids)

    def shortened(self, depth: int) -> "Candidates":
        return Candidates(self.token_ids[:depth], self.log_probs[:depth])


@dataclass
class Ranking:
    """Candidates still on the device, in no order: token_ids and log_probs, (W, K)."""

    token_ids: mx.array
    log_probs: mx.array

    def take(self, parts: Sequence[int], of: int) -> "Ranking":
        """Of `of` answers' rankings, one after another, those of some."""
        index = mx.array(list(parts))
        few = [a.reshape(of, -1, a.shape[1])[index].reshape(-1, a.shape[1]) for a in (self.token_ids, self.log_probs)]
        return Ranking(*few)

    def read(self) -> Candidates:
        """Wait for the device."""
        ids, log_probs = np.array(self.packed).reshape(2, *self.token_ids.shape)
        log_probs = log_probs.view(np.float32)
        order = np.argsort(-log_probs, axis=1, kind="stable")
        return Candidates(np.take_along_axis(ids, order, axis=1), np.take_along_axis(log_probs, order, axis=1))

    @cached_property
    def packed(self) -> mx.array:
        """Both as one array of uint32."""
        return mx.concatenate(
            [self.token_ids.astype(mx.uint32).flatten(), self.log_probs.astype(mx.float32).flatten().view(mx.uint32)]
        )


def rank(scores: mx.array, count: int, token_ids: mx.array | None = None) -> Ranking:
    """The `count` likeliest tokens by scores (W, V), or (W, n) of the n tokens `token_ids`."""
    # Tokens that a filter has removed are the last choice, but stay numbers.
    scores = mx.maximum(scores.astype(mx.float32), -1e30)
    columns = best_columns(scores, min(count, scores.shape[1]))
    log_probs = mx.take_along_axis(scores, columns, axis=-1) - mx.logsumexp(scores, axis=-1, keepdims=True)
    return Ranking(columns if token_ids is None else token_ids[columns], log_probs)


class Node(NamedTuple):
    """A draft in the order of growth.

    chance: its path's; place: 0 right after the anchor; rank: which of the place's candidates it is; parent: the node
    before it on its path, None for the anchor.
    """

    chance: float
    place: int
    rank: int
    parent: int | None


def grow(candidates: Candidates, *, scale: float = 1.0) -> Iterator[Node]:
    """All paths' ends in falling order of their chances; a node always comes after its parent.

    `scale` multiplies every probability, which stays below 1.
    """
    if candidates.depth == 0:
        return
    probabilities = np.minimum(np.exp(candidates.log_probs.astype(np.float64)) * scale, 0.995).tolist()
    # Waiting: (minus the chance, place, rank, parent, the parent's chance). A node brings its next sibling and its
    # likeliest child in, so every node waits exactly once.
    waiting = [(-probabilities[0][0], 0, 0, -1, 1.0)]
    count = 0
    while waiting:
        negative, place, rank, parent, before = heapq.heappop(waiting)
        yield Node(-negative, place, rank, parent if parent >= 0 else None)
        if rank + 1 < len(probabilities[place]):
            heapq.heappush(waiting, (-before * probabilities[place][rank + 1], place, rank + 1, parent, before))
        if place + 1 < candidates.depth:
            heapq.heappush(waiting, (negative * probabilities[place + 1][0], place + 1, 0, count, -negative))
        count += 1


@dataclass(frozen=True)
class DraftTree:
    """N drafts: tokens (N,), the rows of their parents, and the drafter's probability of each token at its place.

    A parent comes before its children, and the likeliest path comes first, so that what is kept most often lies in the
    rows where it belongs.
    """

    tokens: np.ndarray
    parents: tuple[int, ...]
    probabilities: tuple[float, ...]

    @classmethod
    def of(cls, nodes: Sequence[Node], candidates: Candidates) -> "DraftTree":
        """The tree of the first nodes that `grow` gave for these candidates."""
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
        places, ranks = [node.place for node in drafted], [node.rank for node in drafted]
        return cls(
            candidates.token_ids[places, ranks].astype(np.uint32),
            tuple(rows[0 if node.parent is None else node.parent + 1] for node in drafted),
            tuple(np.exp(candidates.log_probs[places, ranks].astype(np.float64)).tolist()),
        )

    @property
    def size(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> list[int]:
        """Of each row, the anchor's 0 included: how far it is after the anchor, (N + 1,)."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        return max(self.depths)

    @cached_property
    def visible(self) -> np.ndarray:
        """Which rows each row continues, itself included: boolean (N + 1, N + 1)."""
        visible = np.eye(self.size + 1, dtype=bool)
        for row, parent in enumerate(self.parents, start=1):
            visible[row] |= visible[parent]
        return visible

    @property
    def shape(self) -> tuple[mx.array, mx.array]:
        """What the target's caches need to know of it (`caches.tree_rows.TreeShape`)."""
        return mx.array(self.depths, dtype=mx.int32), mx.array(self.visible)

    def promised(self, path: Sequence[int]) -> float:
        """The probability that the path went on, summed over the rows of it that have children."""
        on_path = set(path)
        return sum(p for parent, p in zip(self.parents, self.probabilities, strict=True) if parent in on_path)


def wide_sizes(places: int) -> tuple[int, int]:
    """Sizes of trees with more drafts than a chain of all places: about twice and four times as many, the largest."""
    return 2 * places + 1, 4 * places + 3


def walk(tree: DraftTree, choices: mx.array) -> tuple[mx.array, mx.array]:
    """Follow the target's choices (N + 1,), one for each row, from the anchor on: (num_accepted (), path (D + 1,)).

    path: the rows gone through, the anchor's first; what comes after index `num_accepted` is meaningless. Stays on the
    device.
    """
    parents = mx.array([0, *tree.parents])
    rows = mx.arange(tree.size + 1)
    differs = mx.concatenate([mx.array([0], dtype=mx.uint32), mx.array(tree.tokens)]) != choices[parents]
    differs = mx.where(rows == 0, False, differs)
    # A row is reached when it and all that it continues are what the target chose; siblings differ, so rows reached
    # make one path.
    reached = (differs[None] & mx.array(tree.visible)).sum(axis=1) == 0
    path = mx.argsort(mx.where(reached, rows, rows + rows.size))[: tree.depth + 1]
    return reached.sum() - 1, path
