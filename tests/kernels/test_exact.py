"""The parts of exact decoding: blocks of rows, finding out which sizes agree, attention, and what is refused."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from kernels.cuda_on_cpu import CudaKernel, needs_compiler
from metal import emulator as metal
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention
from mlx_lm.models.gated_delta import gated_delta_update
from tiny import FAMILIES, tiny_target
from tiny_families import family_target, unavailable

from dflash_mlx.caches.tree_recurrence import convolutions
from dflash_mlx.errors import UsageError
from dflash_mlx.kernels import few_rows_linear
from dflash_mlx.kernels.exact import model
from dflash_mlx.kernels.exact.attention import Blocks, attention_in
from dflash_mlx.kernels.exact.blocks import SIZES, compare_sizes, in_blocks
from dflash_mlx.kernels.exact.layers import KernelLinear, cancelling, compare_products
from dflash_mlx.kernels.exact.model import differences, find_uses, make_exact
from dflash_mlx.kernels.exact.recurrence import exact_convolution
from dflash_mlx.kernels.rows_attention import layers, on_matrix_units, one_launch, passes
from dflash_mlx.runtime import backend


@pytest.mark.parametrize("count", [1, 3, 4, 5, 16, 17, 31, 40])
def test_blocks_have_the_given_sizes_and_rows_stay_in_order(count):
    calls = []

    def function(one, other):
        calls.append(one.shape[0])
        return [one * 2, one + other]

    one, other = mx.arange(3 * count).reshape(count, 3), mx.arange(count)[:, None]
    doubled, sums = in_blocks(function, [one, other], (4, 16))
    assert mx.array_equal(doubled, one * 2)
    assert mx.array_equal(sums, one + other)
    assert set(calls) <= {4, 16}
    assert 0 <= sum(calls) - count < 16


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_the_numbers_of_the_comparison_show_another_order_of_adding(dtype):
    rows, signs = (array.astype(dtype).astype(mx.float32) for array in cancelling(64, 512))
    exactly = np.array(rows, dtype=np.float64) @ np.array(signs, dtype=np.float64).T
    assert np.abs(exactly).max() < 1e-9
    terms = rows[:, None] * signs
    sums, turned = mx.cumsum(terms, axis=-1)[..., -1], mx.cumsum(terms, axis=-1, reverse=True)[..., 0]
    assert float(mx.mean(sums.astype(dtype) != turned.astype(dtype))) > 0.9


def by_elements(x, weight):
    """A product whose rows are even on every machine."""
    return mx.cumsum(x[:, None] * weight, axis=-1)[..., -1]


def test_sizes_that_add_in_another_order_are_left_out():
    rows, signs = cancelling(max(SIZES), 256)

    def product(x):
        return [by_elements(x, signs) if 2 < len(x) < 64 else by_elements(x[:, ::-1], signs[:, ::-1])]

    agreement = compare_sizes(product, [rows])
    assert agreement.base == 16
    assert agreement.sizes == (4, 8, 16, 32)
    assert all(agreement.differences[size] > 0 for size in (1, 2, 64))


def test_rows_that_depend_on_their_place_are_computed_one_by_one():
    rows, signs = cancelling(max(SIZES), 256)

    def product(x):
        whole = by_elements(x, signs)
        return [mx.concatenate([whole[:3], by_elements(x[3:, ::-1], signs[:, ::-1])])] if len(x) > 3 else [whole]

    agreement = compare_sizes(product, [rows])
    assert agreement.base == 1
    assert agreement.sizes == (1, 2)


@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_quantized_matrices_are_compared(bits):
    layer = nn.QuantizedLinear(128, 96, bias=False, group_size=64, bits=bits)
    agreement = compare_products(layer, mx.float32)
    assert agreement.base in agreement.sizes
    assert all(difference < np.inf for difference in agreement.differences.values())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "rows", "length", "mask"),
    [
        (1, 4, 2, 1, 300, None),
        (1, 4, 4, 40, 300, "causal"),
        (3, 6, 2, 5, 513, "array"),
        (2, 4, 1, 17, 20, "window"),
    ],
)
@pytest.mark.parametrize(("sinks", "blocks"), [(False, 16), (True, 16), (False, 1)])
def test_attention_is_mlx_lms_up_to_rounding(batch, heads, kv_heads, rows, length, mask, sinks, blocks, dtype):
    rng = np.random.default_rng(rows)
    queries, keys, values = (
        mx.array(rng.standard_normal(shape, dtype=np.float32)).astype(dtype)
        for shape in ((batch, heads, rows, 32), (batch, kv_heads, length, 32), (batch, kv_heads, length, 16))
    )
    array = rng.random((batch, 1, rows, length)) < 0.5
    array[..., 0] = True
    masks = {"array": mx.array(array), "window": create_causal_mask(rows, length - rows, window_size=7)}
    call = {
        "cache": None,
        "scale": 0.2,
        "mask": masks.get(mask, mask),
        "sinks": mx.array(rng.standard_normal(heads), dtype=dtype) if sinks else None,
    }
    found = attention_in(Blocks(blocks, (1, 4)))(queries, keys, values, **call)
    expected = scaled_dot_product_attention(*(a.astype(mx.float32) for a in (queries, keys, values)), **call)
    assert found.dtype == dtype
    assert mx.allclose(found, expected, rtol=0, atol=1e-5 if dtype == mx.float32 else 0.02)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama4", r"another memory than keys and values \("),
        ("falcon_h1", "CumSum, Matmul"),
        ("gemma3n", "Matmul"),
        ("kimi_k25", "masks other than a boolean one"),
        ("gemma4, shared keys", "share the keys"),
    ],
)
def test_what_cannot_be_exact_is_named(family, name):
    if reason := unavailable(family):
        pytest.skip(reason)
    with pytest.raises(UsageError, match=f"{name}.* Leave --exact out"):
        find_uses(family_target(family))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("family", "kernels"), [("qwen3", 3), pytest.param("llama, sliding", 1, marks=pytest.mark.long)]
)
def test_cuda_kernels_for_few_rows_compute_each_row_alike(family, kernels, monkeypatch, tmp_path):
    """They run on the CPU here. Those for attention were not made for the heads of the second family."""
    made = []

    def make(**options):
        made.append(options["name"])
        return CudaKernel(tmp_path, **options)

    monkeypatch.setattr(mx.fast, "cuda_kernel", make)
    for module in (model, layers):
        monkeypatch.setattr(module, "backend", lambda: replace(backend(), kind="cuda"))
    monkeypatch.setattr(few_rows_linear, "_MANY_COLUMNS", 64)
    for module in (on_matrix_units, one_launch, few_rows_linear):
        module._kernel.cache_clear()
    try:
        target = tiny_target(family) if family in FAMILIES else family_target(family)
        target.model.set_dtype(mx.bfloat16)
        make_exact(target)
    finally:
        for module in (on_matrix_units, one_launch, few_rows_linear):
            module._kernel.cache_clear()
    assert len(set(made)) == kernels
    assert isinstance(target.model.layers[0].self_attn.q_proj, KernelLinear)


@metal.needs_compiler
@pytest.mark.slow
def test_the_metal_kernel_for_attention_computes_each_row_alike(monkeypatch, tmp_path_factory):
    """In two passes, for all tokens of prompts, chains and trees; in an emulator here."""
    used, launched = metal.Emulator(metal.shared_folder(tmp_path_factory)), []

    def make(**options):
        kernel = used.metal_kernel(**options)
        return lambda **call: launched.append(call["inputs"][0].shape) or kernel(**call)

    monkeypatch.setattr(mx.fast, "metal_kernel", make)
    for module in (model, layers):
        monkeypatch.setattr(module, "backend", lambda: replace(backend(), kind="metal"))
    passes._kernels.cache_clear()
    try:
        target = tiny_target("qwen3", head_dim=64)
        target.model.set_dtype(mx.bfloat16)
        make_exact(target)
        launched.clear()
        assert set(differences(target).values()) == {0.0}
    finally:
        passes._kernels.cache_clear()
    assert {shape[2] for shape in launched if len(shape) == 4} == {1, 4, 5}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_convolution_over_time_is_even(bias, dtype):
    """The same bits for however many tokens are fed at once, and MLX's numbers up to rounding."""
    model = nn.Sequential(nn.Conv1d(6, 6, 4, groups=6, bias=bias), nn.Conv1d(6, 6, 1), nn.Conv1d(6, 6, 4, 2, groups=6))
    model.set_dtype(dtype)
    [layer] = convolutions(model)
    x = mx.random.normal((2, 40, 6)).astype(dtype)
    expected = layer(x)
    layer.__class__ = exact_convolution(type(layer))
    found = layer(x)
    assert found.dtype == dtype
    assert mx.allclose(found, expected, rtol=0, atol=1e-5 if dtype == mx.float32 else 0.05)
    for count in (1, 2, 7):
        parts = [layer(x[:, at : at + count + 3]) for at in range(0, 35, count)]
        assert mx.array_equal(mx.concatenate(parts, axis=1), found[:, : sum(part.shape[1] for part in parts)])


def test_a_recurrence_that_is_uneven_is_refused(monkeypatch):
    """Here for tokens of a block that was kept in part, after which states are computed again with a mask."""
    target = family_target("qwen3_5")

    def uneven(*arrays, **options):
        out, state = gated_delta_update(*arrays, **options)
        return out, state if arrays[8] is None else state + 1e-5

    monkeypatch.setitem(type(target.layers[0].linear_attn).__call__.__globals__, "gated_delta_update", uneven)
    with pytest.raises(UsageError, match="other numbers for blocks that are kept in part"):
        make_exact(target)


def test_what_only_running_shows_is_refused(monkeypatch):
    """A model whose logits depend on how many tokens it is fed, by operations that are even by themselves."""
    target = tiny_target("llama")
    call = type(target.model).__call__
    monkeypatch.setattr(
        type(target.model), "__call__", lambda self, x, **options: call(self, x, **options) + 1e-5 * x.shape[1]
    )
    with pytest.raises(UsageError, match="other numbers for several tokens at once"):
        make_exact(target)


def test_parameters_and_their_names_stay():
    target = tiny_target("qwen2")
    names = target.parameter_names()
    make_exact(target)
    assert target.parameter_names() == names
    assert target.kernels == "exact"
