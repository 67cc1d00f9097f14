"""CUDA kernels that are compiled once: what MLX looks for, and what is put there."""

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from kernels.cuda_on_cpu import forgotten

from dflash_mlx import runtime
from dflash_mlx.kernels import cuda_modules, few_rows_linear
from dflash_mlx.kernels.cuda_modules import (
    Text,
    compiler_of,
    cuda_kernel,
    included,
    modules_folder,
    provide,
    std_hash,
)
from dflash_mlx.kernels.quantized_rows import product
from dflash_mlx.kernels.rows_attention import on_matrix_units, one_launch
from dflash_mlx.kernels.sources import FOLDER, source
from dflash_mlx.kernels.tree_steps import launches

FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.cu"))
COPY = "uint i = cooperative_groups::this_grid().thread_rank(); if (i < 9216) out[i] = x[i];"
PLAIN = Text("p1", ["x"], ["out"], COPY, "", [(mx.bfloat16, True)], [], [mx.bfloat16])
CONSTANTS = [("T", mx.float16), ("THREADS", 256), ("BRAIN", False)]
SCALED = Text(
    "scaled",
    ["x", "by"],
    ["out", "sums"],
    "use(x_shape[0], x_strides[1], by_shape);",
    "#include <header>\n",
    [(mx.float16, True), (mx.int32, False)],
    CONSTANTS,
    [mx.float16, mx.uint32],
)


@pytest.mark.parametrize("file", FILES)
def test_a_line_stands_for_a_file(file):
    line = included(file)
    [path] = re.findall(r'^#include "(.+)"  // \w+\n$', line)
    assert Path(path).read_text(encoding="utf-8") == source(file)


def test_it_names_what_the_kernel_wants_to_know_of_its_inputs():
    wanted = included("rows_attention/one_launch.cu", ["q", "k", "settings"]).split("// ")[1].split()[1:]
    text = source("rows_attention/one_launch.cu")
    assert {"q_shape", "k_strides"} <= set(wanted)
    assert all(name in text for name in wanted)
    assert not any(name.startswith("settings") for name in wanted)


def test_another_text_has_another_line(monkeypatch):
    before = included("matrix_units.cu")
    monkeypatch.setattr(cuda_modules, "source", lambda file: source(file) + "\n")
    assert included("matrix_units.cu") != before


def test_the_name_of_a_module():
    # That of this kernel in a message of MLX 0.32.4.
    assert PLAIN.module == "custom_kernel_p1_6cefac6e7e014994"
    assert SCALED.module.startswith("custom_kernel_scaled_float16_t_256_f_")
    assert SCALED.module != replace(SCALED, source=SCALED.source + " ").module


def test_the_text_of_a_kernel():
    assert SCALED.after("BEFORE\n", "void f") == (
        "BEFORE\n#include <header>\nvoid f(\n"
        "    const __half* x,\n    const __grid_constant__ Shape x_shape,\n"
        "    const __grid_constant__ Strides x_strides,\n    const int32_t* by,\n"
        "    __half* out,\n    uint32_t* sums) {\n"
        "  using T = __half;\n  constexpr int THREADS = 256;\n  constexpr bool BRAIN = false;\n\n"
        "use(x_shape[0], x_strides[1], by_shape);\n}\n\n} // namespace mlx::core::cu\n"
    )
    assert "utils.cuh" not in SCALED.light


@pytest.mark.skipif(shutil.which("g++") is None, reason="asks GCC's library")
def test_the_hash_is_that_of_gcc(tmp_path):
    program = tmp_path / "hash.cpp"
    program.write_text(
        "#include <cstdio>\n#include <functional>\n#include <string>\n"
        "int main(int n, char** texts) {\n"
        '  for (int i = 1; i < n; i++) std::printf("%zu\\n", std::hash<std::string>{}(texts[i]));\n}\n'
    )
    subprocess.run(["g++", "-o", tmp_path / "hash", program], check=True)
    texts = ["", "a", "1234567", "12345678", "123456789", "ü" * 100]
    told = subprocess.run([tmp_path / "hash", *texts], check=True, capture_output=True, text=True).stdout
    assert [std_hash(text.encode()) for text in texts] == list(map(int, told.split()))


def test_a_kernel_is_put_where_mlx_looks_and_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "new" / "folder"))
    asked = []

    def compiler(text):
        asked.append(text)
        return b"machine code"

    provide(SCALED, compiler)
    provide(SCALED, compiler)
    assert asked == [SCALED.light]
    files = {file.name: file.read_bytes() for file in modules_folder().iterdir()}
    names = b"mlx::core::cu::custom_kernel_scaled_float16_t_256_f\tdflash_kernel\n"
    assert files == {f"{SCALED.module}.ptx": b"machine code", f"{SCALED.module}.txt": names}


def test_what_fails_is_left_to_mlx(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path))
    provide(SCALED, lambda text: None)
    assert list(tmp_path.iterdir()) == []

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as disk:
        disk.setattr("os.replace", full)
        provide(SCALED, lambda text: b"machine code")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/dev/null/no/folder")
    provide(SCALED, lambda text: b"machine code")


def test_where_mlx_looks(monkeypatch):
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/scratch")
    assert str(modules_folder()) == f"/scratch/mlx/{runtime.backend().mlx_version}/ptx"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_each_kind_of_a_kernel_is_provided_once(kind, monkeypatch):
    """And MLX is given the text by whose name it is put there."""
    given, provided = [], []

    def make(**options):
        given.append(options["source"])
        return lambda **call: call["output_dtypes"]

    monkeypatch.setattr(mx.fast, "cuda_kernel", make)
    monkeypatch.setattr(cuda_modules, "backend", lambda: replace(runtime.backend(), kind=kind))
    monkeypatch.setattr(cuda_modules, "_compiler", lambda: bytes)
    monkeypatch.setattr(cuda_modules, "_architecture", lambda: "sm_90a")
    monkeypatch.setattr(cuda_modules, "provide", lambda text, _: provided.append(text))
    launch = cuda_kernel(name="scaled", input_names=["x", "by"], output_names=["out"], file="tree_steps/keep.cu")
    x, by = mx.zeros((2, 3), mx.float16), mx.array(1)
    for dtype in (mx.float16, mx.float16, mx.float32):
        call = {"inputs": [x.astype(dtype), by], "template": CONSTANTS, "output_dtypes": [dtype]}
        assert launch(**call, output_shapes=[(2, 3)]) == [dtype]
    [text] = given
    assert "sm_90a" in text
    expected = [
        Text("scaled", ["x", "by"], ["out"], text, "", ((dtype, True), (mx.int32, False)), tuple(CONSTANTS), (dtype,))
        for dtype in (mx.float16, mx.float32)
    ]
    assert provided == (expected if kind == "cuda" else [])


@pytest.fixture
def nvrtc(monkeypatch):
    """NVIDIA's compiler, which needs no GPU, for an H100."""
    [folder] = pytest.importorskip("nvidia.cu13", reason="needs nvidia-cuda-nvrtc").__path__
    [builtins] = Path(folder, "lib").glob("libnvrtc-builtins.so.*")
    # The compiler looks for it by its name only.
    ctypes.CDLL(str(builtins))
    [library] = Path(folder, "lib").glob("libnvrtc.so.*")
    monkeypatch.setattr(cuda_modules, "_architecture", lambda: "sm_90a")
    return compiler_of(library)


@pytest.fixture
def provided(nvrtc, monkeypatch):
    """The texts of the kernels that were launched, which compute nothing here, and what the compiler made of them."""
    found = []

    def make(**_):
        return lambda **call: list(map(mx.zeros, call["output_shapes"], call["output_dtypes"]))

    monkeypatch.setattr(mx.fast, "cuda_kernel", make)
    for module in (cuda_modules, product):
        monkeypatch.setattr(module, "backend", lambda: replace(runtime.backend(), kind="cuda"))
    monkeypatch.setattr(cuda_modules, "_compiler", lambda: nvrtc)
    monkeypatch.setattr(cuda_modules, "provide", lambda text, compiler: found.append((text, compiler(text.light))))
    # What is launched cannot be written down.
    mx.disable_compile()
    with forgotten(few_rows_linear, launches, on_matrix_units, one_launch, product):
        yield found
    mx.enable_compile()


def launch_all(dtype):
    """Every kernel that is not for Metal."""
    x, weight = mx.zeros((1, 16, 64), dtype), mx.zeros((32, 64), dtype)
    few_rows_linear.multiply(x, [weight])
    few_rows_linear.multiply(x, [weight] * 3)
    few_rows_linear.multiply(x, [mx.zeros((130_000, 64), dtype)])
    few_rows_linear.multiply(mx.zeros((80, 64), dtype), [weight])
    queries, keys = mx.zeros((1, 6, 16, 64), dtype), mx.zeros((1, 3, 100, 64), dtype)
    for attention in (one_launch.attention, on_matrix_units.attention, on_matrix_units.attention_in_parts):
        attention(queries, keys, keys, 0.1, "causal")
    product.multiply(x, *mx.quantize(weight, group_size=64, bits=4), group_size=64, bits=4)
    launches.work(dtype)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_nvidias_compiler_takes_every_kernel(dtype, provided):
    """By the version that MLX has on CUDA: versions differ in what they refuse."""
    launch_all(dtype)
    assert [text.name for text, machine_code in provided if not machine_code] == []
    texts = "".join(text.source + text.header for text, _ in provided)
    assert [file for file in FILES if f"{FOLDER.as_posix()}/{file}" not in texts] == []


def test_the_library_that_is_loaded_compiles(nvrtc):
    compiler = cuda_modules._compiler.__wrapped__()
    assert compiler("__global__ void nothing() {}")
    assert compiler("no kernel") is None
