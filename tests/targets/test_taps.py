"""Taps read layer outputs and leave no trace."""

import mlx.core as mx
import pytest
from tiny import FAMILIES, LAYERS, tiny_target

from dflash_mlx.targets.taps import tapped


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_features_are_the_layers_outputs(family):
    """Compared with running the layers by hand."""
    target = tiny_target(family)
    tokens = mx.array([[4, 8, 15, 16]])
    h, by_hand = target.embed(tokens), []
    for layer in target.layers:
        h = layer(h, "causal", None)
        by_hand.append(h)
    logits, features = target.forward_tapped(tokens, target.make_cache(), [0, 3, 2])
    assert mx.allclose(features, mx.concatenate([by_hand[0], by_hand[3], by_hand[2]], axis=-1), atol=1e-5)
    assert mx.array_equal(logits, target.forward(tokens, target.make_cache()))


def test_nothing_stays_behind_even_after_an_error():
    target = tiny_target("qwen3")
    classes = [type(layer) for layer in target.layers]
    names = target.parameter_names()
    with tapped(target.layers, range(LAYERS)):
        assert target.parameter_names() == names
    with pytest.raises(ValueError, match="broken"), tapped(target.layers, range(LAYERS)):
        raise ValueError("broken")
    assert [type(layer) for layer in target.layers] == classes
    assert target.parameter_names() == names


def test_other_models_of_the_class_are_not_touched():
    one, other = tiny_target("llama"), tiny_target("llama", seed=2)
    with tapped(one.layers, [1]) as outputs:
        other.forward(mx.array([[1, 2]]), other.make_cache())
        assert outputs == {}


def test_models_may_change_their_hidden_states_in_place():
    """gemma3n does, after its last layer."""
    target = tiny_target("llama")
    x = target.embed(mx.array([[1, 2, 3]]))
    expected = target.layers[1](x, "causal", None)
    with tapped(target.layers, [1]) as outputs:
        h = target.layers[1](x, "causal", None)
        h[:, 1] = 7.0
    assert mx.array_equal(outputs[1], expected)
