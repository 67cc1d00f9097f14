"""Yarn where its ramp has no length: the other options are compared with the official drafters (test_official.py)."""

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.rope import YarnRope

SIZE, THETA, FACTOR = 32, 10_000.0, 4.0


def test_a_ramp_that_begins_where_it_ends_is_a_step():
    """Some ten turns within 64 positions are what the very first dimension makes: all others are slower."""
    turns = 10.2
    # The dimension that turns so often, by the paper's formula, is just below 0, where both ends are rounded to.
    dimension = SIZE * np.log(64 / (turns * 2 * np.pi)) / (2 * np.log(THETA))
    assert -0.01 < dimension < 0
    fields = {"original_max_position_embeddings": 64, "factor": FACTOR, "beta_fast": turns, "beta_slow": turns}
    rope = YarnRope(fields | {"attention_factor": 1.0}, THETA, SIZE, 256)
    half = np.arange(SIZE // 2)
    frequencies = THETA ** (-2 * half / SIZE) / np.where(half == 0, 1, FACTOR)
    x = np.random.default_rng(0).normal(size=(SIZE,))
    angles = 7 * frequencies
    first, second = x[: SIZE // 2], x[SIZE // 2 :]
    expected = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    found = rope(mx.array(x, dtype=mx.float32)[None, None, None], offset=7)
    np.testing.assert_allclose(np.array(found)[0, 0, 0], np.concatenate(expected), atol=1e-5)
