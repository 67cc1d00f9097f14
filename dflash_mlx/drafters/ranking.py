"""The tokens that come into question at a place, the likeliest first: of these a tree of drafts is made."""

from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.tree_steps import PLAIN, TreeSteps

# Tokens considered at each place. With 48 instead, a tree of 31 drafts of the demo pair gains 3.67 tokens a round and
# not 3.65 (built-in prompts, replayed).
BRANCHES = 8


@dataclass
class Ranking:
    """Candidates for W places on the device: token_ids and log_probs, (W, K), the likeliest first."""

    token_ids: mx.array
    log_probs: mx.array


def rank(scores: mx.array, count: int, token_ids: mx.array | None = None, *, steps: TreeSteps = PLAIN) -> Ranking:
    """The `count` likeliest tokens by scores (W, V), or (W, n) of the n tokens `token_ids`."""
    return Ranking(*steps.rank(scores, min(count, scores.shape[1]), token_ids))
