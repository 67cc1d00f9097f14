"""Recurrent layers whose rows come out the same, bit for bit, however many tokens are fed at once.

Of these layers (GatedDeltaNet, short convolutions) the projections are computed in blocks, like all others (layers.py).
Their recurrence over time goes from token to token in mlx-lm already. What is left is the convolution, for which MLX
chooses a way by its shape: here it adds up products of the same numbers in the same order.
"""

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.caches.tree_recurrence import RECURRENCE
from dflash_mlx.hooks import renamed


@cache
def exact_convolution(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass that adds up the products of a token with those before it in the order of the positions."""

    def call(self: Any, x: mx.array) -> mx.array:
        """x (B, L + K - 1, C) -> (B, L, C)."""
        weight, wide = self["weight"][..., 0].T.astype(mx.float32), x.astype(mx.float32)
        count = x.shape[1] - len(weight) + 1
        out = wide[:, :count] * weight[0]
        for place in range(1, len(weight)):
            out = out + wide[:, place : place + count] * weight[place]
        return (out + self["bias"] if "bias" in self else out).astype(x.dtype)

    return type(f"Exact{kind.__name__}", (kind,), {"__call__": call})


def without_recurrence(kind: type[nn.Module]) -> type[nn.Module]:
    """A layer that goes through no tokens; what it gives has the right shapes."""
    return renamed(kind, RECURRENCE, _nothing)


def _nothing(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,  # noqa: N803  mlx-lm's name
    dt_bias: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    **_: Any,
) -> tuple[mx.array, mx.array]:
    gates = a.reshape(*b.shape, -1)[..., :1] + b[..., None]
    return v + q[:, :, :1, :1] + k[:, :, :1, :1] + gates, state
