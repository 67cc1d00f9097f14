"""The loss: cross-entropy of same-position labels, weighted by how much each position matters for acceptance."""

from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx

Head = Callable[[mx.array], mx.array]
Candidates = Callable[[mx.array], mx.array]


def dpace_weights(probs: mx.array, valid: mx.array, alpha: float) -> mx.array:
    """D-PACE (arXiv 2605.18810): a position counts as far as the drafts up to it, and after it, are likely kept.

    probs: (..., W) probabilities of the labels; valid: same shape, 1 where there is a label (a prefix of each row).
    w_j = sum over m >= j of prod over i <= m of ((1 - alpha) q_i + alpha). No gradient.
    """
    survival = mx.cumprod(((1 - alpha) * probs + alpha) * valid, axis=-1)
    return mx.stop_gradient(mx.cumsum(survival, axis=-1, reverse=True) * valid)


def decay_weights(valid: mx.array, gamma: float) -> mx.array:
    """The paper's exp(-(k - 1) / gamma) for the k-th draft; valid: (..., W)."""
    return mx.exp(-mx.arange(valid.shape[-1]) / gamma) * valid


def labels_of(tokens: mx.array, anchors: mx.array, ends: mx.array, block: int) -> tuple[mx.array, mx.array]:
    """Labels (B, A, K - 1) of the positions after each anchor, and which of them lie before `ends` (float32).

    tokens: (B, T); anchors, ends: (B, A). An end of 0 makes the whole block count for nothing.
    """
    batch, count = anchors.shape
    positions = anchors[..., None] + mx.arange(1, block)
    valid = (positions < ends[..., None]).astype(mx.float32)
    within = mx.minimum(positions, tokens.shape[1] - 1).reshape(batch, -1)
    return mx.take_along_axis(tokens, within, axis=1).reshape(batch, count, block - 1), valid


def token_losses(head: Head, hidden: mx.array, labels: mx.array, *, chunk: int) -> mx.array:
    """Cross-entropy of each row, float32. hidden: (N, D); labels: (N,). The logits live `chunk` rows at a time.

    Logits are computed in the compute dtype, their normalizer in float32. The backward pass computes them again.
    """
    return candidate_losses(head, None, hidden, labels, chunk=chunk)[0]


def candidate_losses(
    head: Head, candidates: Candidates | None, hidden: mx.array, labels: mx.array, *, chunk: int
) -> tuple[mx.array, ...]:
    """`token_losses` (N,) and, from the same logits, `candidates` of them (N, top_k) and their logits (N, top_k).

    What is said of candidates has no gradient. With None for `candidates`, the losses alone.
    """
    loss = _recomputed_loss(head, candidates)
    rows = hidden.shape[0]
    parts = [loss(hidden[at : at + chunk], labels[at : at + chunk]) for at in range(0, rows, chunk)]
    return parts[0] if len(parts) == 1 else tuple(mx.concatenate(list(part)) for part in zip(*parts, strict=True))


def _recomputed_loss(head: Head, candidates: Candidates | None) -> Callable[[mx.array, mx.array], tuple[mx.array, ...]]:
    @mx.custom_function
    def loss(hidden: mx.array, labels: mx.array) -> tuple[mx.array, ...]:
        logits = head(hidden)
        losses = mx.logsumexp(logits.astype(mx.float32), axis=-1) - _pick(logits, labels)
        if candidates is None:
            return (losses,)
        columns = candidates(logits)
        return losses, columns, mx.take_along_axis(logits, columns, axis=-1)

    @loss.vjp
    def loss_vjp(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array]:
        hidden, labels = primals
        logits = head(hidden)
        normalizer = outputs[0] + _pick(logits, labels)
        columns = mx.arange(logits.shape[-1], dtype=labels.dtype)[None]
        wrong = _logits_gradient(logits, normalizer[:, None], labels[:, None], columns, cotangents[0][:, None])
        _, (gradient,) = mx.vjp(head, [hidden], [wrong])
        return gradient, mx.zeros_like(labels)

    return cast(Callable[[mx.array, mx.array], tuple[mx.array, ...]], loss)


def _gradient(
    logits: mx.array, normalizer: mx.array, labels: mx.array, columns: mx.array, cotangent: mx.array
) -> mx.array:
    """d loss / d logits: (N, V) and columns (1, V); all others (N, 1)."""
    probs = mx.exp(logits.astype(mx.float32) - normalizer)
    return ((probs - (columns == labels)) * cotangent).astype(logits.dtype)


# The logits are by far the largest array of a step: one pass over them instead of six. A CPU would need a C++ compiler.
_logits_gradient = mx.compile(_gradient) if mx.default_device() == mx.gpu else _gradient


def _pick(logits: mx.array, labels: mx.array) -> mx.array:
    return mx.take_along_axis(logits, labels[:, None], axis=-1)[:, 0].astype(mx.float32)


def weighted_loss(
    losses: mx.array, valid: mx.array, *, kind: str, alpha: float, gamma: float, more: mx.array | None = None
) -> mx.array:
    """The mean of losses (B, A, K - 1) by the weights of `kind`, "dpace" or "decay".

    more: further losses of the same shape, added with the same weights; D-PACE's are by `losses` alone.
    """
    weights = dpace_weights(mx.exp(-losses), valid, alpha) if kind == "dpace" else decay_weights(valid, gamma)
    return ((losses if more is None else losses + more) * weights).sum() / mx.maximum(weights.sum(), 1.0)
