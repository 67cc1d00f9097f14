"""The weights and the cross-entropy against closed forms in numpy."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dflash_mlx.training.loss import decay_weights, dpace_weights, labels_of, token_losses, weighted_loss


def closed_form(probs, valid, alpha):
    """w_j = sum over m >= j of the product over i <= m of (1 - alpha) q_i + alpha, over labelled positions."""
    weights = np.zeros_like(probs)
    for row in range(len(probs)):
        width = int(valid[row].sum())
        for j in range(width):
            weights[row, j] = sum(
                math.prod((1 - alpha) * probs[row, i] + alpha for i in range(m + 1)) for m in range(j, width)
            )
    return weights


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_dpace_weights(alpha):
    rng = np.random.default_rng(0)
    probs = rng.random((4, 6)).astype(np.float32)
    valid = np.array([[1] * 6, [1, 1, 1, 0, 0, 0], [1] + [0] * 5, [0] * 6], np.float32)
    found = np.array(dpace_weights(mx.array(probs), mx.array(valid), alpha))
    np.testing.assert_allclose(found, closed_form(probs, valid, alpha), rtol=1e-5)


def test_dpace_weights_have_no_gradient():
    valid = mx.ones((1, 4))
    gradient = mx.grad(lambda p: dpace_weights(p, valid, 0.5).sum())(mx.full((1, 4), 0.5))
    assert mx.array_equal(gradient, mx.zeros((1, 4))).item()


def test_decay_weights_are_the_papers():
    found = np.array(decay_weights(mx.ones((1, 15)), 7.0))[0]
    np.testing.assert_allclose(found, [math.exp(-(k - 1) / 7) for k in range(1, 16)], rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_token_losses_and_gradient_equal_plain_cross_entropy(chunk):
    mx.random.seed(0)
    weight, hidden = mx.random.normal((11, 8)), mx.random.normal((10, 8))
    labels = mx.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 10])
    scale = mx.arange(10).astype(mx.float32)

    def head(h):
        return mx.tanh(h @ weight.T) * 5

    def ours(h):
        return (token_losses(head, h, labels, chunk=chunk) * scale).sum()

    def plain(h):
        return (nn.losses.cross_entropy(head(h), labels) * scale).sum()

    for transform in (lambda f: f, mx.compile):
        value, gradient = transform(mx.value_and_grad(ours))(hidden)
        expected, wanted = mx.value_and_grad(plain)(hidden)
        assert abs(value.item() - expected.item()) < 1e-3
        assert mx.abs(gradient - wanted).max().item() < 1e-4


def test_labels_stop_at_the_end_of_the_answer():
    tokens = mx.arange(20)[None] + 100
    labels, valid = labels_of(tokens, mx.array([[3, 17, 5]]), mx.array([[6, 20, 0]]), 5)
    assert labels[0, 0].tolist() == [104, 105, 106, 107]
    assert valid[0].tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


def test_positions_without_label_do_not_count():
    losses = mx.array([[[1.0, 2.0, 1e6]]])
    valid = mx.array([[[1.0, 1.0, 0.0]]])
    for kind in ("dpace", "decay"):
        assert 1.0 < weighted_loss(losses, valid, kind=kind, alpha=0.5, gamma=4.0).item() < 2.0
