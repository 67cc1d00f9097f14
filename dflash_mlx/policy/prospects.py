"""What drafting is worth on this machine where drafts are right with a given chance."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.decoding.tree import likeliest
from dflash_mlx.drafters.ranking import BRANCHES, Ranking
from dflash_mlx.policy.trees_or_chains import PairCosts


@dataclass(frozen=True)
class Prospect:
    """The round with the most tokens a second: it verifies `drafts`, as a `tree` or a chain, and gains `tokens`.

    speedup: times plain decoding. No drafts: nothing is faster than plain decoding.
    """

    drafts: int
    tree: bool
    tokens: float
    speedup: float


def prospect(costs: PairCosts, places: int, chance: float) -> Prospect:
    """The best round where the drafter's first choice is right with this chance (below 1) at each of its places.

    Its second choice is then right with that chance where the first is not, and so on, which is what trees live on.
    """
    plain = costs.chains.plain
    found = [Prospect(0, False, 1.0, 1.0)]
    gains = 1.0 + np.cumsum(chance ** np.arange(1, places + 1))
    # Where width costs much, trees take the place of chains.
    if costs.trees is None or not costs.chains.steep:
        for width, tokens in enumerate(gains.tolist(), start=1):
            found.append(Prospect(width, False, tokens, tokens * plain / costs.chains.round(width)))
    if costs.trees is not None:
        log_probs = np.log(chance * (1 - chance) ** np.arange(BRANCHES))
        candidates = Ranking(mx.zeros((places, BRANCHES), dtype=mx.uint32), mx.array(np.tile(log_probs, (places, 1))))
        chances = np.array(likeliest(candidates, max(costs.trees.round_seconds)).chances)
        for size in range(1, len(chances) + 1):
            if costs.trees.steep or size in costs.trees.round_seconds:
                tokens = 1.0 + float(chances[:size].sum())
                found.append(Prospect(size, True, tokens, tokens * plain / costs.trees.round(size)))
    return max(found, key=lambda one: one.speedup)
