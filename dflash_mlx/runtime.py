"""Facts about this machine: the backend MLX runs on, its memory, safe dtypes, and the fast BLAS on Linux.

Every start of the command line imports this module, so what takes milliseconds to import is imported where it is used.
"""

import _ctypes
import ctypes
import glob
import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    import mlx.core as mx

MINIMUM_MLX = (0, 32, 2)  # as in pyproject.toml
DTYPES = ("auto", "float32", "bfloat16", "float16")
_OPENBLAS = (
    "/usr/lib/*-linux-gnu*/openblas-pthread/libblas.so.3",
    "/usr/lib/*-linux-gnu*/openblas-openmp/libblas.so.3",
    "/usr/lib/*-linux-gnu*/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib/libopenblas.so",
)
_OPENBLAS_NAMES = ("libopenblasp.so.0", "libopenblas.so.0")  # wherever the system's linker finds them
# OpenBLAS's names for x86 processors that are older than AVX2. A processor that it does not know counts as a Prescott.
_BEFORE_AVX2 = {
    *("Katmai", "Coppermine", "Northwood", "Prescott", "Banias", "Atom", "Core2", "Penryn", "Dunnington", "Nehalem"),
    *("Sandybridge", "Athlon", "Opteron", "Opteron_SSE3", "Barcelona", "Bobcat", "Bulldozer", "Piledriver", "Nano"),
}
# What the kernels for newer processors need, the fastest first; names as in /proc/cpuinfo.
_NEWER_KERNELS = {"SkylakeX": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "Haswell": {"avx2", "fma"}}
_loaded_blas: str | None = None


@dataclass(frozen=True)
class Backend:
    """What MLX runs on here. `advice` lists what would make it faster, a sentence each."""

    kind: Literal["metal", "cuda", "cpu"]
    chip: str
    memory_bytes: int
    mlx_version: str
    mlx_lm_version: str
    blas: str | None
    python: str
    os: str
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load_fast_blas() -> str | None:
    """Make MLX use OpenBLAS on a Linux CPU, if it is installed; returns its path and for which processors it computes.

    MLX's Linux CPU wheel links the reference BLAS, whose float32 products are 5 to 30 times slower. A library loaded
    globally before MLX takes its place. Does nothing once MLX is imported.
    """
    global _loaded_blas
    if _loaded_blas is None and sys.platform == "linux" and "mlx.core" not in sys.modules:
        paths = [found for pattern in _OPENBLAS for found in sorted(glob.glob(pattern))]
        for path in (*paths, *_OPENBLAS_NAMES):
            try:
                kernels = _load_openblas(path)
            except OSError:
                continue
            _loaded_blas = f"{path} ({kernels})" if kernels else path
            break
    return _loaded_blas


def _load_openblas(path: str) -> str:
    """Load it for the whole process, and return the processors that its kernels are for. Raises OSError.

    A processor newer than the library counts as one of 2004 there: on an Intel Xeon of 2023 OpenBLAS 0.3.21 takes 1.6
    times as long for 16 rows as with the kernels for SkylakeX. It chooses when it is loaded, so it is loaded again.
    """
    library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    better = better_kernels(_kernels_of(library), cpu_flags())
    if better and "OPENBLAS_CORETYPE" not in os.environ:
        _ctypes.dlclose(library._handle)
        # Only for this library: others, such as numpy's own OpenBLAS, choose for themselves.
        os.environ["OPENBLAS_CORETYPE"] = better
        try:
            library = ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        finally:
            del os.environ["OPENBLAS_CORETYPE"]
    return _kernels_of(library)


def _kernels_of(library: ctypes.CDLL) -> str:
    """What OpenBLAS calls the processors that it computes for here; "" if it does not say."""
    try:
        name = library.openblas_get_corename
    except AttributeError:
        return ""
    name.restype = ctypes.c_char_p
    return (name() or b"").decode()


def better_kernels(chosen: str, flags: set[str]) -> str | None:
    """Kernels of OpenBLAS that are faster than the `chosen` ones, for a processor with these flags; None if it chose
    well."""
    if chosen not in _BEFORE_AVX2:
        return None
    return next((name for name, needed in _NEWER_KERNELS.items() if needed <= flags), None)


def cpu_flags() -> set[str]:
    """What the processor can do, by /proc/cpuinfo; empty where there is no such list."""
    return set(_cpuinfo("flags").split())


def _cpuinfo(key: str) -> str:
    """The first value of a key in Linux's /proc/cpuinfo, or ""."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == key:
                    return value.strip()
    except OSError:
        pass
    return ""


# What MLX reads from the environment when it is imported, and why; the user's own settings come first.
MLX_SETTINGS = {
    # cuDNN plans anew for every key length when a call has more than one query row, as each round does: a round of the
    # demo pair took 41 to 55 ms with it on an H200, and 5 to 8 ms without.
    "MLX_CUDA_USE_CUDNN_SDPA": "0",
    # MLX keeps few compiled CUDA graphs by default, and rounds of different shapes push each other's out: 10.6 instead
    # of 7.1 ms for a round of 15 drafts of the demo pair.
    "MLX_CUDA_GRAPH_CACHE_SIZE": "8000",
    # float32 products in TF32 (CUDA) or on the matrix units of an M5 have 10 bits: rows then depend on how many are
    # multiplied at once, and float32 would no longer mean that drafting changes no token.
    "MLX_ENABLE_TF32": "0",
}


# Those that the user had not set.
_set_here: set[str] = set()


def set_mlx_defaults() -> None:
    """Give MLX the settings that this project needs (`MLX_SETTINGS`). Has no effect once MLX is imported."""
    for name, value in MLX_SETTINGS.items():
        if name not in os.environ:
            os.environ[name] = value
            _set_here.add(name)


def keep_few_graphs() -> None:
    """Let MLX keep as few compiled CUDA graphs as it does by itself, unless the user has said how many.

    For work whose shapes hardly ever come again, such as training: what MLX keeps of freed arrays leaves little memory,
    and on an H200 thousands of graphs found no room beside it. Has no effect once MLX has used a GPU.
    """
    if "MLX_CUDA_GRAPH_CACHE_SIZE" in _set_here:
        os.environ.pop("MLX_CUDA_GRAPH_CACHE_SIZE", None)


@cache
def backend() -> Backend:
    """Look at the machine, once. Imports MLX."""
    import platform
    from importlib import metadata

    import mlx.core as mx

    kind: Literal["metal", "cuda", "cpu"] = "cpu"
    if mx.default_device() == mx.gpu:
        kind = "metal" if mx.metal.is_available() else "cuda"
    chip = _chip_name() if kind == "cpu" else str(mx.device_info().get("device_name", "unknown"))
    facts = Backend(
        kind=kind,
        chip=chip,
        memory_bytes=_memory_bytes(kind),
        mlx_version=metadata.version("mlx"),
        mlx_lm_version=metadata.version("mlx-lm"),
        blas=_loaded_blas,
        python=platform.python_version(),
        os=_os_name(),
        advice=(),
    )
    return replace(facts, advice=_advice(facts))


def free_unused_memory() -> None:
    """Let MLX give back the memory of arrays that are gone.

    On a CPU it keeps no more than 32 MB of it anyway, and clearing waits for all that was launched, while no other
    thread of Python's can run (seen with MLX 0.32.4).
    """
    import mlx.core as mx

    if backend().kind != "cpu":
        mx.clear_cache()


def resolve_dtype(name: str, *, model_dtype: "mx.Dtype") -> "mx.Dtype":
    """The dtype to compute in. "auto" is float32 on a CPU and the model's own on a GPU. Raises UsageError."""
    import mlx.core as mx

    if name not in DTYPES:
        raise UsageError(f"dtype should be one of {', '.join(DTYPES)}; got {name!r}.")
    if name == "auto":
        return mx.float32 if backend().kind == "cpu" else model_dtype
    return {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}[name]


def lacks_bfloat16() -> bool:
    """Whether the GPU only imitates bfloat16: those of M1 and M2 chips convert at each step."""
    machine = backend()
    return machine.kind == "metal" and machine.chip.startswith(("Apple M1", "Apple M2"))


def total_memory_bytes() -> int:
    """Physical memory of the machine, without importing MLX."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_bytes(kind: str) -> int:
    import mlx.core as mx

    if kind == "cuda":
        # Named differently from one MLX version to the next.
        info = mx.device_info()
        for key in ("total_memory", "memory_size"):
            if key in info:
                return int(info[key])
    return total_memory_bytes()


def _chip_name() -> str:
    import platform

    if sys.platform == "darwin":
        return _output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.processor()
    if name := _cpuinfo("model name"):
        return name
    # The kernel of most arm64 machines names no model; lscpu knows the cores by their numbers.
    for line in _output_of("lscpu").splitlines():
        if line.startswith("Model name:"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _os_name() -> str:
    import platform

    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]} ({platform.machine()})"
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        name = "Linux"
    return f"{name} ({platform.machine()})"


def _advice(facts: Backend) -> tuple[str, ...]:
    """What would make this machine faster, or keep it from failing."""
    advice = []
    if sys.platform == "linux" and facts.kind == "cpu":
        advice += _linux_advice(facts)
    if sys.platform == "darwin":
        advice += _mac_advice(facts)
    if _version(facts.mlx_version) < MINIMUM_MLX:
        wanted = ".".join(map(str, MINIMUM_MLX))
        advice.append(f"MLX {facts.mlx_version} is older than {wanted}: `pip install --upgrade mlx mlx-lm`")
    if facts.memory_bytes < 8e9:
        advice.append(
            f"{facts.memory_bytes / 2**30:.0f} GiB of memory suit models up to about 4 GB on disk: take 4-bit models, "
            "and close other programs"
        )
    return tuple(advice)


def _linux_advice(facts: Backend) -> list[str]:
    advice = []
    if facts.blas is None:
        advice.append(
            "install OpenBLAS; float32 products become 5 to 30 times faster: "
            "`sudo apt-get install libopenblas0-pthread` (Fedora: `sudo dnf install openblas-threads`)"
        )
    if _output_of("nvidia-smi", "-L"):
        # The CPU's and the GPU's build of MLX are one file in two packages: it goes with the first that is removed.
        advice.append(
            "this machine has an NVIDIA GPU and MLX was installed for the CPU: `pip uninstall mlx-cpu mlx-cuda-13`, "
            f"then `pip install 'mlx[cuda13]=={facts.mlx_version}'`"
        )
    return advice


def _mac_advice(facts: Backend) -> list[str]:
    import platform

    if platform.machine() != "arm64":
        if _output_of("sysctl", "-n", "sysctl.proc_translated") == "1":
            return ["this Python was built for Intel and runs translated: install one for Apple Silicon (arm64)"]
        return ["MLX needs a Mac with Apple Silicon; this one has an Intel processor"]
    advice = []
    if facts.kind == "cpu":
        advice.append("MLX finds no Metal device: it needs macOS 14 or newer, and no virtual machine")
    if facts.chip.startswith(("Apple M1", "Apple M2")):
        advice.append("this chip has no native bfloat16: --dtype float16 can be faster (the drafter never uses it)")
    if facts.chip.startswith("Apple M5") and _version(platform.mac_ver()[0]) < (26, 2):
        advice.append("macOS 26.2 or newer lets MLX use this chip's neural accelerators, which makes prompts faster")
    return advice


def _version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.32.4.dev1" -> (0, 32, 4)."""
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def _output_of(*command: str) -> str:
    """A short command's output, or "" when it cannot be run."""
    import subprocess

    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
