"""Rotary embeddings that share their angles: MLX's own numbers, and used where they are faster."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny import FAMILIES, drafted_tokens, mostly_slow, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.kernels import rotary
from dflash_mlx.kernels.rotary import SharedRoPE, use_where_faster
from dflash_mlx.policy.width import FixedWidth

SETTINGS = [{}, {"base": 500.0}, {"scale": 0.25}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("offset", [0, 7, 31_000, (5,), (0, 900, 31_000)])
@pytest.mark.parametrize("count", [1, 16])
def test_they_are_those_of_mlx(settings, offset, count):
    batch = 3 if not isinstance(offset, tuple) else len(offset)
    x = mx.random.normal((batch, 4, count, 64), key=mx.random.key(1))
    at = mx.array(offset) if isinstance(offset, tuple) else offset
    expected = nn.RoPE(64, **settings)(x, offset=at)
    assert mx.allclose(SharedRoPE(64, **settings)(x, offset=at), expected, atol=1e-5)


def test_angles_are_computed_once_for_the_layers_of_a_pass(monkeypatch):
    """And again for other positions, also where an array of the same size holds them, and for other settings."""
    computed, cos = [], mx.cos
    monkeypatch.setattr(mx, "cos", lambda angles: computed.append(angles.shape) or cos(angles))
    monkeypatch.setattr(rotary, "_newest", {})
    x = mx.random.normal((2, 3, 4, 64), key=mx.random.key(2))
    layers = [SharedRoPE(64) for _ in range(3)]
    for number, offset in enumerate((mx.array([3, 4]), mx.array([4, 5]), 9, 10), start=1):
        found = [layer(x, offset=offset) for layer in layers]
        assert len(computed) == number
        assert all(mx.allclose(y, nn.RoPE(64)(x, offset=offset), atol=1e-5) for y in found)
    layers[0](x[:, :, :2], offset=10)
    SharedRoPE(64, base=77.0)(x, offset=10)
    assert len(computed) == 6
    assert len(rotary._newest) == 2


@pytest.mark.parametrize("x", [mx.zeros((1, 2, 3, 64), mx.bfloat16), mx.zeros((2, 3, 64)), mx.zeros((1, 2, 3, 80))])
def test_what_they_do_not_know_is_left_to_mlx(x, monkeypatch):
    monkeypatch.setattr(rotary, "_rotated", lambda *_: pytest.fail("not left to MLX"))
    assert mx.array_equal(SharedRoPE(64)(x, offset=2), nn.RoPE(64)(x, offset=2))


@pytest.mark.parametrize("family", mostly_slow(sorted(FAMILIES), "llama"))
def test_answers_stay_the_same(family, monkeypatch):
    monkeypatch.setattr(rotary, "_is_faster", lambda: True)
    target, drafter, prompt = tiny_target(family), tiny_drafter(), [5, 6, 7, 8, 9]
    expected = plain_tokens(target, prompt, 30)
    names = target.parameter_names()
    use_where_faster([target.model, drafter])
    assert target.parameter_names() == names
    for model in (target.model, drafter):
        assert any(type(module) is SharedRoPE for module in model.modules())
    for policy in (FixedWidth(4), FixedWidth(9, places=5)):
        assert drafted_tokens(target, drafter, prompt, 30, policy) == expected


@pytest.mark.parametrize("own", [0.5, 1.5])
def test_they_are_used_where_they_are_faster(own, monkeypatch):
    times = iter(t for _ in range(6) for t in (0.0, 1.0, 0.0, own))
    monkeypatch.setattr(rotary.time, "perf_counter", lambda: next(times))
    assert rotary._is_faster() == (own < 1)


def test_they_are_not_used_where_they_cannot_be_compiled(monkeypatch):
    def failing(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(rotary, "_rotated", failing)
    assert not rotary._is_faster()
