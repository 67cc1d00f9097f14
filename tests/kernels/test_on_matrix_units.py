"""Attention of few rows on the matrix units: the CUDA kernel's source, run on the CPU, against MLX's attention."""

import mlx.core as mx
import numpy as np
import pytest
from kernels.cuda_on_cpu import CudaKernel, kernel_on_cpu, kernels_folder, needs_compiler
from tiny import drafted_tokens, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.kernels.attention import attention_layers, instead_of_ordinary, set_attention
from dflash_mlx.kernels.rows_attention import on_matrix_units, twin
from dflash_mlx.kernels.rows_attention.masks import KINDS, MASK
from dflash_mlx.kernels.rows_attention.on_matrix_units import attention, attention_in_parts, made_for
from dflash_mlx.kernels.sources import source
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.rounding import relative_difference
from dflash_mlx.runtime import backend

# Sums are in float32, so little more than the rounding of what comes out.
CLOSE = {mx.float16: 5e-4, mx.bfloat16: 4e-3}
# Two warps, and parts of two turns: what a block does with more, in little time.
THREADS, PART = 64, 128
WAYS = pytest.mark.parametrize("way", [attention, attention_in_parts])


@pytest.fixture
def launched(monkeypatch, tmp_path_factory):
    """Has kernels run on the CPU; the shapes of the queries that went through one."""
    for name, value in {"_THREADS": THREADS, "_NOTED": PART, "IN_A_PART": PART}.items():
        monkeypatch.setattr(on_matrix_units, name, value)
    folder = kernels_folder(tmp_path_factory)
    with kernel_on_cpu(
        on_matrix_units, lambda inputs: inputs[0].shape, folder=folder, monkeypatch=monkeypatch
    ) as shapes:
        yield shapes


def problem(rows, keys, *, head_dim=64, dtype=mx.float16, heads=4, groups=2, batch=1, mask="mask"):
    """Queries, keys, values, a scale and a mask, as `attention` takes them."""
    rng = np.random.default_rng(rows * keys)
    arrays = [
        mx.array(rng.standard_normal((batch, *shape, head_dim), dtype=np.float32)).astype(dtype)
        for shape in ((heads, rows), (groups, keys), (groups, keys))
    ]
    seen = rng.random((batch, 1, rows, keys)) > 0.5
    seen[..., 0] = True
    one_for_all = mx.broadcast_to(mx.arange(keys) < keys - 2, (batch, 1, rows, keys))
    return *arrays, 0.3, {"mask": mx.array(seen), "one for all": one_for_all}.get(mask, mask)


def difference(way, given):
    return relative_difference(way(*given), twin.attention(*given))


@needs_compiler
@WAYS
@pytest.mark.parametrize("mask", ["mask", "causal", None, "one for all"])
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "head_dim", "rows", "keys"),
    [
        (1, 3, 1, 64, 5, 37),
        (2, 9, 3, 64, 1, 200),
        (3, 4, 2, 16, 3, 9),
        (1, 2, 2, 128, 2, 130),
        (1, 2, 1, 80, 9, 40),
        (1, 2, 1, 96, 3, 33),
        (2, 2, 1, 256, 2, 40),
        (2, 8, 2, 32, 9, 160),
    ],
)
def test_the_kernel_computes_attention(way, mask, batch, heads, groups, head_dim, rows, keys, launched):
    for dtype, close in CLOSE.items():
        shape = {"batch": batch, "heads": heads, "groups": groups, "head_dim": head_dim}
        given = problem(rows, keys, dtype=dtype, mask=mask, **shape)
        found = way(*given)
        assert found.shape == given[0].shape
        assert found.dtype == dtype
        assert difference(way, given) < close


@needs_compiler
@WAYS
@pytest.mark.parametrize(("dtype", "head_dim"), [(mx.float16, 64), (mx.bfloat16, 128)])
def test_a_row_has_the_same_numbers_with_and_without_others(way, dtype, head_dim, launched):
    """Nor do positions count that it does not see, after those that it does: what `--exact` needs."""
    *arrays, scale, mask = problem(19, 300, head_dim=head_dim, dtype=dtype, batch=2)
    queries, keys, values = arrays
    together = way(*arrays, scale, mask)
    for row in (0, 7, 18):
        one = slice(row, row + 1)
        assert mx.array_equal(way(queries[:, :, one], keys, values, scale, mask[:, :, one]), together[:, :, one])
    room = [(0, 0), (0, 0), (0, 90), (0, 0)]
    more = mx.pad(mask, [(0, 0), (0, 0), (0, 0), (0, 90)])
    longer = [mx.pad(array, room, constant_values=5) for array in (keys, values)]
    assert mx.array_equal(way(queries, *longer, scale, more), together)


@needs_compiler
@WAYS
def test_rows_that_see_little_or_nothing(way, launched):
    """Some see nothing of the first parts, or of the last ones, and one nothing at all: it is 0."""
    queries, keys, values, scale, _ = problem(7, 400)
    places = mx.arange(400)
    seen = mx.stack([(places >= first) & (places < first + 20) for first in (0, 50, 118, 200, 310, 390, 400)])
    given = queries, keys, values, scale, seen[None, None]
    assert difference(way, given) < CLOSE[mx.float16]
    assert mx.array_equal(way(*given)[:, :, 6], mx.zeros((1, 4, 64)))


@needs_compiler
@pytest.mark.parametrize("aligned", [True, False])
def test_the_kernel_reads_its_inputs_where_they_lie(aligned, tmp_path):
    """Parts of larger arrays, with the axes in another order, and also where the last one is not contiguous."""
    rng, (batch, heads, groups, rows, keys, head_dim) = np.random.default_rng(1), (2, 4, 2, 3, 70, 64)
    made = CudaKernel(
        tmp_path,
        name="strides",
        input_names=["q", "k", "v", "settings", "mask"],
        output_names=["out"],
        source=source("rows_attention/on_matrix_units.cu"),
        ensure_row_contiguous=False,
    )

    def numbers(*shape):
        return rng.standard_normal(shape).astype(np.float16)

    if aligned:
        q = numbers(batch, rows, heads, head_dim).swapaxes(1, 2)
        k, v = (numbers(batch, groups, 96, head_dim)[:, :, :keys] for _ in range(2))
    else:
        q = numbers(batch, heads, head_dim, rows).swapaxes(2, 3)
        k = numbers(batch, groups, head_dim, 96).swapaxes(2, 3)[:, :, :keys]
        v = numbers(batch, groups, 96, head_dim + 1)[:, :, :keys, 1:]
    mask = (rng.random((batch, 1, keys, rows)) > 0.3).swapaxes(2, 3)
    template = {
        "T": mx.float16,
        "OUT": mx.float16,
        "BRAIN": False,
        "D": head_dim,
        "THREADS": THREADS,
        "IN_PARTS": False,
        "PART": PART,
    }
    (found,) = made(
        inputs=[q, k, v, np.array([0.25, MASK], dtype=np.float32), mask],
        template=[*template.items(), *KINDS],
        grid=(64, groups, batch),
        threadgroup=(64, 1, 1),
        output_shapes=[(batch, rows, heads, head_dim)],
        output_dtypes=[mx.float16],
    )
    whole = [mx.array(np.ascontiguousarray(array)) for array in (q, k, v)]
    expected = twin.attention(*whole, 0.25, mx.array(mask.copy()))
    assert relative_difference(found.transpose(0, 2, 1, 3), expected) < CLOSE[mx.float16]


@needs_compiler
@WAYS
@pytest.mark.parametrize("places", [0, 4], ids=["chain", "tree"])
def test_answers_stay_the_same(way, places, launched):
    """Of a tiny model and a drafter that both attend by the kernel: drafted answers are its plain ones."""
    target, drafter, prompt = tiny_target("qwen3"), tiny_drafter(head_dim=16), [5, 6, 7]
    for model in (target.model, drafter):
        model.set_dtype(mx.bfloat16)
    set_attention(attention_layers(target.model) + attention_layers(drafter), instead_of_ordinary(way))
    expected = plain_tokens(target, prompt, 6)
    launched.clear()
    assert drafted_tokens(target, drafter, prompt, 6, FixedWidth(4, places=places)) == expected
    assert (1, 4, 5, 16) in {tuple(shape) for shape in launched}


def test_what_the_kernel_was_made_for():
    def fits(heads=4, groups=2, head_dim=16, value_dim=16, dtype=mx.float16):
        shapes = (heads, 3, head_dim), (groups, 9, head_dim), (groups, 9, value_dim)
        return made_for(*(mx.zeros((1, *shape), dtype) for shape in shapes))

    assert fits()
    assert fits(head_dim=80, value_dim=80)
    for change in (
        {"head_dim": 24, "value_dim": 24},
        {"head_dim": 272, "value_dim": 272},
        {"value_dim": 32},
        {"heads": 3},
    ):
        assert not fits(**change)
    assert not fits(dtype=mx.float32)


@pytest.mark.gpu
@WAYS
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
def test_on_a_gpu(way, dtype, head_dim):
    """The real compiler and the real device: right, and a row by itself is what it is among others."""
    if backend().kind != "cuda":
        pytest.skip("no NVIDIA GPU")
    for mask in ("mask", "causal", None):
        for rows, keys in ((2, 300), (16, 1033), (33, 65), (64, 9000)):
            assert difference(way, problem(rows, keys, head_dim=head_dim, dtype=dtype, mask=mask)) < CLOSE[dtype]
    queries, keys, values, scale, mask = problem(32, 1100, head_dim=head_dim, dtype=dtype)
    together = way(queries, keys, values, scale, mask)
    for row in range(32):
        one = slice(row, row + 1)
        assert mx.array_equal(way(queries[:, :, one], keys, values, scale, mask[:, :, one]), together[:, :, one])
