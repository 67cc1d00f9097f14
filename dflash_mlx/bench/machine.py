"""How hot the machine is, and how fast its memory is."""

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import mlx.core as mx

Heat = Literal["nominal", "fair", "serious", "critical"]
HOT: tuple[Heat, ...] = ("serious", "critical")
_STATES: tuple[Heat, ...] = ("nominal", "fair", "serious", "critical")
_LONGEST_WAIT = 60.0  # seconds before a run, for a machine that is hot
_THERMAL = Path("/sys/class/thermal")


def thermal_state() -> Heat | None:
    """How hot the machine says it is; None where the system does not tell."""
    return _mac_state() if sys.platform == "darwin" else _linux_state(_THERMAL)


def _mac_state() -> Heat | None:
    """NSProcessInfo.thermalState, asked through the Objective-C runtime."""
    try:
        ctypes.CDLL("/System/Library/Frameworks/Foundation.framework/Foundation")
        objc = ctypes.CDLL("/usr/lib/libobjc.dylib")
        objc.objc_getClass.restype = objc.sel_registerName.restype = ctypes.c_void_p
        objc.objc_getClass.argtypes = objc.sel_registerName.argtypes = [ctypes.c_char_p]
        pointer, number = (
            ctypes.CFUNCTYPE(kind, ctypes.c_void_p, ctypes.c_void_p)(("objc_msgSend", objc))
            for kind in (ctypes.c_void_p, ctypes.c_long)
        )
        info = pointer(objc.objc_getClass(b"NSProcessInfo"), objc.sel_registerName(b"processInfo"))
        return _STATES[number(info, objc.sel_registerName(b"thermalState"))]
    except (OSError, AttributeError, IndexError):
        return None


def _linux_state(folder: Path) -> Heat | None:
    """From the zones that name a temperature at which the kernel slows the processor down, or switches it off."""
    states: list[Heat] = []
    for zone in sorted(folder.glob("thermal_zone*")):
        now = _number(zone / "temp")
        for kind in sorted(zone.glob("trip_point_*_type")):
            limit = _number(kind.with_name(kind.name.replace("_type", "_temp")))
            word = _text(kind)
            if now is None or not limit or limit <= 0:
                continue
            if word in ("passive", "hot", "critical"):
                states.append("critical" if now >= limit else "fair" if now >= limit - 10_000 else "nominal")
    return max(states, key=_STATES.index) if states else None


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def cool_down(
    state: Callable[[], Heat | None] = thermal_state,
    *,
    longest: float = _LONGEST_WAIT,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Wait while the machine is hot, `longest` seconds at the most; returns how many it were."""
    started = clock()
    while state() in HOT and clock() - started < longest:
        sleep(1.0)
    return clock() - started


def memory_bandwidth(*, megabytes: int = 256, rounds: int = 5) -> float:
    """Bytes a second that a product of a large matrix and a vector reads: what decoding a token does, without the rest.

    The best of some rounds.
    """
    dtype = mx.float32 if mx.default_device() == mx.cpu else mx.float16
    columns = 4096
    rows = megabytes * 2**20 // (columns * dtype.size)
    matrix, vector = mx.ones((rows, columns), dtype), mx.ones((columns,), dtype)
    mx.eval(matrix, vector)
    best = float("inf")
    for _ in range(1 + rounds):
        started = time.perf_counter()
        mx.eval(matrix @ vector)
        best = min(best, time.perf_counter() - started)
    return float(matrix.nbytes) / best
