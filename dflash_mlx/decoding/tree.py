"""A tree of drafts: several ways the text may go on, judged in one forward (DDTree, arXiv 2604.12989, section 4).

A path's chance is the product of its tokens' probabilities, and the sum of the paths' chances is the number of drafts
that the target can be expected to keep. So the likeliest paths make the best tree. Some drafters say of each place
after the anchor how likely each token is there, whatever comes before it: the likeliest of all paths are found then
(`likeliest`). Others read each path that they continue: the likeliest of those that were grown are taken
(`likeliest_grown`). Both is done on the device, and the host reads the chances only where it chooses by them.

Rows of a round: row 0 is the anchor, row i the draft i - 1 of the tree. A row comes after its parent's.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.growing import Grown
from dflash_mlx.drafters.ranking import Ranking

# A path is always likelier than what continues it: no probability counts as more than this, or as less than e^-30.
SUREST, _LEAST = 0.995, -30.0


class Paths(NamedTuple):
    """Paths through the ranks of W places, K at each, which alone can be among the likeliest; the first is empty.

    They come in the order of a dictionary: a path, then all that continue it. terms: (C, T), what a path's chance is
    made of, as indices into the sums of the likeliest path's first 0, 1, ... W logarithms, followed by how much less
    likely each candidate is than the best of its place. marks: (3, C), a path's depth, its last candidate, and the
    first path after it that does not continue it.
    """

    terms: mx.array
    marks: mx.array


@cache
def likely_paths(places: int, branches: int, size: int) -> Paths:
    """The paths that can be among the `size` likeliest, whatever the probabilities are.

    All paths are likelier that have no higher rank at any place, and all that these continue. Their number, which
    grows with every rank, may not exceed `size`.
    """
    # Of the paths of a length: their ranks, -1 after their ends; how many have no higher rank; how many are likelier.
    ranks, equals, better = np.full((1, places), -1), np.ones(1, dtype=int), np.zeros(1, dtype=int)
    levels = [ranks]
    for place in range(places):
        more = equals[:, None] * np.arange(1, branches + 1)
        kept, own = np.nonzero(better[:, None] + more <= size)
        equals, better = more[kept, own], better[kept] + more[kept, own]
        ranks = ranks[kept]
        ranks[:, place] = own
        levels.append(ranks)
    ranks = np.concatenate(levels)
    ranks = ranks[np.lexsort(ranks.T[::-1])]
    depths = (ranks >= 0).sum(axis=1)
    ends = np.full(len(ranks), len(ranks))
    for length in range(1, places + 1):
        [shallow], [same] = np.nonzero(depths <= length), np.nonzero(depths == length)
        ends[same] = np.append(shallow, len(ranks))[np.searchsorted(shallow, same, side="right")]
    lasts = np.maximum(depths - 1, 0)
    candidates = lasts * branches + np.maximum(ranks[np.arange(len(ranks)), lasts], 0)

    row, column = np.nonzero(ranks > 0)
    slot = np.arange(len(row)) - np.searchsorted(row, row)
    # The best candidate of the first place is as likely as itself: a term that adds nothing.
    terms = np.full((len(ranks), 2 + slot.max(initial=-1)), places + 1)
    terms[:, 0] = depths
    terms[row, 1 + slot] = places + 1 + column * branches + ranks[row, column]
    return Paths(mx.array(terms.astype(np.int32)), mx.array(np.stack([depths, candidates, ends]).astype(np.int32)))


@dataclass
class Likeliest:
    """The N likeliest drafts of a tree, on the device, of W places.

    found: (N + 1,), which of the paths they are, the likeliest first, after the anchor's; chances: (N,), falling.
    """

    ranking: Ranking
    paths: Paths
    found: mx.array
    chances: mx.array

    @property
    def size(self) -> int:
        return int(self.chances.shape[0])

    @property
    def branched(self) -> bool:
        """Whether there are several tokens for a place."""
        return int(self.ranking.token_ids.shape[1]) > 1

    def tree(self, size: int) -> "DraftTree":
        """The tree of the `size` likeliest of them."""
        size = min(size, self.size)
        found = mx.sort(self.found[: size + 1])
        depths, last, after = self.paths.marks[:, found]
        visible = (found <= found[:, None]) & (found[:, None] < after)
        token_ids, log_probs = (a.flatten()[last[1:]] for a in (self.ranking.token_ids, self.ranking.log_probs))
        longest = min(size, int(self.ranking.token_ids.shape[0]))
        return DraftTree(token_ids.astype(mx.uint32), mx.exp(log_probs), depths, visible, longest)


def likeliest(ranking: Ranking, size: int, *, scale: float = 1.0) -> Likeliest:
    """The `size` likeliest drafts, or all there are; `scale` multiplies every probability, which stays below 1."""
    places, branches = ranking.token_ids.shape
    size = min(size, sum(branches**depth for depth in range(1, places + 1)))
    paths = likely_paths(places, branches, size)
    log_probs = _scaled(ranking.log_probs, scale)
    # Over the whole rows: of a single number with others of its row behind it, MLX's sum writes those, too, on CUDA.
    straight = mx.cumsum(log_probs, axis=0)[:, 0]
    lesser = (log_probs - log_probs[:, :1]).flatten()
    sums = mx.concatenate([mx.zeros((1,)), straight, lesser])[paths.terms].sum(axis=1)
    found = mx.argpartition(-sums, size)[: size + 1] if size + 1 < sums.size else mx.arange(sums.size)
    found = found[mx.argsort(-sums[found])]
    return Likeliest(ranking, paths, found, mx.exp(sums[found[1:]]))


def _scaled(log_probs: mx.array, scale: float) -> mx.array:
    """Logarithms of probabilities that are multiplied by `scale`, within what counts."""
    return mx.clip(log_probs + float(np.log(scale)), _LEAST, float(np.log(SUREST)))


@dataclass
class LikeliestGrown:
    """The N likeliest drafts of those that were grown, on the device. found: (N,), which they are, the likeliest first;
    chances: (N,), falling."""

    grown: Grown
    found: mx.array
    chances: mx.array
    branched = True

    @property
    def size(self) -> int:
        return int(self.chances.shape[0])

    def tree(self, size: int) -> "DraftTree":
        """The tree of the `size` likeliest of them."""
        size = min(size, self.size)
        # Grown place by place, so that a parent has a lower index.
        found = mx.sort(self.found[:size])
        paths = self.grown.paths[found]
        visible = mx.pad((paths[:, :, None] == found).any(axis=1), [(1, 0), (1, 0)])
        visible = visible | (mx.arange(size + 1) == 0)
        depths = mx.pad((paths < self.grown.size).sum(axis=1), (1, 0))
        tokens, probabilities = self.grown.token_ids[found], mx.exp(self.grown.log_probs[found])
        return DraftTree(tokens.astype(mx.uint32), probabilities, depths, visible, min(size, paths.shape[1]))


def likeliest_grown(grown: Grown, size: int, *, scale: float = 1.0) -> LikeliestGrown:
    """See `likeliest`."""
    size = min(size, grown.size)
    sums = mx.pad(_scaled(grown.log_probs, scale), (0, 1))[grown.paths].sum(axis=1)
    found = mx.argpartition(-sums, size - 1)[:size]
    found = found[mx.argsort(-sums[found])]
    return LikeliestGrown(grown, found, mx.exp(sums[found]))


@dataclass(frozen=True)
class DraftTree:
    """N drafts on the device, none of them more than `depth` places after the anchor.

    tokens: (N,), and the drafter's probability of each at its place. depths: (N + 1,), of each row, the anchor's 0
    included; visible: boolean (N + 1, N + 1), which rows each row continues, itself included. A parent comes before its
    children.
    """

    tokens: mx.array
    probabilities: mx.array
    depths: mx.array
    visible: mx.array
    depth: int

    @property
    def size(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def shape(self) -> tuple[mx.array, mx.array]:
        """What the target's caches need to know of it (`caches.tree_rows.TreeShape`)."""
        return self.depths, self.visible


class Walk(NamedTuple):
    """The target's way through a tree, on the device.

    num_accepted: (). path: (D + 1,), the rows gone through, the anchor's first; what comes after index `num_accepted`
    is meaningless. said: (2,) float32, what the host wants to know of the tree: the probability that the path went on,
    summed over the rows of it with children, and the depth of the tree.
    """

    num_accepted: mx.array
    path: mx.array
    said: mx.array


def walk(tree: DraftTree, choices: mx.array) -> Walk:
    """Follow the target's choices (N + 1,), one for each row, from the anchor on."""
    rows = mx.arange(tree.size + 1)
    parents = mx.where(tree.visible & (rows < rows[:, None]), rows, 0).max(axis=1)
    differs = tree.tokens != choices[parents[1:]]
    # A row is reached when it and all that it continues are what the target chose; siblings differ, so rows reached
    # make one path.
    reached = ~(tree.visible[:, 1:] & differs).any(axis=1)
    path = mx.argsort(mx.where(reached, rows, rows + rows.size))[: tree.depth + 1]
    promised = mx.where(reached[parents[1:]], tree.probabilities, 0).sum()
    return Walk(reached.sum() - 1, path, mx.stack([promised, tree.depths.max().astype(mx.float32)]))


def wide_sizes(places: int) -> tuple[int, int]:
    """Sizes of trees with more drafts than a chain of all places: about twice and four times as many, the largest."""
    return 2 * places + 1, 4 * places + 3
