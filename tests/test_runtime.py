"""What is said about the machine, for machines that are not at hand, and the fast BLAS on this one."""

import os
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx import runtime
from dflash_mlx.errors import UsageError

CPU = runtime.Backend(
    kind="cpu",
    chip="A chip",
    memory_bytes=64 * 2**30,
    mlx_version="0.32.4",
    mlx_lm_version="0.32.2",
    blas="/usr/lib/libopenblas.so.0",
    python="3.11.7",
    os="Linux",
    advice=(),
)


@pytest.fixture
def machine(monkeypatch):
    """Another machine: its platform, processor, macOS version, and what commands print."""

    def pretend(system: str, processor: str, macos: str = "", **output: str) -> None:
        monkeypatch.setattr(sys, "platform", system)
        monkeypatch.setattr(platform, "machine", lambda: processor)
        monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), ""))
        monkeypatch.setattr(runtime, "_output_of", lambda name, *rest: output.get(name.replace("-", "_"), ""))

    return pretend


def test_this_machine():
    found = runtime.backend()
    assert found.kind == ("cpu" if mx.default_device() == mx.cpu else found.kind)
    assert found.kind in ("cpu", "metal", "cuda")
    assert found.memory_bytes > 2**28
    assert found.mlx_version == mx.__version__
    assert found.chip
    assert found.to_json()["kind"] == found.kind


def test_auto_is_float32_on_a_cpu_and_the_models_own_on_a_gpu(monkeypatch):
    monkeypatch.setattr(runtime, "backend", lambda: CPU)
    assert runtime.resolve_dtype("auto", model_dtype=mx.bfloat16) == mx.float32
    assert runtime.resolve_dtype("bfloat16", model_dtype=mx.float16) == mx.bfloat16
    for kind in ("metal", "cuda"):
        monkeypatch.setattr(runtime, "backend", lambda kind=kind: replace(CPU, kind=kind))
        assert runtime.resolve_dtype("auto", model_dtype=mx.float16) == mx.float16
        assert runtime.resolve_dtype("float32", model_dtype=mx.float16) == mx.float32
    with pytest.raises(UsageError, match="int8"):
        runtime.resolve_dtype("int8", model_dtype=mx.float16)


def test_linux_without_openblas_is_told_how_to_get_it(machine):
    machine("linux", "x86_64")
    assert "apt-get install libopenblas0-pthread" in " ".join(runtime._advice(replace(CPU, blas=None)))
    assert runtime._advice(CPU) == ()


def test_an_idle_nvidia_gpu_is_noticed(machine):
    machine("linux", "x86_64", nvidia_smi="GPU 0: NVIDIA H200")
    advice = " ".join(runtime._advice(CPU))
    assert "`pip uninstall mlx-cpu mlx-cuda-13`, then `pip install 'mlx[cuda13]==0.32.4'`" in advice
    assert runtime._advice(replace(CPU, kind="cuda")) == ()


@pytest.mark.parametrize(
    ("processor", "macos", "kind", "chip", "translated", "words"),
    [
        ("arm64", "15.1", "metal", "Apple M4", "0", ""),
        ("arm64", "15.1", "metal", "Apple M1 Pro", "0", "float16"),
        ("arm64", "26.1", "metal", "Apple M5", "0", "macOS 26.2"),
        ("arm64", "26.2", "metal", "Apple M5", "0", ""),
        ("arm64", "13.6", "cpu", "Apple M3", "0", "macOS 14"),
        ("x86_64", "15.1", "cpu", "Apple M2", "1", "translated"),
        ("x86_64", "15.1", "cpu", "Intel", "0", "Intel processor"),
    ],
)
def test_advice_on_a_mac(machine, processor, macos, kind, chip, translated, words):
    machine("darwin", processor, macos, sysctl=translated)
    advice = " ".join(runtime._advice(replace(CPU, kind=kind, chip=chip, blas=None)))
    assert words in advice
    assert bool(advice) == bool(words)


def test_little_memory_and_an_old_mlx(machine):
    machine("linux", "x86_64")
    assert "4-bit" in " ".join(runtime._advice(replace(CPU, memory_bytes=6 * 2**30)))
    assert "older than" in " ".join(runtime._advice(replace(CPU, mlx_version="0.31.9")))
    assert runtime._advice(replace(CPU, mlx_version="0.33.0.dev20260101")) == ()


def test_the_oldest_mlx_is_the_one_in_pyproject():
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert set(re.findall(r'"mlx(?:\[\w+\])?>=([\d.]+)', text)) == {".".join(map(str, runtime.MINIMUM_MLX))}


def test_no_openblas_is_no_error(monkeypatch):
    monkeypatch.setattr(runtime, "_loaded_blas", None)
    monkeypatch.setattr(runtime, "_OPENBLAS", ("/no/such/*/libopenblas.so",))
    monkeypatch.setattr(runtime, "_OPENBLAS_NAMES", ("libno-such-blas.so.0",))
    monkeypatch.delitem(sys.modules, "mlx.core")
    monkeypatch.setattr(sys, "platform", "linux")
    assert runtime.load_fast_blas() is None


@pytest.mark.skipif(runtime._loaded_blas is None, reason="needs Linux with OpenBLAS")
def test_products_go_through_openblas_unless_mlx_came_first():
    def flops(order: str) -> float:
        code = (
            f"{order}\n"
            "import time\n"
            "import mlx.core as mx\n"
            "a, b = mx.ones((64, 512)), mx.ones((512, 512))\n"
            "mx.eval(a, b, a @ b)\n"
            "times = []\n"
            "for _ in range(10):\n"
            "    start = time.perf_counter(); mx.eval(a @ b); times.append(time.perf_counter() - start)\n"
            "print(1 / min(times))"
        )
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    assert flops("import dflash_mlx") > 1.5 * flops("import mlx.core, dflash_mlx")


@pytest.mark.parametrize("own", [None, "8000"])
def test_few_graphs_are_kept_unless_the_user_has_said_how_many(own, monkeypatch):
    monkeypatch.setattr(runtime, "_set_here", set())
    monkeypatch.delenv("MLX_CUDA_GRAPH_CACHE_SIZE", raising=False)
    if own is not None:
        monkeypatch.setenv("MLX_CUDA_GRAPH_CACHE_SIZE", own)
    runtime.set_mlx_defaults()
    assert os.environ["MLX_CUDA_GRAPH_CACHE_SIZE"] == "8000"
    runtime.keep_few_graphs()
    assert os.environ.get("MLX_CUDA_GRAPH_CACHE_SIZE") == own


def test_importing_the_package_imports_nothing_heavy():
    code = "import dflash_mlx, sys; print([m for m in ('mlx.core', 'numpy', 'transformers') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
