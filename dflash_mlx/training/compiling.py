"""Compiled functions where compiling pays."""

from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """`function` through mx.compile on a GPU. On a CPU that would call a C++ compiler, for no gain: as it is."""
    return mx.compile(function) if mx.default_device() == mx.gpu else function
