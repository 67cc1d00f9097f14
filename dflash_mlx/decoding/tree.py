"""A tree of drafts: several ways the text may go on, judged in one forward (DDTree, arXiv 2604.12989, section 4).

A path's chance is the product of its tokens' probabilities, and the sum of the paths' chances is the number of drafts
that the target can be expected to keep. So the likeliest paths make the best tree. Some drafters say of each place
after the anchor how likely each token is there, whatever comes before it: the likeliest of all paths are found then
(`likeliest`). Others read each path that they continue: the likeliest of those that were grown are taken
(`likeliest_grown`). Both is done on the device, and the host reads the chances only where it chooses by them.

Rows of a round: row 0 is the anchor, row i the draft i - 1 of the tree. A row comes after its parent's.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.growing import Grown
from dflash_mlx.drafters.ranking import Ranking
from dflash_mlx.tree_steps import PLAIN, Found, TreeSteps, Walk, clipped

_MOST_DRAFTS = 63


@dataclass
class Likeliest:
    """The N likeliest drafts of a tree, on the device, of W places.

    found: which of all paths they are, as `steps` tell them; said: what the host may want to know
    (`tree_steps.said_of`).
    """

    ranking: Ranking
    found: Found
    said: mx.array
    steps: TreeSteps = PLAIN

    @property
    def size(self) -> int:
        return int(self.said.shape[0]) - 2 * int(self.ranking.token_ids.shape[0])

    @property
    def chances(self) -> mx.array:
        """How likely each is, (N,), falling."""
        places = self.ranking.token_ids.shape[0]
        return self.said[places:-places].view(mx.float32)

    @property
    def branched(self) -> bool:
        """Whether there are several tokens for a place."""
        return int(self.ranking.token_ids.shape[1]) > 1

    def tree(self, size: int) -> "DraftTree":
        """The tree of the `size` likeliest of them."""
        size = min(size, self.size)
        ranking, longest = self.ranking, min(size, int(self.ranking.token_ids.shape[0]))
        built = self.steps.build(self.found, size, ranking.token_ids, ranking.log_probs)
        return DraftTree(*built, longest, self.steps)


def likeliest(ranking: Ranking, size: int, *, scale: float = 1.0, steps: TreeSteps = PLAIN) -> Likeliest:
    """The `size` likeliest drafts, or all there are; `scale` multiplies every probability, which stays below 1."""
    places, branches = ranking.token_ids.shape
    size = min(size, sum(branches**depth for depth in range(1, places + 1)))
    found, said = steps.find(ranking.token_ids, ranking.log_probs, size, float(np.log(scale)))
    return Likeliest(ranking, found, said, steps)


@dataclass
class LikeliestGrown:
    """The N likeliest drafts of those that were grown, on the device. found: (N,), which they are, the likeliest first;
    chances: (N,), falling."""

    grown: Grown
    found: mx.array
    chances: mx.array
    steps: TreeSteps = PLAIN
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
        longest = min(size, paths.shape[1])
        return DraftTree(tokens.astype(mx.uint32), probabilities, depths, visible, longest, self.steps)


def likeliest_grown(grown: Grown, size: int, *, scale: float = 1.0, steps: TreeSteps = PLAIN) -> LikeliestGrown:
    """See `likeliest`."""
    size = min(size, grown.size)
    sums = mx.pad(clipped(grown.log_probs, float(np.log(scale))), (0, 1))[grown.paths].sum(axis=1)
    found = mx.argpartition(-sums, size - 1)[:size]
    found = found[mx.argsort(-sums[found])]
    return LikeliestGrown(grown, found, mx.exp(sums[found]), steps)


@dataclass(frozen=True)
class DraftTree:
    """N drafts on the device, none of them more than `depth` places after the anchor.

    tokens: (N,), and the drafter's probability of each at its place. depths: (N + 1,), of each row, the anchor's 0
    included; visible: boolean (N + 1, N + 1), which rows each row continues, itself included. A parent comes before its
    children. steps: how the way through it is computed.
    """

    tokens: mx.array
    probabilities: mx.array
    depths: mx.array
    visible: mx.array
    depth: int
    steps: TreeSteps = PLAIN

    @property
    def size(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def shape(self) -> tuple[mx.array, mx.array]:
        """What the target's caches need to know of it (`caches.tree_rows.TreeShape`)."""
        return self.depths, self.visible


def walk(tree: DraftTree, choices: mx.array) -> Walk:
    """Follow the target's choices (N + 1,), one for each row, from the anchor on."""
    return tree.steps.walk(tree.tokens, tree.probabilities, tree.depths, tree.visible, choices, tree.depth)


def wide_sizes(places: int) -> tuple[int, int]:
    """Sizes of trees with more drafts than a chain of all places: about twice and four times as many, the largest.

    The paths that may come into question grow faster in number than what is chosen of them, so trees of long blocks are
    no larger.
    """
    most = max(places, _MOST_DRAFTS)
    return min(2 * places + 1, most), min(4 * places + 3, most)
