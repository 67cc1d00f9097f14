"""Energy, where the machine tells it without a password: Apple Silicon, NVIDIA GPUs, and Linux with readable RAPL."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

_RAPL = Path("/sys/class/powercap")
Counter = Callable[[], float]  # joules since some moment


class Energy:
    """Joules of what runs inside `with energy():`. source: in words, what is counted; "" where nothing is."""

    def __init__(self, counter: Counter | None, source: str = "") -> None:
        self._counter, self.source = counter, source
        self.joules: float | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = self._counter() if self._counter else 0.0
        self.joules = None
        yield
        if self._counter:
            # A counter that began anew in between tells nothing.
            spent = self._counter() - before
            self.joules = spent if spent > 0 else None


def open_energy() -> Energy:
    """What this machine has. Nothing is asked for, installed or changed."""
    for attempt in (_apple, _nvidia, _rapl):
        try:
            found = attempt()
        except (OSError, AttributeError, ImportError, RuntimeError, ValueError):
            continue
        if found is not None:
            return found
    return Energy(None)


def _apple() -> Energy | None:
    """The package zeus-apple-silicon: `pip install dflash-on-mlx[energy]`."""
    if sys.platform != "darwin":
        return None
    # By name: the package exists for Macs only.
    monitor = import_module("zeus_apple_silicon").AppleEnergyMonitor()

    def counter() -> float:
        found = monitor.get_cumulative_energy()
        parts = (getattr(found, f"{part}_mj", None) for part in ("cpu_total", "gpu", "dram", "ane"))
        return sum(float(part) for part in parts if part is not None) / 1000

    counter()
    return Energy(counter, "CPU, GPU, memory and neural engine of the chip")


def _nvidia() -> Energy | None:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)):
        return None

    def counter() -> float:
        if library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
            raise RuntimeError("this GPU does not count its energy")
        return millijoules.value / 1000

    counter()
    return Energy(counter, "the first NVIDIA GPU, without the rest of the machine")


def _rapl(folder: Path = _RAPL) -> Energy | None:
    """The packages' counters, which most systems let only root read."""
    zones = sorted(zone / "energy_uj" for zone in folder.glob("intel-rapl:*") if zone.name.count(":") == 1)
    if not zones:
        return None

    def counter() -> float:
        return sum(float(zone.read_text(encoding="ascii")) for zone in zones) / 1e6

    counter()
    return Energy(counter, "the processor's packages (RAPL), other programs included")
