"""How likely the target holds a text that is there already: log-probabilities of a prompt's tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.decoding.logprobs import TokenLogprob, pack_logprobs, unpack_logprobs
from dflash_mlx.targets.target import Target

# Tokens that are fed at once: each has a row of logits as wide as the vocabulary.
SCORED_AT_ONCE = 128


@dataclass(frozen=True)
class ScoredToken(TokenLogprob):
    """A token of a text. rank: 1 where the target holds it likeliest at its place, 2 for the second."""

    rank: int


def score(target: Target, tokens: list[int], *, top: int) -> Iterator[list[ScoredToken]]:
    """The log-probability of each token but the first, given those before it, and its `top` best alternatives.

    A chunk at a time, in order, with caches of its own. They are those of mlx-lm's log-softmax at temperature 1.
    """
    cache = target.make_cache()
    for start in range(0, len(tokens) - 1, SCORED_AT_ONCE):
        end = min(start + SCORED_AT_ONCE, len(tokens) - 1)
        logits = target.forward(mx.array([tokens[start:end]]), cache)[0]  # (L, V)
        given = mx.array(tokens[start + 1 : end + 1])
        packed = pack_logprobs(logits, given, top)
        ranks = 1 + (logits > mx.take_along_axis(logits, given[:, None], axis=-1)).sum(axis=-1)
        mx.eval(packed, ranks, [layer_cache.state for layer_cache in cache])
        found = zip(unpack_logprobs(packed), np.array(ranks).tolist(), strict=True)
        yield [ScoredToken(entry.token_id, entry.logprob, entry.top, rank) for entry, rank in found]
