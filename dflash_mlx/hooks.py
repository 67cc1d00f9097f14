"""Other behaviour for single instances of a model's modules, for the length of a `with` block.

An instance gets a subclass of its own class; the class itself is never touched, the parameter tree stays as it is, and
nothing is left behind afterwards, also after an error. So one loaded model serves any number of users.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import mlx.nn as nn


@contextmanager
def subclassed(
    modules: Sequence[nn.Module],
    subclass: Callable[[type[nn.Module]], type[nn.Module]],
    *,
    notes: Mapping[str, Sequence[Any]] | None = None,
) -> Iterator[None]:
    """Let these instances be of `subclass(their class)`, which should be cached: a new class each time is slow.

    notes: by name, a value for each module; found in its `__dict__` (not among its parameters) during the block.
    """
    originals = [(module, type(module)) for module in modules]
    try:
        for i, (module, kind) in enumerate(originals):
            for name, values in (notes or {}).items():
                object.__setattr__(module, name, values[i])
            module.__class__ = subclass(kind)
        yield
    finally:
        for module, kind in originals:
            module.__class__ = kind
            for name in notes or {}:
                module.__dict__.pop(name, None)


def means(kind: type[nn.Module], name: str, *functions: Callable[..., Any]) -> bool:
    """Whether the code of a class's `__call__` uses a global name that means one of these functions."""
    call = kind.__call__
    return isinstance(call, FunctionType) and name in call.__code__.co_names and call.__globals__.get(name) in functions


@cache
def renamed(kind: type[nn.Module], name: str, function: Callable[..., Any]) -> type[nn.Module]:
    """A subclass with the same code, in which a global name means another function."""
    call = kind.__call__
    assert isinstance(call, FunctionType)
    own = FunctionType(
        call.__code__, {**call.__globals__, name: function}, call.__name__, call.__defaults__, call.__closure__
    )
    own.__kwdefaults__ = call.__kwdefaults__
    return type(f"Renamed{kind.__name__}", (kind,), {"__call__": own})
