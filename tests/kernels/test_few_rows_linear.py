"""Few rows through the light kernel for linear layers: the same products and answers."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import FAMILIES, SECOND, drafted_tokens, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.kernels import few_rows_linear
from dflash_mlx.kernels.few_rows_linear import FewRowsLinear, fitting_layers, set_few_rows
from dflash_mlx.policy.width import FixedWidth

MOST = 5


def linear(*, bias, dtype=mx.float32):
    layer = nn.Linear(64, 24, bias=bias)
    layer.set_dtype(dtype)
    return layer


@pytest.fixture
def used(monkeypatch):
    """The rows of each product that went through the kernel."""
    rows, gather_mm = [], mx.gather_mm

    def counting(x, *others):
        rows.append(x.shape[0])
        return gather_mm(x, *others)

    monkeypatch.setattr(mx, "gather_mm", counting)
    return rows


@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_a_linear_layer(bias, used):
    layer = linear(bias=bias)
    for rows in range(1, MOST + 2):
        for shape in ((rows, 64), (1, rows, 64), (rows, 1, 64)):
            x = mx.random.normal(shape, key=mx.random.key(rows))
            set_few_rows([layer], 0)
            expected = layer(x)
            set_few_rows([layer], MOST)
            assert mx.allclose(layer(x), expected, atol=1e-5)
            assert layer(x).shape == expected.shape
    assert set(used) == set(range(2, MOST + 1))
    one = mx.random.normal((64,))
    assert mx.allclose(layer(one), nn.Linear.__call__(layer, one), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_products_in_half_precision(dtype):
    layer = linear(bias=True, dtype=dtype)
    x = mx.random.normal((1, MOST, 64)).astype(dtype)
    expected = layer(x)
    set_few_rows([layer], MOST)
    assert mx.allclose(layer(x), expected, atol=0.05)


def test_parameters_stay_and_it_comes_off():
    target = tiny_target("qwen2")
    layers = fitting_layers(target.model)
    names, before = target.parameter_names(), [dict(vars(layer)) for layer in layers]
    set_few_rows(layers, MOST)
    assert target.parameter_names() == names
    assert {type(layer) for layer in layers} == {FewRowsLinear}
    set_few_rows(layers, 0)
    assert [type(layer) for layer in layers] == [nn.Linear] * len(layers)
    assert [dict(vars(layer)) for layer in layers] == before


def test_new_weights_are_used(used):
    layer = linear(bias=False)
    x = mx.random.normal((3, 64))
    set_few_rows([layer], MOST)
    layer.weight = layer.weight * 2
    assert mx.allclose(layer(x), x @ layer.weight.T)
    assert not used


def test_gradients_are_those_of_a_linear_layer():
    layer = linear(bias=True)
    x = mx.random.normal((3, 64))
    gradient = nn.value_and_grad(layer, lambda x: (layer(x) ** 2).sum())
    expected = gradient(x)[1]
    set_few_rows([layer], MOST)
    found = gradient(x)[1]
    assert all(mx.allclose(found[name], expected[name], rtol=1e-4) for name in ("weight", "bias"))


def test_only_plain_layers_of_a_fitting_size_take_part(monkeypatch):
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(64, 9), nn.Linear(48, 8), nn.QuantizedLinear(64, 8))

    def places(**kwargs):
        found = fitting_layers(model, **kwargs)
        return [i for i, layer in enumerate(model.layers) if any(layer is other for other in found)]

    assert places() == [0, 1]
    assert places(without=[model.layers[0]]) == [1]
    monkeypatch.setattr(few_rows_linear, "_MOST_WEIGHTS", 64 * 8)
    assert places() == [0]


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("second", [False, True])
def test_answers_stay_the_same(family, second, used):
    """Of tiny models of which both compute by the kernel; the truth is mlx-lm's plain decoding."""
    target, drafter = tiny_target(family), tiny_drafter(**(SECOND if second else {}))
    prompt = [5, 6, 7]
    expected = plain_tokens(target, prompt, 30)
    set_few_rows(fitting_layers(target.model) + fitting_layers(drafter), 64)
    assert drafted_tokens(target, drafter, prompt, 30, FixedWidth(4)) == expected
    assert 5 in used
