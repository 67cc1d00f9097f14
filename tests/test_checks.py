"""Wrong pairs are refused at load, with the reason."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import FAMILIES, tiny_drafter, tiny_target

from dflash_mlx.checks import check_pair, check_shapes
from dflash_mlx.errors import PairError


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_right_pair_passes(family):
    target, drafter = tiny_target(family), tiny_drafter()
    check_shapes(target, drafter)
    assert len(check_pair(target, drafter, dtype=mx.float32)) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden size of 64, the target has 32"),
        ({"vocab_size": 50}, "vocabulary of 50, the target has 48"),
        ({"num_target_layers": 6}, "6 target layers, the target has 4"),
        ({"target_layer_ids": (1, 4), "num_target_layers": None}, r"layers \[4\], the target has layers 0 to 3"),
        ({"target_layer_ids": (2, 1)}, "rising order"),
    ],
)
def test_shapes_that_do_not_fit(changes, message):
    with pytest.raises(PairError, match=message):
        check_shapes(tiny_target("llama"), tiny_drafter(**changes))


def test_a_target_whose_blocks_differ_from_its_steps():
    """A model that forgets its cache gives other logits for a block than token by token."""
    target = tiny_target("llama")
    forward = target.forward

    def forgetful(tokens, cache):
        return forward(tokens, target.make_cache() if tokens.shape[1] == 1 else cache)

    target.forward = forgetful
    with pytest.raises(PairError, match="block forward"):
        check_pair(target, tiny_drafter(), dtype=mx.float32)


def test_a_wrong_vocabulary_head():
    target = tiny_target("qwen2")
    target.head = nn.Linear(32, 48, bias=False)
    with pytest.raises(PairError, match="vocabulary head"):
        check_pair(target, tiny_drafter(), dtype=mx.float32)


def test_features_and_drafts_must_be_finite():
    drafter = tiny_drafter()
    drafter.norm.weight = drafter.norm.weight * mx.inf
    with pytest.raises(PairError, match="drafter's logits are not finite"):
        check_pair(tiny_target("llama"), drafter, dtype=mx.float32)
