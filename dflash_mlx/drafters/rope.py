"""Rotary position embeddings of drafters, as Transformers computes them for a Qwen3 layer.

mlx-lm's classes serve for all but yarn: theirs knows neither `attention_factor` nor `truncate`, and takes a missing
`mscale_all_dim` for a zero.
"""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import initialize_rope

from dflash_mlx.drafters.config import Rope


def make_rope(rope: Rope, head_dim: int, max_position_embeddings: int) -> nn.Module:
    """A module that rotates x (..., L, head_dim) from position `offset` on."""
    kind = (rope.scaling or {}).get("rope_type") or (rope.scaling or {}).get("type")
    if kind == "yarn":
        assert rope.scaling is not None
        return YarnRope(rope.scaling, rope.theta, head_dim, max_position_embeddings)
    return initialize_rope(
        head_dim,
        rope.theta,
        traditional=False,
        scaling_config=rope.scaling,
        max_position_embeddings=max_position_embeddings,
    )


class YarnRope(nn.Module):
    """Yarn (arXiv 2309.00071, section 3.4): slow rotations are stretched, fast ones are not, and all is made larger."""

    def __init__(self, fields: dict[str, Any], theta: float, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__()
        original = int(fields.get("original_max_position_embeddings") or max_position_embeddings)
        factor = float(fields.get("factor") or max_position_embeddings / original)
        self.head_dim = head_dim
        self.attention_factor = _attention_factor(fields, factor)

        def dimension(rotations: float) -> float:
            """The dimension that turns so many times within the original context."""
            return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dimension(fields.get("beta_fast") or 32), dimension(fields.get("beta_slow") or 1)
        if fields.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        half = np.arange(head_dim // 2)
        stretched = np.clip((half - low) / (high - low if high != low else 0.001), 0, 1)
        period = theta ** (2 * half / head_dim)
        self._periods = mx.array((1 / (stretched / (factor * period) + (1 - stretched) / period)).astype(np.float32))

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if self.attention_factor != 1.0:
            x = x * self.attention_factor
        return mx.fast.rope(
            x, self.head_dim, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods
        )


def _attention_factor(fields: dict[str, Any], factor: float) -> float:
    """What yarn multiplies queries and keys by."""
    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = fields.get("mscale"), fields.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)
