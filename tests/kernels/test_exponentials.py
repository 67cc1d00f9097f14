"""Attention and gated activations by a quicker exponential: right to rounding, and used where they are faster."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.activations import swiglu as ordinary_swiglu
from mlx_lm.models.base import scaled_dot_product_attention
from tiny import FAMILIES, drafted_tokens, mostly_slow, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.hooks import means
from dflash_mlx.kernels import exponentials
from dflash_mlx.kernels.exponentials import attend, exponential, log_sum, swiglu, use_where_faster
from dflash_mlx.policy.width import FixedWidth


@pytest.fixture
def always(monkeypatch):
    """Uses the functions for any number of scores, a few rows at a time; how many scores there were each time."""
    monkeypatch.setattr(exponentials, "_FEWEST", 1)
    monkeypatch.setattr(exponentials, "_AT_ONCE", 1)
    monkeypatch.setattr(exponentials, "_FEWEST_ROWS", 3)
    own, sizes = exponentials._attend, []

    def counted(queries, keys, *others):
        sizes.append((queries.shape[2], keys.shape[2]))
        return own(queries, keys, *others)

    monkeypatch.setattr(exponentials, "_attend", counted)
    return sizes


def test_the_exponential_is_right_to_the_last_bits():
    x = np.concatenate([np.linspace(-87, 87, 20001), [0.0, -0.0, 0.34657359, -0.34657360]]).astype(np.float32)
    found = np.array(exponential(mx.array(x))).astype(np.float64)
    assert np.max(np.abs(found / np.exp(x.astype(np.float64)) - 1)) < 2e-7


@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
def test_the_sum_of_a_rows_exponentials(size):
    """Also of scores of which a filter has removed most, or all."""
    scores = mx.random.normal((4, 3000), key=mx.random.key(0)) * size
    scores[2, 5:], scores[3] = -1e30, -1e30
    found, expected = log_sum(scores), mx.logsumexp(scores, axis=-1, keepdims=True)
    assert found.shape == (4, 1)
    assert mx.allclose(found, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
def test_gated_activations(size):
    gate = mx.random.normal((3, 5, 32), key=mx.random.key(0)) * size
    x = mx.random.normal((3, 5, 32), key=mx.random.key(1))
    assert mx.allclose(swiglu(gate, x), ordinary_swiglu(gate, x), rtol=1e-5, atol=1e-6)
    half = gate.astype(mx.bfloat16)
    assert mx.array_equal(swiglu(half, half), ordinary_swiglu(half, half))


def masks(batch, rows, keys):
    rng = np.random.default_rng(0)
    seen = rng.random((batch, 1, rows, keys)) > 0.5
    seen[..., 0] = True
    return {
        "none": None,
        "causal": "causal",
        "of each answer": mx.array(seen),
        "of all": mx.array(seen[0, 0]),
        "of one row for all": mx.array(seen[:, :, :1]),
    }


@pytest.mark.parametrize("kind", ["none", "causal", "of each answer", "of all", "of one row for all"])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "rows", "keys"), [(1, 6, 2, 7, 9), (3, 4, 4, 4, 20), (2, 3, 1, 1, 5)]
)
def test_attention(kind, batch, heads, kv_heads, rows, keys, always):
    rng = np.random.default_rng(1)
    queries, cached, values = (
        mx.array(rng.standard_normal(shape, dtype=np.float32))
        for shape in ((batch, rows, heads, 8), (batch, kv_heads, keys + 5, 8), (batch, kv_heads, keys + 5, 8))
    )
    queries, cached, values = queries.transpose(0, 2, 1, 3), cached[:, :, :keys], values[:, :, :keys]
    call = {"cache": None, "scale": 0.3, "mask": masks(batch, rows, keys)[kind]}
    expected = scaled_dot_product_attention(queries, cached, values, **call)
    assert mx.allclose(attend(queries, cached, values, **call), expected, atol=1e-5)
    assert sum(rows for rows, _ in always) == rows
    if kind == "causal" and rows == 7:
        # Rows see what comes before them, and no more is computed.
        assert always == [(3, 5), (3, 8), (1, 9)]


def test_what_it_was_not_made_for_goes_the_ordinary_way(always):
    def call(dtype=mx.float32, heads=2, mask="causal", **others):
        x = mx.random.normal((1, heads, 4, 8)).astype(dtype)
        return attend(x, x[:, :2], x[:, :2], **{"cache": None, "scale": 0.3, "mask": mask} | others)

    call(dtype=mx.bfloat16)
    call(mask=mx.zeros((4, 4)))
    call(mask=mx.ones((1, 2, 4, 4), dtype=mx.bool_))
    call(sinks=mx.zeros((2,)))
    assert not always
    call()
    assert always


@pytest.mark.parametrize("family", mostly_slow(sorted(FAMILIES), "qwen3"))
def test_answers_stay_the_same(family, always, monkeypatch):
    monkeypatch.setattr(exponentials, "_is_faster", lambda: True)
    target, drafter = tiny_target(family), tiny_drafter()
    prompt = [5, 6, 7, 8, 9]
    expected = plain_tokens(target, prompt, 30)
    names = target.parameter_names()
    use_where_faster([target.model, drafter])
    assert target.parameter_names() == names
    for model in (target.model, drafter):
        assert any(means(type(layer), "swiglu", swiglu) for layer in model.modules())
    assert drafted_tokens(target, drafter, prompt, 30, FixedWidth(4)) == expected
    assert {rows for rows, _ in always} >= {1, 3}


@pytest.mark.parametrize("own", [0.5, 1.5])
def test_they_are_used_where_they_are_faster(own, monkeypatch):
    times = iter(t for _ in range(6) for t in (0.0, 1.0, 0.0, own))
    monkeypatch.setattr(exponentials.time, "perf_counter", lambda: next(times))
    assert exponentials._is_faster() == (own < 1)


def test_they_are_not_used_where_they_cannot_be_compiled(monkeypatch):
    def failing(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(exponentials, "_gated", failing)
    assert not exponentials._is_faster()
