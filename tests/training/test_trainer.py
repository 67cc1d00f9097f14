"""One update of a training, from a batch in any number of parts."""

import mlx.core as mx
import numpy as np
import pytest
from tiny import VOCAB, tiny_drafter, tiny_target

from dflash_mlx.training.checkpoint import fresh_state
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.store import Conversation
from dflash_mlx.training.trainer import Trainer
from dflash_mlx.training.trees import flat

ROWS = 8


def first_step(folder, micro_batch):
    """The loss and the gradients (all of them in one row) of a first step whose gradients are not clipped."""
    rng = np.random.default_rng(1)
    conversations = [Conversation(rng.integers(0, VOCAB, 40), ((10, 40),)) for _ in range(ROWS)]
    # Blocks of one draft: each anchor has one label, so that the losses of all parts have the same weight.
    options = TrainOptions(
        model="unused/unused", out=folder, block_size=2, steps=1, batch_size=ROWS, anchors=6, clip=1e9, weights="decay"
    )
    drafter = tiny_drafter(block_size=options.block_size)
    state = fresh_state(drafter, options)
    trainer = Trainer(
        target=tiny_target("llama"),
        drafter=drafter,
        options=options,
        state=state,
        state_path=folder / "state.safetensors",
        compute_dtype=mx.float32,
        micro_batch=micro_batch,
        chunk=64,
    )
    assert trainer.run(conversations, [], deadline=None, progress=Progress("training", quiet=True))
    # AdamW's first moment after one step is the gradient, but for a factor.
    moments = [np.array(x).reshape(-1) for name, x in sorted(flat(state.optimizer).items()) if name.endswith(".m")]
    [[_, _, loss]] = state.losses
    return loss, np.concatenate(moments)


@pytest.mark.parametrize("micro_batch", [4, 2])
def test_a_batch_in_parts_has_the_loss_and_the_gradients_of_the_whole(tmp_path, micro_batch):
    """Scale included: AdamW would hide it, and so would clipping."""
    whole_loss, whole = first_step(tmp_path, ROWS)
    loss, gradients = first_step(tmp_path, micro_batch)
    assert loss == pytest.approx(whole_loss, rel=1e-3)
    assert np.abs(whole).max() > 0
    np.testing.assert_allclose(gradients, whole, atol=1e-3 * np.abs(whole).max())
