"""Other ways to compute attention behind the signature of mlx-lm's."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from dflash_mlx.hooks import means, renamed

# Under which layers know mlx-lm's attention.
NAME = "scaled_dot_product_attention"
Mask = mx.array | str | None
# Takes queries (B, heads, L, head_dim), keys and values, a scale and a mask; gives None for what it was not made for.
Way = Callable[[mx.array, mx.array, mx.array, float, Mask], mx.array | None]


def instead_of_ordinary(way: Way) -> Callable[..., mx.array]:
    """mlx-lm's `scaled_dot_product_attention`, computed by `way` where that fits, and as mlx-lm does elsewhere."""

    @wraps(way)
    def attend(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any,
        scale: float,
        mask: Mask,
        sinks: mx.array | None = None,
    ) -> mx.array:
        special = hasattr(cache, "bits") or sinks is not None
        found = None if special else way(queries, keys, values, scale, mask)
        if found is not None:
            return found
        ordinary: Any = scaled_dot_product_attention  # its annotation leaves "causal" out
        return ordinary(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return attend


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model whose code calls mlx-lm's attention."""
    return [layer for layer in model.modules() if means(type(layer), NAME, scaled_dot_product_attention)]


def set_attention(layers: Sequence[nn.Module], attend: Callable[..., mx.array]) -> None:
    """Have these `attention_layers` call another function with the signature of mlx-lm's."""
    for layer in layers:
        layer.__class__ = renamed(type(layer), NAME, attend)


def as_array(mask: Mask, rows: int, length: int) -> mx.array:
    """Which keys each row sees: boolean, (B or 1, 1, L or 1, S). Raises NotImplementedError for other masks."""
    if mask is None:
        return mx.ones((1, 1, 1, length), dtype=mx.bool_)
    if isinstance(mask, str):
        return (mx.arange(length) <= mx.arange(length - rows, length)[:, None])[None, None]
    if mask.dtype != mx.bool_ or (mask.ndim == 4 and mask.shape[1] != 1):
        raise NotImplementedError("masks other than a boolean one for all heads")
    return mask.reshape(-1, 1, *mask.shape[-2:])
