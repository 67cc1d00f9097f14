"""How likely the target holds a text that is there already: log-probabilities of a prompt's tokens."""

from collections.abc import Iterator

import mlx.core as mx

from dflash_mlx.decoding.logprobs import TokenLogprob, pack_logprobs, unpack_logprobs
from dflash_mlx.targets.target import Target

# Tokens that are fed at once: each has a row of logits as wide as the vocabulary.
SCORED_AT_ONCE = 128


def score(target: Target, tokens: list[int], *, top: int) -> Iterator[list[TokenLogprob]]:
    """The log-probability of each token but the first, given those before it, and its `top` best alternatives.

    A chunk at a time, in order, with caches of its own. They are those of mlx-lm's log-softmax at temperature 1.
    """
    cache = target.make_cache()
    for start in range(0, len(tokens) - 1, SCORED_AT_ONCE):
        end = min(start + SCORED_AT_ONCE, len(tokens) - 1)
        logits = target.forward(mx.array([tokens[start:end]]), cache)  # (1, L, V)
        packed = pack_logprobs(logits[0], mx.array(tokens[start + 1 : end + 1]), top)
        mx.eval(packed, [layer_cache.state for layer_cache in cache])
        yield unpack_logprobs(packed)
