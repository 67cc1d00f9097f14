"""Log-probabilities of the tokens of an answer, taken to the host with the tokens in one array."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability, and the best alternatives as (id, logprob), best first; the token may be among them.

    Of the target's distribution at temperature 1, after the bias, penalties and constraint that apply there and before
    top-p, top-k and min-p, as mlx-lm's server reports them. Tokens that cannot come are not alternatives.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def pack_logprobs(rows: mx.array, tokens: mx.array, count: int) -> mx.array:
    """What `unpack_logprobs` needs, as uint32 (R, n): of logits (R, V), the token chosen at each (R,), best `count`."""
    scores = rows.astype(mx.float32)
    scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    columns = tokens.astype(mx.uint32)[:, None]
    if count:
        count = min(count, scores.shape[-1])
        best = mx.argpartition(-scores, kth=count - 1, axis=-1)[:, :count]
        columns = mx.concatenate([columns, best.astype(mx.uint32)], axis=1)
    values = mx.take_along_axis(scores, columns, axis=-1)
    return mx.concatenate([columns, values.view(mx.uint32)], axis=1)


def unpack_logprobs(packed: mx.array) -> list[TokenLogprob]:
    """The rows of `pack_logprobs` in order, read by the host."""
    columns, bits = np.split(np.array(packed), 2, axis=1)
    values = np.ascontiguousarray(bits).view(np.float32)
    found = []
    for ids, scores in zip(columns.tolist(), values.tolist(), strict=True):
        ranked = sorted(zip(ids[1:], scores[1:], strict=True), key=lambda entry: (-entry[1], entry[0]))
        top = tuple((token, score) for token, score in ranked if score > -np.inf)
        found.append(TokenLogprob(ids[0], scores[0], top))
    return found
