"""Compiled functions where compiling pays."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import mlx.core as mx

T = TypeVar("T")


def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """`function` through mx.compile on a GPU. On a CPU that would call a C++ compiler, for no gain: as it is."""
    wrapped: Any = mx.compile(function) if mx.default_device() == mx.gpu else function
    return cast(Callable[..., T], wrapped)
