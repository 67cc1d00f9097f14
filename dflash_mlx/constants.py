"""Arrays that never change: to hand new numbers to a GPU takes as long as several launches."""

from functools import cache

import mlx.core as mx
import numpy as np


@cache
def constant(value: int, dtype: mx.Dtype, shape: tuple[int, ...] = ()) -> mx.array:
    """An array that holds a value everywhere, the same one each time."""
    array = mx.array(np.full(shape, value), dtype=dtype)
    mx.eval(array)
    return array
