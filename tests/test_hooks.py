"""Other behaviour for single instances, for the length of a block, without a trace."""

from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from dflash_mlx.hooks import subclassed


@cache
def doubled(kind):
    def call(self, x):
        return self.__dict__["factor"] * kind.__call__(self, x)

    return type(f"Doubled{kind.__name__}", (kind,), {"__call__": call})


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4), nn.Linear(4, 4))


def names(model):
    return [name for name, _ in tree_flatten(model.parameters())]


def test_only_these_instances_behave_otherwise_each_by_its_note(model):
    x = mx.random.normal((3, 4), key=mx.random.key(0))
    expected = [layer(x) for layer in model.layers]
    with subclassed([model.layers[0], model.layers[1]], doubled, notes={"factor": [2, 3]}):
        assert isinstance(model.layers[0], nn.Linear)
        found = [layer(x) for layer in model.layers]
    for factor, one, other in zip((2, 3, 1), found, expected, strict=True):
        assert mx.allclose(one, factor * other).item()
    assert all(mx.array_equal(layer(x), other).item() for layer, other in zip(model.layers, expected, strict=True))


def test_parameters_keep_their_names(model):
    before = names(model)
    with subclassed(model.layers, doubled, notes={"factor": [1, 2, 3]}):
        assert names(model) == before
        assert [layer.__dict__["factor"] for layer in model.layers] == [1, 2, 3]


def failing(kind):
    if kind is nn.RMSNorm:
        raise ValueError("broken")
    return doubled(kind)


@pytest.mark.parametrize("subclass", [doubled, failing])
def test_nothing_is_left_behind_even_after_an_error(model, subclass):
    """Of the block, or of making a class for the second of three."""
    kinds, before = [type(layer) for layer in model.layers], [dict(vars(layer)) for layer in model.layers]
    with pytest.raises(ValueError, match="broken"), subclassed(model.layers, subclass, notes={"factor": [1, 2, 3]}):
        raise ValueError("broken")
    assert [type(layer) for layer in model.layers] == kinds
    assert [dict(vars(layer)) for layer in model.layers] == before


def test_hooks_nest(model):
    """The inner ones come off first."""
    x = mx.ones((4,))
    expected = model.layers[0](x)
    with subclassed(model.layers, doubled, notes={"factor": [5, 5, 5]}):
        with subclassed(model.layers[:1], lambda kind: type("Plain", (kind,), {"__call__": nn.Linear.__call__})):
            assert mx.array_equal(model.layers[0](x), expected).item()
        assert mx.allclose(model.layers[0](x), 5 * expected).item()


def test_a_module_that_appears_twice_comes_back(model):
    layer = model.layers[0]
    with subclassed([layer, layer], doubled, notes={"factor": [2, 3]}):
        pass
    assert type(layer) is nn.Linear
    assert "factor" not in layer.__dict__
