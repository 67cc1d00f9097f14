"""Keeping a model's memory wired on a Mac while anything is being generated."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import mlx.nn as nn
from mlx_lm.generate import wired_limit

_lock = threading.Lock()
_users = 0
_held = ExitStack()


@contextmanager
def wired(model: nn.Module) -> Iterator[None]:
    """mlx-lm's `wired_limit` for answers that run interleaved: the first one sets it, the last one puts it back.

    Each answer setting and restoring it on its own would restore it under another one's feet.
    """
    global _users
    with _lock:
        if _users == 0:
            _held.enter_context(wired_limit(model))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _held.close()
