"""A stand-in for `mx.fast.cuda_kernel` that compiles a kernel's source with g++ and runs it on the CPU.

It says whether the source computes the right thing. What a GPU makes of it (speed, its compiler) it cannot say.
"""

import contextlib
import ctypes
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

HEADER = Path(__file__).with_suffix(".hpp")
HEADERS = HEADER.read_text() + (HEADER.parents[1] / "metal" / "short_numbers.hpp").read_text()
TYPES = {
    mx.float32: "float",
    mx.float16: "float16",
    mx.bfloat16: "bfloat16",
    mx.bool_: "bool",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
}

# Fortified jumps would not go from one thread's stack to another's.
COMPILER = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-fPIC"]

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="runs kernels with g++ on Linux"
)


def kernels_folder(tmp_path_factory):
    """A folder for what is compiled, the same for all tests of a process."""
    folder = tmp_path_factory.getbasetemp() / "kernels"
    folder.mkdir(exist_ok=True)
    return folder


@contextlib.contextmanager
def kernel_on_cpu(module, note, *, folder, monkeypatch):
    """Has a module's kernels run on the CPU, whose makers it remembers; gives `note(inputs)` of each launch."""
    noted = []

    def make(**options):
        kernel = CudaKernel(folder, **options)

        def launch(**call):
            noted.append(note(call["inputs"]))
            return kernel(**call)

        return launch

    monkeypatch.setattr(mx.fast, "cuda_kernel", make)
    with forgotten(module):
        yield noted


@contextlib.contextmanager
def forgotten(*modules):
    """Has kernels that these modules remember made anew, and once more after that."""
    makers = [made for module in modules for made in vars(module).values() if hasattr(made, "cache_clear")]
    for maker in makers:
        maker.cache_clear()
    yield
    for maker in makers:
        maker.cache_clear()


class CudaKernel:
    """Takes what `mx.fast.cuda_kernel` takes; inputs may also be numpy arrays, of any strides."""

    def __init__(
        self,
        folder,
        *,
        name,
        input_names,
        output_names,
        source,
        header="",
        ensure_row_contiguous=True,
        shared_memory=0,
    ):
        # A header has what the GPU does itself: cuda_on_cpu.hpp has its own of that.
        self.contiguous, self.shared_memory = ensure_row_contiguous, shared_memory
        self.folder, self.name, self.source = folder, name, source
        self.input_names, self.output_names = input_names, output_names

    def __call__(self, *, inputs, template, grid, threadgroup, output_shapes, output_dtypes):
        dtypes = [TYPES[mx.array(a.flat[:1]).dtype if isinstance(a, np.ndarray) else a.dtype] for a in inputs]
        arrays = [a if isinstance(a, np.ndarray) else to_numpy(a) for a in inputs]
        if self.contiguous:
            arrays = [np.ascontiguousarray(a) for a in arrays]
        outputs = [np.zeros(shape, storage(dtype)) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        run = self._compile(dtypes, [TYPES[dtype] for dtype in output_dtypes], template)
        data = (ctypes.c_void_p * 40)(*[a.ctypes.data for a in [*arrays, *outputs]])
        shapes = np.zeros((40, 8), np.int32)
        strides = np.zeros((40, 8), np.int64)
        for i, array in enumerate(arrays):
            shapes[i, : array.ndim] = array.shape
            strides[i, : array.ndim] = [step // array.itemsize for step in array.strides]
        blocks = (ctypes.c_int * 3)(*[-(-a // b) for a, b in zip(grid, threadgroup, strict=True)])
        assert threadgroup[1:] == (1, 1)
        pointers = shapes.ctypes.data_as(ctypes.c_void_p), strides.ctypes.data_as(ctypes.c_void_p)
        problem = run(data, *pointers, blocks, threadgroup[0], self.shared_memory)
        assert problem is None, problem.decode()
        return [to_mlx(a, dtype) for a, dtype in zip(outputs, output_dtypes, strict=True)]

    def _compile(self, dtypes, output_dtypes, template):
        parameters, arguments = [], []
        for i, (name, dtype) in enumerate(zip(self.input_names, dtypes, strict=True)):
            parameters.append(f"const {dtype}* {name}")
            arguments.append(f"static_cast<const {dtype}*>(data[{i}])")
            for kind in ("Shape", "Strides"):
                part = kind.lower()
                if f"{name}_{part}" in self.source:
                    parameters.append(f"const {kind} {name}_{part}")
                    arguments.append(f"{part}[{i}]")
        for i, (name, dtype) in enumerate(zip(self.output_names, output_dtypes, strict=True), start=len(dtypes)):
            parameters.append(f"{dtype}* {name}")
            arguments.append(f"static_cast<{dtype}*>(data[{i}])")
        constants = [
            f"using {name} = {TYPES[value]};"
            if isinstance(value, mx.Dtype)
            else f"constexpr int {name} = {int(value)};"
            for name, value in template
        ]
        text = "\n".join(
            [
                f'#include "{HEADER.name}"',
                f"static void kernel({', '.join(parameters)}) {{",
                *constants,
                self.source,
                "}",
                'extern "C" const char* run(',
                "    void** data, Shape* shape, Strides* strides, int (&blocks)[3], int threads, int memory) {",
                f"  body = [=] {{ kernel({', '.join(arguments)}); }};",
                "  return run_blocks(blocks, threads, memory);",
                "}",
            ]
        )
        library = self.folder / f"{self.name}-{hashlib.sha256((text + HEADERS).encode()).hexdigest()[:16]}.so"
        if not library.exists():
            source = library.with_suffix(".cpp")
            source.write_text(text)
            compile_header(self.folder)
            subprocess.run([*COMPILER, "-shared", "-I", self.folder, "-o", library, source], check=True)
        run = ctypes.CDLL(str(library)).run
        run.restype = ctypes.c_char_p
        return run


def compile_header(folder):
    """Compile what every kernel includes, once for all in this folder: it takes g++ as long as the kernel itself."""
    header = folder / HEADER.name
    if not header.exists():
        subprocess.run([*COMPILER, "-x", "c++-header", "-o", f"{header}.gch", HEADER], check=True)
        header.write_text(f'#include "{HEADER}"\n')  # for a compiler that does not take the other one


def storage(dtype):
    """numpy has no bfloat16: its bits are kept in uint16."""
    return {
        mx.float32: np.float32,
        mx.float16: np.float16,
        mx.bfloat16: np.uint16,
        mx.bool_: np.bool_,
        mx.uint32: np.uint32,
        mx.int32: np.int32,
    }[dtype]


def to_numpy(array):
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def to_mlx(array, dtype):
    return mx.array(array).view(dtype) if dtype == mx.bfloat16 else mx.array(array)
