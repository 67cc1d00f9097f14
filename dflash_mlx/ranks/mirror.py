"""One model on several machines: rank 0 decides everything, and the others repeat the work on the target that it does.

Rank 0 runs the whole program: command or server, drafter, policies, sampling. Of that, only the passes of the target
need the other ranks, each of which holds its share of the weights and of the caches. All that happens to the target and
its caches happens in methods that are `mirrored`. When rank 0 calls one, it sends the call to the others, which run the
same method with the same arguments on objects of their own. Nothing else reaches the model (`guard`), so the ranks
cannot decide differently: the others decide nothing.

- **Arguments** are plain values, other mirrored objects, which go by number, and arrays of integers: the tokens of a
  block, and where rows begin. The values of arrays stay on the device. They reach the other ranks by one sum over all
  ranks, so rank 0 launches rounds ahead as ever. All ranks feed the tokens of rank 0, even if they round differently.
- **Order.** The operations that wait for all ranks carry no names: every rank has to launch the same ones in the same
  order. So before a call ends, all ranks launch what it returned and the caches it has changed, on the stream of one
  thread, and `Target.drain` waits for it at the end of the answers, after which another thread may go on.
- **Errors.** After an error in a mirrored call the ranks may be out of step, and nothing more can be computed.
"""

import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.errors import DFlashError, GroupError, UsageError
from dflash_mlx.ranks.group import Group
from dflash_mlx.runtime import free_unused_memory

P = ParamSpec("P")
R = TypeVar("R")
_METHODS: dict[str, Callable[..., Any]] = {}
# Of the arrays that calls take.
_DTYPES = {str(dtype): dtype for dtype in (mx.bool_, mx.int32, mx.int64, mx.uint32)}
_LEADER = "_dflash_leader"


class Mirrored:
    """An object of which each rank has its own. `leader` is set where rank 0's calls are to be sent."""

    leader: "Leader | None" = None
    number: int | None = None

    def arrays(self) -> list[mx.array]:
        """What it holds that a mirrored method may have changed."""
        return []


def mirrored(method: Callable[P, R]) -> Callable[P, R]:
    """A method of a `Mirrored` object that all ranks run, each on its own object; only rank 0 has use for the result.

    Where the target is on one machine, it is an ordinary method.
    """
    name = method.__qualname__
    _METHODS[name] = method

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        if owner.leader is None:
            return method(*args, **kwargs)
        result: R = owner.leader.call(name, args, kwargs)
        return result

    return call


class Leader:
    """Rank 0's side: sends each mirrored call, then makes it like the others, from the same message."""

    def __init__(self, group: Group, root: Mirrored) -> None:
        self.group = group
        self._objects: weakref.WeakValueDictionary[int, Mirrored] = weakref.WeakValueDictionary()
        self._last, self._dropped = -1, list[int]()
        # Held during a call, in which further ones are made directly.
        self._calls, self._inside = threading.RLock(), False
        self._error: Exception | None = None
        self._own(root)

    @property
    def is_calling(self) -> bool:
        return self._inside

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with self._calls:
            if self._inside:
                return _METHODS[name](*args, **kwargs)
            if self._error is not None:
                raise GroupError(
                    f"the machines are out of step after an error ({self._error}). Start them again."
                ) from self._error
            with _uninterrupted():
                return self._send_and_run(name, args, kwargs)

    def _send_and_run(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        arrays: list[mx.array] = []
        dropped, self._dropped = self._dropped, []
        message = {
            "call": name,
            "args": [_encoded(value, arrays) for value in args],
            "kwargs": {key: _encoded(value, arrays) for key, value in kwargs.items()},
            "arrays": [list(array.shape) for array in arrays],
            "dropped": dropped,
        }
        self.group.send(message)
        self._inside = True
        try:
            result, made = run(self.group, message, self._objects.__getitem__, arrays)
            for new in made:
                self._own(new)
        except Exception as error:
            self._error = error
            self.group.wait_for_news(error)
            raise
        finally:
            self._inside = False
        return result

    def _own(self, new: Mirrored) -> None:
        """Number an object, as all ranks do, and let the others forget it when it is gone here."""
        self._last += 1
        new.leader, new.number = self, self._last
        self._objects[self._last] = new
        weakref.finalize(new, self._dropped_number, self._last).atexit = False

    def _dropped_number(self, number: int) -> None:
        self._dropped.append(number)


def follow(group: Group, root: Mirrored) -> NoReturn:
    """The other ranks' side: make the calls that rank 0 sends, until it ends (which a channel notices)."""
    objects: dict[int, Mirrored] = {0: root}
    last = 0
    while True:
        message = group.channels[0].receive()
        for number in message["dropped"]:
            del objects[number]
        if message["dropped"]:
            free_unused_memory()
        try:
            _, made = run(group, message, objects.__getitem__, None)
        except Exception as error:
            group.fail(str(error) if isinstance(error, DFlashError) else f"{type(error).__name__}: {error}")
        for new in made:
            last += 1
            new.number, objects[last] = last, new


def run(
    group: Group, message: dict[str, Any], find: Callable[[int], Mirrored], arrays: Sequence[mx.array] | None
) -> tuple[Any, list[Mirrored]]:
    """Make a call; returns its result and the new mirrored objects in it. arrays: None where rank 0 has them."""
    shared = _shared(group, message["arrays"], arrays)
    args = [_decoded(value, find, shared) for value in message["args"]]
    kwargs = {key: _decoded(value, find, shared) for key, value in message["kwargs"].items()}
    result = _METHODS[message["call"]](*args, **kwargs)
    parts = list(result) if isinstance(result, tuple) else [result]
    held = [part.arrays() for part in [*args, *parts] if isinstance(part, Mirrored)]
    mx.async_eval([part for part in parts if isinstance(part, mx.array)], held)
    return result, [part for part in parts if isinstance(part, Mirrored) and part.number is None]


def _shared(group: Group, shapes: list[list[int]], arrays: Sequence[mx.array] | None) -> list[mx.array]:
    """Rank 0's arrays on every rank, as int32: one sum, to which the other ranks add nothing."""
    if not shapes:
        return []
    if arrays is None:
        arrays = [mx.zeros(shape, dtype=mx.int32) for shape in shapes]
    summed = mx.distributed.all_sum(
        mx.concatenate([array.astype(mx.int32).flatten() for array in arrays]), group=group.ranks
    )
    found, start = [], 0
    for shape, array in zip(shapes, arrays, strict=True):
        found.append(summed[start : start + array.size].reshape(shape))
        start += array.size
    return found


def _encoded(value: Any, arrays: list[mx.array]) -> Any:
    """A value as JSON; arrays are put aside, into `arrays`."""
    if isinstance(value, mx.array):
        assert str(value.dtype) in _DTYPES, f"cannot send {value.dtype}"
        arrays.append(value)
        return {"array": len(arrays) - 1, "dtype": str(value.dtype)}
    if isinstance(value, Mirrored):
        assert value.number is not None, f"a {type(value).__name__} that the other ranks do not have"
        return {"object": value.number}
    if isinstance(value, list | tuple | range):
        return {"list": [_encoded(item, arrays) for item in value]}
    assert value is None or isinstance(value, str | int | float), f"cannot send a {type(value).__name__}"
    return value


def _decoded(value: Any, find: Callable[[int], Mirrored], arrays: Sequence[mx.array]) -> Any:
    if not isinstance(value, dict):
        return value
    if "array" in value:
        return arrays[value["array"]].astype(_DTYPES[value["dtype"]])
    if "object" in value:
        return find(value["object"])
    return [_decoded(item, find, arrays) for item in value["list"]]


def guard(model: nn.Module, leader: Leader) -> None:
    """Let this instance of a model be run by mirrored methods only: anything else would wait for the others forever."""
    object.__setattr__(model, _LEADER, leader)
    model.__class__ = _guarded(type(model))


@cache
def _guarded(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.__dict__[_LEADER].is_calling:
            raise UsageError(
                "mlx-lm's own decoding needs the whole model on one machine; start this command there, without launch."
            )
        return kind.__call__(self, *args, **kwargs)

    return type(f"Guarded{kind.__name__}", (kind,), {"__call__": call})


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until a call is made as a whole: the other ranks have begun it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed:
            signal.raise_signal(signal.SIGINT)
