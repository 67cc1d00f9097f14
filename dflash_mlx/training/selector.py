"""The loss of DFlash 2's selector: among the head's best tokens at a place, the right one, given the right one before.

The selector is taught after the true previous token, as it is in use while the drafts are right; after a wrong draft
nothing counts any more. Where the label is not among the candidates no choice could be right, and nothing is learnt.
"""

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.dflash2 import PathSelector

# The selector's share in the loss. Adam's steps do not depend on the size of a gradient, so the selector itself learns
# as fast with any share: this one says how much the layers before it serve the selector rather than the head, whose own
# loss has the weight 1. The head must stay good: what it ranks low is no candidate.
SHARE = 0.1


def previous_tokens(anchor_tokens: mx.array, labels: mx.array) -> mx.array:
    """The true token before each place. anchor_tokens: (B, A); labels and result: (B, A, K - 1)."""
    return mx.concatenate([anchor_tokens[..., None], labels[..., :-1]], axis=-1)


def selector_losses(
    selector: PathSelector,
    hidden: mx.array,
    columns: mx.array,
    unary: mx.array,
    previous: mx.array,
    labels: mx.array,
    *,
    chunk: int,
) -> mx.array:
    """Cross-entropy (N,) of each label among its place's candidates, float32; 0 where it is none of them.

    hidden: (N, D); columns, unary: (N, top_k), candidates and their logits; previous, labels: (N,). The codes of
    candidates live `chunk` rows at a time; the backward pass gathers them again.
    """

    def loss(hidden: mx.array, *given: mx.array) -> mx.array:
        columns, unary, previous, labels = (mx.stop_gradient(x) for x in given)
        scores = selector.scores(unary, selector.links(hidden, columns), previous)
        right = columns == labels[:, None]
        losses = mx.logsumexp(scores, axis=-1) - (scores * right).sum(axis=-1)
        return mx.where(right.any(axis=-1), losses, 0.0)

    recomputed = nn.utils.checkpoint(selector, loss)
    rows = (hidden, columns, unary, previous, labels)
    parts = [recomputed(*(x[at : at + chunk] for x in rows)) for at in range(0, hidden.shape[0], chunk)]
    return mx.concatenate(parts)


def walk(
    selector: PathSelector, hidden: mx.array, columns: mx.array, unary: mx.array, anchor_tokens: mx.array
) -> mx.array:
    """The greedy path of each block, (A, W), as the decode loop chooses it.

    hidden: (A, W, D); columns, unary: (A, W, top_k); anchor_tokens: (A,).
    """
    path = [anchor_tokens]
    for i in range(hidden.shape[1]):
        scores = selector.scores(unary[:, i], selector.links(hidden[:, i], columns[:, i]), path[-1])
        best = mx.argmax(scores, axis=-1, keepdims=True)
        path.append(mx.take_along_axis(columns[:, i], best, axis=-1)[:, 0])
    return mx.stack(path[1:], axis=-1)
