"""Which blocks are drawn for training, and that small ones are learnt as rounds with few drafts take them."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from tiny import VOCAB, tiny_drafter, tiny_target

from dflash_mlx.training.batches import Blocks, make_batch
from dflash_mlx.training.forward import target_features
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.store import Conversation
from dflash_mlx.training.trainer import block_loss


def rng():
    return np.random.default_rng(7)


def test_about_the_share_that_was_asked_for_is_smaller_and_of_every_size():
    sizes = Blocks(10_000, 8, 0.25).sizes(rng())
    assert sizes.shape == (10_000,)
    assert set(np.unique(sizes)) == set(range(2, 9))
    assert np.mean(sizes < 8) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(("size", "share"), [(8, 0.0), (2, 0.0), (2, 1.0)])
def test_blocks_are_whole_where_no_smaller_ones_are_asked_for_or_possible(size, share):
    assert (Blocks(64, size, share).sizes(rng()) == size).all()


def test_labels_end_with_the_block_and_with_the_answer():
    conversations = [Conversation(rng().integers(0, VOCAB, 40), ((10, 22), (30, 40))) for _ in range(3)]
    batch = make_batch(conversations, Blocks(24, 8, 0.7), rng(), longest=40)
    used = batch.ends > 0
    assert used.sum() == 3 * 20  # all tokens of both answers but their last ones
    answer_ends = np.where(batch.anchors < 22, 22, 40)
    assert (batch.ends[used] == np.minimum(answer_ends, batch.anchors + batch.sizes)[used]).all()
    assert (batch.ends[used] - batch.anchors[used] >= 2).all()


@pytest.mark.parametrize("kind", ["dpace", "decay"])
def test_a_smaller_block_has_the_loss_of_a_drafter_with_blocks_of_that_size(kind):
    target = tiny_target("llama")
    options = TrainOptions(model="unused/unused", out=".", weights=kind, gamma=3.0)
    tokens = mx.array(rng().integers(0, VOCAB, (2, 40)))
    anchors = mx.array([[3, 20], [11, 30]])
    sizes = mx.full(anchors.shape, 3)

    def loss(block):
        drafter = tiny_drafter(block_size=6)
        drafter.config = replace(drafter.config, block_size=block)
        features = target_features(target, tokens, drafter.config.target_layer_ids)
        arrays = (features, tokens, anchors, anchors + sizes, sizes)
        return block_loss(target, drafter, drafter.parameters(), *arrays, options=options, chunk=64).item()

    assert loss(6) == pytest.approx(loss(3), rel=1e-5)
