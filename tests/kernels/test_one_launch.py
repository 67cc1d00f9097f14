"""Attention of few rows in one launch: the CUDA kernel's source, run on the CPU, against MLX's attention."""

import mlx.core as mx
import numpy as np
import pytest
from kernels.cuda_on_cpu import CudaKernel, kernel_on_cpu, kernels_folder, needs_compiler
from mlx_lm.models.base import scaled_dot_product_attention
from tiny import drafted_tokens, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.kernels.attention import attention_layers, instead_of_ordinary, set_attention
from dflash_mlx.kernels.rows_attention import one_launch
from dflash_mlx.kernels.rows_attention.masks import MASK
from dflash_mlx.kernels.rows_attention.one_launch import attention, made_for
from dflash_mlx.kernels.sources import source
from dflash_mlx.policy.width import FixedWidth


@pytest.fixture
def launched(monkeypatch, tmp_path_factory):
    """Has kernels run on the CPU; the shapes of the queries that went through one."""
    folder = kernels_folder(tmp_path_factory)
    with kernel_on_cpu(one_launch, lambda inputs: inputs[0].shape, folder=folder, monkeypatch=monkeypatch) as shapes:
        yield shapes


def masks(batch, rows, keys, rng):
    seen = rng.random((batch, 1, rows, keys)) > 0.5
    seen[..., 0] = True
    one_for_all = mx.broadcast_to(mx.arange(keys) < keys - 2, (batch, 1, rows, keys))
    return {"mask": mx.array(seen), "causal": "causal", "none": None, "broadcast": one_for_all}


@needs_compiler
@pytest.mark.parametrize("kind", ["mask", "causal", "none", "broadcast"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "head_dim", "rows", "keys"),
    [
        (1, 3, 1, 64, 5, 37),
        (3, 4, 2, 16, 3, 9),
        (1, 2, 2, 128, 2, 300),
        (2, 2, 1, 256, 2, 40),
        (2, 9, 3, 64, 2, 33),
        (3, 4, 2, 16, 1, 40),
        (2, 8, 2, 32, 9, 70),
    ],
)
def test_the_kernel_computes_attention(kind, batch, heads, kv_heads, head_dim, rows, keys, launched):
    rng = np.random.default_rng(rows * keys)
    queries = mx.array(rng.standard_normal((batch, heads, rows, head_dim), dtype=np.float32))
    k, v = (mx.array(rng.standard_normal((batch, kv_heads, keys, head_dim), dtype=np.float32)) for _ in range(2))
    mask = masks(batch, rows, keys, rng)[kind]
    for dtype, tolerance in ((mx.float32, 1e-5), (mx.bfloat16, 0.02)):
        given = [x.astype(dtype) for x in (queries, k, v)]
        found = attention(*given, 0.3, mask)
        exact = scaled_dot_product_attention(*[x.astype(mx.float32) for x in given], cache=None, scale=0.3, mask=mask)
        assert found.shape == exact.shape
        assert found.dtype == dtype
        assert mx.abs(found.astype(mx.float32) - exact).max() < tolerance
    assert len(launched) == 2


@needs_compiler
@pytest.mark.parametrize("rows", [2, 5, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_row_computed_with_another_has_the_same_numbers(rows, dtype, launched, monkeypatch):
    """What `--exact` needs, since single rows are computed alone. The other row sees more, or less."""
    rng = np.random.default_rng(rows)
    queries, k, v = (
        mx.array(rng.standard_normal((2, heads, count, 32), dtype=np.float32)).astype(dtype)
        for heads, count in ((4, rows), (2, 130), (2, 130))
    )
    mask = masks(2, rows, 130, rng)["mask"]
    found = {}
    for enough in (1, 1 << 30):
        monkeypatch.setattr(one_launch, "_ENOUGH_BLOCKS", enough)
        found[enough] = attention(queries, k, v, 0.3, mask)
    together, alone = found.values()
    assert mx.array_equal(together, alone)


@needs_compiler
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("keys", [32, 33, 100])
def test_more_keys_than_a_part_holds(keys, together, launched, monkeypatch):
    """Some rows see nothing of the first parts, or of the last ones."""
    monkeypatch.setattr(one_launch, "_ENOUGH_BLOCKS", 1 if together else 1 << 30)
    constants = [(name, 32 if name == "MOST_KEYS" else value) for name, value in one_launch._CONSTANTS]
    monkeypatch.setattr(one_launch, "_CONSTANTS", constants)
    rng = np.random.default_rng(keys)
    queries, k, v = (
        mx.array(rng.standard_normal((2, heads, count, 16), dtype=np.float32))
        for heads, count in ((4, 7), (2, keys), (2, keys))
    )
    places = mx.arange(keys)
    seen = mx.stack([(places >= first) & (places < first + 20) for first in (0, 5, 12, 20, 60, 70, 80)])
    seen = mx.broadcast_to((seen | (places == keys - 1) if keys < 90 else seen)[None, None], (2, 1, 7, keys))
    found = attention(queries, k, v, 0.3, seen)
    expected = scaled_dot_product_attention(queries, k, v, cache=None, scale=0.3, mask=seen)
    assert mx.abs(found - expected).max() < 1e-5


@needs_compiler
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("together", [1, 2])
def test_the_kernel_reads_its_inputs_where_they_lie(aligned, together, tmp_path):
    """Parts of larger arrays, with the axes in another order, and also where the last one is not contiguous."""
    rng = np.random.default_rng(1)
    batch, heads, kv_heads, head_dim, rows, keys = 2, 4, 2, 16, 3, 20
    made = CudaKernel(
        tmp_path,
        name="strides",
        input_names=["q", "k", "v", "settings", "mask"],
        output_names=["out"],
        source=source("rows_attention/one_launch.cu"),
        ensure_row_contiguous=False,
    )
    q = rng.standard_normal((batch, rows, heads, head_dim), dtype=np.float32).transpose(0, 2, 1, 3)
    if aligned:
        k, v = (rng.standard_normal((batch, kv_heads, 32, head_dim), dtype=np.float32)[:, :, :keys] for _ in range(2))
    else:
        k = rng.standard_normal((batch, kv_heads, head_dim, 32), dtype=np.float32).swapaxes(2, 3)[:, :, :keys]
        v = rng.standard_normal((batch, kv_heads, 32, head_dim + 1), dtype=np.float32)[:, :, :keys, 1:]
    mask = (rng.random((batch, 1, keys, rows)) > 0.3).swapaxes(2, 3)
    mask[..., 0] = True
    (found,) = made(
        inputs=[q, k, v, np.array([0.25, MASK], dtype=np.float32), mask],
        template=[("T", mx.float32), ("D", head_dim), ("ROWS", together), *one_launch._CONSTANTS],
        grid=(heads * one_launch._THREADS, -(-rows // together), batch),
        threadgroup=(one_launch._THREADS, 1, 1),
        output_shapes=[(batch, rows, heads, head_dim)],
        output_dtypes=[mx.float32],
    )
    expected = scaled_dot_product_attention(
        *[mx.array(np.ascontiguousarray(x)) for x in (q, k, v)], cache=None, scale=0.25, mask=mx.array(mask.copy())
    )
    assert mx.abs(found.transpose(0, 2, 1, 3) - expected).max() < 1e-5


@needs_compiler
@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(family, marks=pytest.mark.long) for family in ("llama", "qwen2"))]
)
@pytest.mark.parametrize("places", [0, 4], ids=["chain", "tree"])
def test_answers_stay_the_same(family, places, launched):
    """Of tiny models of which both attend by the kernel; the truth is mlx-lm's plain decoding."""
    target, drafter = tiny_target(family), tiny_drafter(head_dim=16)
    prompt = [5, 6, 7]
    expected = plain_tokens(target, prompt, 6)
    set_attention(attention_layers(target.model) + attention_layers(drafter), instead_of_ordinary(attention))
    assert drafted_tokens(target, drafter, prompt, 6, FixedWidth(4, places=places)) == expected
    assert (1, 4, 5, 16) in {tuple(shape) for shape in launched}


def test_what_the_kernel_was_made_for():
    def fits(heads=4, groups=2, head_dim=16, value_dim=16, dtype=mx.float32):
        q, k, v = (mx.ones((1, n, 3, d)) for n, d in ((heads, head_dim), (groups, head_dim), (groups, value_dim)))
        return made_for(q.astype(dtype), k, v)

    assert fits()
    for change in ({"head_dim": 24}, {"head_dim": 8}, {"value_dim": 32}, {"heads": 3}, {"dtype": mx.float16}):
        assert not fits(**change)
