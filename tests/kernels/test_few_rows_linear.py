"""Few rows through the light kernel for linear layers: the same products and answers."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from kernels.cuda_on_cpu import kernel_on_cpu, kernels_folder, needs_compiler
from tiny import FAMILIES, SECOND, drafted_tokens, mostly_slow, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.kernels import few_rows_linear
from dflash_mlx.kernels.few_rows_linear import FewRowsLinear, fitting_layers, multiply, set_few_rows
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.rounding import relative_difference
from dflash_mlx.runtime import backend

MOST = 5


def linear(*, bias, dtype=mx.float32):
    layer = nn.Linear(64, 24, bias=bias)
    layer.set_dtype(dtype)
    return layer


@pytest.fixture
def used(monkeypatch, tmp_path_factory):
    """Has the kernel run on the CPU; the rows of each product that went through it."""

    def rows(inputs):
        x, weight = inputs
        return x.size // weight.shape[1]

    folder = kernels_folder(tmp_path_factory)
    with kernel_on_cpu(few_rows_linear, rows, folder=folder, monkeypatch=monkeypatch) as noted:
        yield noted


@needs_compiler
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(2, 16, 32), (16, 24, 128), (17, 3, 160), (40, 35, 416)])
def test_the_kernel_multiplies(rows, columns, depth, dtype, used):
    """Numbers of rows, columns and of numbers that are added that fill blocks, and that do not."""
    rng = np.random.default_rng(rows)
    x, weight = (mx.array(rng.standard_normal((n, depth), dtype=np.float32)).astype(dtype) for n in (rows, columns))
    found, expected = multiply(x, weight), x.astype(mx.float32) @ weight.astype(mx.float32).T
    assert found.dtype == dtype
    assert relative_difference(found, expected) < (1e-6 if dtype == mx.float32 else 4e-3)


@needs_compiler
def test_a_row_does_not_depend_on_the_others(used):
    rng = np.random.default_rng(0)
    x, weight = (mx.array(rng.standard_normal((n, 416), dtype=np.float32)) for n in (40, 35))
    together = multiply(x, weight)
    for first, last in ((0, 1), (3, 9), (16, 40)):
        assert mx.array_equal(multiply(x[first:last], weight), together[first:last])


@needs_compiler
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


@pytest.mark.skipif(backend().kind != "cuda", reason="needs a CUDA device")
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


@needs_compiler
@pytest.mark.parametrize("family", mostly_slow(sorted(FAMILIES), "qwen3"))
@pytest.mark.parametrize("second", [False, True])
def test_answers_stay_the_same(family, second, used):
    """Of tiny models of which both compute by the kernel; the truth is mlx-lm's plain decoding."""
    target, drafter = tiny_target(family), tiny_drafter(**(SECOND if second else {}))
    prompt = [5, 6, 7]
    expected = plain_tokens(target, prompt, 12)
    set_few_rows(fitting_layers(target.model) + fitting_layers(drafter), 64)
    assert drafted_tokens(target, drafter, prompt, 12, FixedWidth(4)) == expected
    assert 5 in used


@needs_compiler
@pytest.mark.parametrize("broken", [False, True])
def test_a_kernel_that_computes_something_else_is_found(broken, used, monkeypatch):
    if broken:
        monkeypatch.setattr(
            few_rows_linear, "_SOURCE", few_rows_linear._SOURCE.replace("start += DEPTH", "start += 256")
        )
    assert few_rows_linear.products_work(mx.float32) != broken


def test_where_there_is_no_compiler_the_kernel_is_not_used(monkeypatch):
    def failing(**_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(few_rows_linear, "_kernel", lambda: failing)
    assert not few_rows_linear.products_work(mx.float32)
