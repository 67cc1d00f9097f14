"""Few rows through the light kernel for linear layers: the same products and answers."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from kernels.cuda_on_cpu import kernel_on_cpu, kernels_folder, needs_compiler
from tiny import FAMILIES, SECOND, mostly_slow, tiny_drafter, tiny_target

from dflash_mlx.caches.rows import Rows
from dflash_mlx.kernels import cuda_modules, few_rows_linear
from dflash_mlx.kernels.few_rows_linear import (
    FewRowsLinear,
    called_together,
    fitting_layers,
    multiply,
    set_few_rows,
)
from dflash_mlx.kernels.sources import source
from dflash_mlx.rounding import TOLERANCE, relative_difference
from dflash_mlx.runtime import backend

MOST = 5


def half(target):
    target.model.set_dtype(mx.float16)
    return target


def linear(*, bias, dtype=mx.float16):
    layer = nn.Linear(64, 24, bias=bias)
    layer.set_dtype(dtype)
    return layer


@pytest.fixture
def used(monkeypatch, tmp_path_factory):
    """Has the kernel run on the CPU; of each launch, the rows and how many products of them it computes."""

    def rows(inputs):
        x, *weights = inputs
        return x.size // x.shape[-1], len(weights)

    monkeypatch.setattr(few_rows_linear, "_MANY_COLUMNS", 64)
    folder = kernels_folder(tmp_path_factory)
    with kernel_on_cpu(few_rows_linear, rows, folder=folder, monkeypatch=monkeypatch) as noted:
        yield noted


def random(rng, *shape, dtype=mx.float16):
    return mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        (2, [16], 32),
        (16, [24, 8], 128),
        (17, [3, 9, 8], 160),
        (40, [35, 1], 416),
        (80, [35, 64], 288),
        (130, [65], 416),
        (5, [50], 1184),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_the_kernel_multiplies(rows, columns, depth, dtype, wide, used, monkeypatch):
    """Numbers of rows, columns and of numbers that are added that fill blocks, and that do not."""
    if wide:
        monkeypatch.setattr(few_rows_linear, "_MANY_COLUMNS", 0)
    rng = np.random.default_rng(rows)
    x, *weights = (random(rng, n, depth, dtype=dtype) for n in (rows, *columns))
    for found, weight in zip(multiply(x, weights), weights, strict=True):
        assert found.dtype == dtype
        expected = x.astype(mx.float32) @ weight.astype(mx.float32).T
        assert relative_difference(found, expected) < (5e-4 if dtype == mx.float16 else 4e-3)
    assert used == [(rows, len(columns))]


@needs_compiler
def test_rows_that_lie_at_odd_places(used):
    """Where 16 bytes cannot be read at once."""
    rng = np.random.default_rng(0)
    # Numbers that numpy holds stay where they are in memory.
    x, weight = np.array(random(rng, 3 * 64 + 1))[1:].reshape(3, 64), random(rng, 8, 64)
    block = few_rows_linear._block(3, 8)
    [found] = few_rows_linear._kernel(1, block.memory)(
        inputs=[x, weight],
        template=[
            ("T", mx.float16),
            ("BRAIN", False),
            ("DIMENSIONS", 2),
            ("SPLIT", True),
            ("ROW_TILES", block.tiles[0]),
            ("COLUMN_TILES", block.tiles[1]),
            ("STAGES", block.stages),
        ],
        grid=(block.threads, 1, 1),
        threadgroup=(block.threads, 1, 1),
        output_shapes=[(3, 8)],
        output_dtypes=[mx.float16],
    )
    assert relative_difference(found, mx.array(x).astype(mx.float32) @ weight.astype(mx.float32).T) < 5e-4


@needs_compiler
def test_a_row_depends_neither_on_the_others_nor_on_other_products(used):
    rng = np.random.default_rng(0)
    x, weight, other = (random(rng, n, 416) for n in (70, 35, 17))
    [together] = multiply(x, [weight])
    for first, last in ((0, 1), (3, 9), (16, 40)):
        assert mx.array_equal(multiply(x[first:last], [other, weight])[1], together[first:last])


@needs_compiler
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_products_are_those_of_a_linear_layer(bias, dtype, used):
    layer = linear(bias=bias, dtype=dtype)
    for rows in range(1, MOST + 2):
        for shape in ((rows, 64), (1, rows, 64), (rows, 1, 64)):
            x = mx.random.normal(shape, key=mx.random.key(rows)).astype(dtype)
            set_few_rows([layer], 0)
            expected = layer(x)
            set_few_rows([layer], MOST)
            found = layer(x)
            assert mx.allclose(found.astype(mx.float32), expected.astype(mx.float32), atol=0.02)
            assert found.shape == expected.shape
            assert found.dtype == dtype
    assert set(used) == {(rows, 1) for rows in range(2, MOST + 1)}
    one = mx.random.normal((64,)).astype(dtype)
    assert mx.allclose(layer(one), nn.Linear.__call__(layer, one), atol=0.02)


class Attention(nn.Module):
    """Calls four layers as a model does: three with the same rows, the third also with those of another, by itself."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(64, 64), nn.Linear(64, 16), nn.Linear(64, 16), nn.Linear(64, 64)
        self.set_dtype(mx.float16)

    def __call__(self, x):
        queries, keys, values = self.q(x), self.k(x), self.v(x)
        return mx.concatenate([self.o(queries), keys, values, self.v(queries)], axis=-1)


@needs_compiler
def test_layers_that_are_called_together_share_a_launch(used):
    model, x = Attention(), mx.random.normal((1, 4, 64), key=mx.random.key(1)).astype(mx.float16)
    layers = fitting_layers(model)
    expected = model(x)
    groups = called_together(layers, lambda: model(x))
    assert groups == [[model.q, model.k, model.v], [model.o, model.v]]
    assert {type(layer) for layer in layers} == {nn.Linear}
    set_few_rows(layers, MOST, groups)
    for _ in range(2):
        used.clear()
        assert relative_difference(model(x), expected) < 0.02
        assert used == [(4, 3), (4, 2)]
    # Other rows than those that a product waits for.
    used.clear()
    model.q(x)
    other = x * 2
    assert relative_difference(model.k(other), other @ model.k.weight.T + model.k.bias) < 0.02
    assert relative_difference(model.k(x), x @ model.k.weight.T + model.k.bias) < 0.02
    assert used == [(4, 3), (4, 1), (4, 1)]


@needs_compiler
def test_a_large_matrix_is_read_once(used, monkeypatch):
    """More rows than a block takes are left to the library, and so are those of a layer that would compute the products
    of a large one along."""
    monkeypatch.setattr(few_rows_linear, "_MOST_WEIGHTS", 1024)
    model = Attention()
    layers = fitting_layers(model)
    set_few_rows(layers, 64, [[model.k, model.q]])
    for rows in (32, 33):
        x = mx.random.normal((1, rows, 64), key=mx.random.key(rows)).astype(mx.float16)
        for layer in (model.k, model.q, model.v):
            assert relative_difference(layer(x), x @ layer.weight.T + layer.bias) < 0.02
    assert used == [(32, 2), (32, 1), (33, 1)]


@needs_compiler
def test_a_product_that_waits_is_left_where_the_weight_was_replaced(used):
    model, x = Attention(), mx.random.normal((1, 4, 64)).astype(mx.float16)
    layers = fitting_layers(model)
    set_few_rows(layers, MOST, called_together(layers, lambda: model(x)))
    model.q(x)
    model.k.weight = model.k.weight * 2
    assert relative_difference(model.k(x), x @ model.k.weight.T + model.k.bias) < 0.02


def test_only_layers_of_one_type_share_a_launch():
    model, x = Attention(), mx.zeros((1, 4, 64), dtype=mx.float16)
    model.k.set_dtype(mx.bfloat16)
    assert called_together(fitting_layers(model), lambda: model(x)) == [[model.o, model.v]]
    assert called_together(fitting_layers(model), lambda: model.o(x)) == []


@pytest.mark.skipif(backend().kind != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_products_in_half_precision(dtype):
    layer = linear(bias=True, dtype=dtype)
    x = mx.random.normal((1, MOST, 64)).astype(dtype)
    expected = layer(x)
    set_few_rows([layer], MOST)
    assert mx.allclose(layer(x), expected, atol=0.05)


def test_parameters_stay_and_it_comes_off():
    target = half(tiny_target("qwen2"))
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
    x = mx.random.normal((3, 64)).astype(mx.float16)
    set_few_rows([layer], MOST)
    layer.weight = layer.weight * 2
    assert mx.allclose(layer(x), x @ layer.weight.T, atol=0.02)
    assert not used


def test_gradients_are_those_of_a_linear_layer():
    layer = linear(bias=True)
    x = mx.random.normal((3, 64)).astype(mx.float16)
    gradient = nn.value_and_grad(layer, lambda x: (layer(x) ** 2).sum())
    expected = gradient(x)[1]
    set_few_rows([layer], MOST)
    found = gradient(x)[1]
    assert all(mx.allclose(found[name], expected[name], rtol=0.02, atol=0.02) for name in ("weight", "bias"))


def test_only_plain_layers_of_a_fitting_size_take_part():
    plain = [nn.Linear(depth, columns) for depth, columns in ((64, 8), (64, 9), (48, 8), (64, 8))]
    model = nn.Sequential(*plain[:3], nn.QuantizedLinear(64, 8), plain[3])
    model.set_dtype(mx.bfloat16)
    model.layers[4].set_dtype(mx.float32)

    def places(**kwargs):
        found = fitting_layers(model, **kwargs)
        return [i for i, layer in enumerate(model.layers) if any(layer is other for other in found)]

    assert places() == [0, 1]
    assert places(without=[model.layers[0]]) == [1]


@needs_compiler
@pytest.mark.parametrize("family", mostly_slow(sorted(FAMILIES), "qwen3"))
@pytest.mark.parametrize("second", [False, True])
def test_rounds_stay_the_same(family, second, used):
    """Of tiny models of which both compute by the kernel: what the target says of a block, and the drafter of one."""
    target, drafter = half(tiny_target(family)), tiny_drafter(**(SECOND if second else {}))
    drafter.set_dtype(mx.float16)
    block, at = mx.array([[5, 6, 7, 8, 9]]), mx.array([0])

    def made():
        rows, state = Rows.blank(target.blank_caches, 1, 16), drafter.blank(target, 1, 16)
        logits, features = target.pass_for(drafter.taps).over(rows, block)
        state.extend(block, features, at, room=16, all_kept=True)
        return logits, state.draft(block[:, 0], at + 5, mx.zeros((1, 4), dtype=mx.uint32), room=16)[0]

    expected, layers = made(), fitting_layers(target.model) + fitting_layers(drafter)
    groups = called_together(layers, made)
    assert len(groups) >= 2 * len(target.layers)
    set_few_rows(layers, 64, groups)
    for found, truth in zip(made(), expected, strict=True):
        assert relative_difference(found, truth) < TOLERANCE[mx.float16]
    assert {(5, 3), (5, 2), (5, 1)} <= set(used)


@needs_compiler
@pytest.mark.parametrize("broken", [False, True])
def test_a_kernel_that_computes_something_else_is_found(broken, used, monkeypatch):
    if broken:
        monkeypatch.setattr(
            cuda_modules, "included", lambda file, _=(): source(file).replace("at < depth", "at + 32 < depth")
        )
    assert few_rows_linear.products_work(mx.float16) != broken


def test_a_kernel_whose_products_are_no_numbers_is_found(monkeypatch):
    monkeypatch.setattr(
        few_rows_linear,
        "multiply",
        lambda x, weights: [mx.full((*x.shape[:-1], weight.shape[0]), float("nan"), x.dtype) for weight in weights],
    )
    assert not few_rows_linear.products_work(mx.float16)


def test_where_there_is_no_compiler_the_kernel_is_not_used(monkeypatch):
    def failing(**_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(few_rows_linear, "_kernel", lambda *_: failing)
    assert not few_rows_linear.products_work(mx.bfloat16)


def test_single_precision_is_left_to_mlx():
    assert not few_rows_linear.products_work(mx.float32)
