"""What a row sees, as the kernels for attention are told."""

from functools import cache

import mlx.core as mx

from dflash_mlx.kernels.attention import Mask

# Everything, what comes before it, or what a mask says.
_ALL, CAUSAL, MASK = 0, 1, 2
# One kernel serves all of these: compiling one takes seconds on CUDA.
KINDS = [("CAUSAL", CAUSAL), ("MASK", MASK)]


def settings_and_mask(scale: float, mask: Mask) -> tuple[mx.array, mx.array]:
    """The scale and the kind of mask, float32 (2,), and the mask, or what stands for it where there is none."""
    if isinstance(mask, mx.array):
        return _settings(scale, MASK)[0], mask
    return _settings(scale, _ALL if mask is None else CAUSAL)


@cache
def _settings(scale: float, kind: int) -> tuple[mx.array, mx.array]:
    settings, no_mask = mx.array([scale, kind], dtype=mx.float32), mx.ones((1, 1, 1, 1), dtype=mx.bool_)
    mx.eval(settings, no_mask)
    return settings, no_mask
