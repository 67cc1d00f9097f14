"""A stand-in for `mx.fast.metal_kernel` that compiles a kernel with g++ and runs it on the CPU. README.md says more."""

import ctypes
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

HERE = Path(__file__).parent
TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint32: "uint32_t",
    mx.int32: "int32_t",
}
# What a kernel may ask about a thread: its type, and where the runtime has it.
ATTRIBUTES = {
    "thread_index_in_simdgroup": ("uint", "self.lane"),
    "thread_index_in_threadgroup": ("uint", "self.index"),
    "simdgroup_index_in_threadgroup": ("uint", "self.simdgroup"),
    "thread_position_in_grid": ("uint3", "self.in_grid"),
    "thread_position_in_threadgroup": ("uint3", "self.in_threadgroup"),
    "threads_per_threadgroup": ("uint3", "self.threads"),
    "threadgroup_position_in_grid": ("uint3", "self.place"),
}
ORDERS = {"forward": 0, "reverse": 1, "random": 2}
FLAGS = ["-std=c++17", "-O1", "-g1", "-fPIC", "-shared", "-w", "-ffp-contract=off", "-fsingle-precision-constant"]
# The library of the thread sanitizer is not linked: runtime.cpp has its functions. Jumps go between stacks, which a
# fortified setjmp would not do.
CHECKED = ["-fsanitize=thread", "-fsanitize=bounds,shift", "-fno-aggressive-loop-optimizations"]
RUNTIME = ["-std=c++17", "-O2", "-fPIC", "-shared", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing"]
# `threadgroup float sums[8][32];` declares a variable; elsewhere the word belongs to a pointer or a reference.
VARIABLE = re.compile(r"\bthreadgroup\s+([\w ]+?)\s+(\w+)\s*((?:\[[^\]]+\])+)\s*;")

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="runs kernels with g++ on Linux"
)


def shared_folder(tmp_path_factory):
    """A folder for what is compiled, the same for all processes of a test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "metal"
    folder.mkdir(exist_ok=True)
    return folder


class KernelError(AssertionError):
    """What a kernel did that it must not do."""


@dataclass
class Counts:
    """Of one run. Bytes are counted in checked runs only, by the name of input or output.

    `read` counts each thread's reads, `fetched` what each threadgroup has to fetch from memory at least: a byte that
    its threads read again is counted once.
    """

    matrix_operations: int = 0
    threadgroup_barriers: int = 0
    threadgroup_bytes: int = 0
    read: dict = field(default_factory=dict)
    fetched: dict = field(default_factory=dict)
    written: dict = field(default_factory=dict)


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("is_output", ctypes.c_int32),
        ("bytes_read", ctypes.c_uint64),
        ("bytes_written", ctypes.c_uint64),
        ("bytes_fetched", ctypes.c_uint64),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("order", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("checked", ctypes.c_int32),
        ("matrix_operations", ctypes.c_uint64),
        ("threadgroup_barriers", ctypes.c_uint64),
        ("threadgroup_bytes", ctypes.c_uint64),
    )


class Emulator:
    """Compiles kernels into `folder`, and runs them as `checked`, `order` and `seed` say at that time.

    checked: look for races, accesses out of bounds, reads of what nobody wrote, and outputs that were not written.
    order: which thread goes on when several can; "random" follows `seed`. `counts` are those of the last run.
    """

    def __init__(self, folder, *, checked=False, order="forward", seed=0):
        self.folder, self.checked, self.order, self.seed = folder, checked, order, seed
        self.counts = Counts()
        self._loaded = {}

    def metal_kernel(self, *, name, input_names, output_names, source, header="", ensure_row_contiguous=True):
        """Takes what `mx.fast.metal_kernel` takes; inputs may also be numpy arrays, of any positive strides."""

        def run(*, inputs, output_shapes, output_dtypes, grid, threadgroup, template=()):
            inputs = [a if isinstance(a, mx.array | np.ndarray) else mx.array(a) for a in inputs]
            text = metal_text(name, input_names, output_names, source, header, inputs, output_dtypes, template)
            return self._run(
                text, source, input_names, output_names, inputs, output_shapes, output_dtypes, grid, threadgroup
            )

        return run

    def _run(self, text, source, input_names, output_names, inputs, output_shapes, output_dtypes, grid, threadgroup):
        names, data, parameters = [], [], []
        for name, a in zip(input_names, inputs, strict=True):
            array = a if isinstance(a, np.ndarray) else to_numpy(a)
            arrays = {name: (type_of(a), memory_of(array))}
            if a.ndim:
                arrays[f"{name}_shape"] = "int", np.array(a.shape, np.int32)
                arrays[f"{name}_strides"] = "int64_t", np.array(array.strides) // array.itemsize
            for key, (kind, held) in arrays.items():
                if key == name or key in source:
                    parameters.append(f"{'' if a.ndim else '*'}static_cast<const {kind}*>(given[{len(data)}])")
                    names.append(key)
                    data.append(held)
        for name, shape, dtype in zip(output_names, output_shapes, output_dtypes, strict=True):
            parameters.append(f"static_cast<{TYPES[dtype]}*>(given[{len(data)}])")
            names.append(name)
            data.append(np.full(int(np.prod(shape)) * dtype.size, 0xFF, np.uint8))
        asked = [(name, *ATTRIBUTES[name]) for name in attributes(source)]
        parameters += [f"{'three' if kind == 'uint3' else ''}({value})" for _, kind, value in asked]
        entry = self._compile(text, parameters)

        size = [min(a, b) for a, b in zip(threadgroup, grid, strict=True)]
        assert size[0] * size[1] * size[2] <= 1024, "Metal allows 1024 threads in a threadgroup"
        launch = _Launch(tuple(grid), tuple(size), ORDERS[self.order], self.seed, self.checked)
        first_output = len(data) - len(output_names)
        buffers = (_Buffer * len(data))(
            *[
                _Buffer(a.ctypes.data, a.nbytes, name.encode(), i >= first_output)
                for i, (name, a) in enumerate(zip(names, data, strict=True))
            ]
        )
        found = self._runtime().emulate(entry, ctypes.byref(launch), buffers, len(buffers)).decode()
        self.counts = Counts(
            launch.matrix_operations,
            launch.threadgroup_barriers,
            launch.threadgroup_bytes,
            read={b.name.decode(): b.bytes_read for b in buffers},
            fetched={b.name.decode(): b.bytes_fetched for b in buffers},
            written={b.name.decode(): b.bytes_written for b in buffers},
        )
        if found:
            raise KernelError(self._with_lines(found))
        return [
            to_mlx(a, shape, dtype)
            for a, shape, dtype in zip(data[first_output:], output_shapes, output_dtypes, strict=True)
        ]

    def _runtime(self):
        if "runtime" not in self._loaded:
            text = "".join((HERE / name).read_text() for name in ("runtime.cpp", "runtime.h"))
            library = self._built(text, RUNTIME, HERE / "runtime.cpp")
            self._loaded["runtime"] = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            self._loaded["runtime"].emulate.restype = ctypes.c_char_p
        return self._loaded["runtime"]

    def _compile(self, text, parameters):
        self._runtime()
        key = (text, self.checked)
        if key not in self._loaded:
            [function] = re.findall(r"\[\[kernel\]\] void (\w+)\(", text)
            called = re.search(rf"decltype\({function}(<.*?>)\)", text)
            whole = "\n".join(
                [
                    f'#include "{HERE / "metal.hpp"}"',
                    '#line 1 "kernel"',
                    VARIABLE.sub(
                        r"typedef \1 \2_type\3; \2_type& \2 = *static_cast<\2_type*>"
                        r'(emulator::threadgroup_variable("\2", sizeof(\2_type)));',
                        text,
                    ),
                    "static uint3 three(const uint32_t (&of)[3]) { return uint3(of[0], of[1], of[2]); }",
                    'extern "C" void entry(void** given) {',
                    "  const emulator::Thread& self = *emulator::current;",
                    f"  {function}{called[1] if called else ''}({', '.join(parameters)});",
                    "}",
                ]
            )
            parts = [whole, *(path.read_text() for path in sorted(HERE.glob("*.h*")))]
            library = self._built("".join(parts), FLAGS + (CHECKED if self.checked else []), whole)
            self._loaded[key] = ctypes.CDLL(str(library)).entry
        return self._loaded[key]

    def _built(self, key, flags, source):
        """A library for this text, from an earlier run or another process where there is one."""
        library = self.folder / f"{hashlib.sha256((key + str(flags)).encode()).hexdigest()[:20]}.so"
        if not library.exists():
            if isinstance(source, str):
                path = library.with_suffix(f".{os.getpid()}.cpp")
                path.write_text(source)
                source = path
            made = library.with_suffix(f".{os.getpid()}.so")
            objects = made.with_suffix(".o")
            for command in (["-c", source, "-o", objects], ["-o", made, objects]):
                # The sanitizers' own libraries are not wanted when linking.
                used = [flag for flag in flags if "-c" in command or not flag.startswith("-fsanitize")]
                used = [flag for flag in used if "-c" not in command or flag != "-shared"]
                done = subprocess.run(["g++", *used, *command], capture_output=True, text=True)
                if done.returncode:
                    raise KernelError(f"does not compile:\n{done.stderr[:4000]}")
            os.replace(made, library)
        return library

    def _with_lines(self, report):
        """Addresses in the code replaced by lines of the text that MLX makes of a kernel."""
        for address in set(re.findall(r"\[(0x[0-9a-f]+)\]", report)):
            report = report.replace(f"[{address}]", f"[{_line_of(int(address, 16))}]")
        return report


def metal_text(name, input_names, output_names, source, header, inputs, output_dtypes, template):
    """The text that MLX makes of a kernel and gives to Metal's compiler; test_emulator.py compares the two."""
    types = [type_of(a) for a in inputs]
    arguments = ", ".join(TYPES[v] if isinstance(v, mx.Dtype) else str(int(v)) for _, v in template)
    function = f"custom_kernel_{name}"
    if template:
        function += "__" + arguments.replace(", ", "_")
    for a, kind in zip(inputs, types, strict=True):
        function += f"_{kind}{'s' if a.ndim == 0 else 'c' if a.size < 8 else ''}"
    function += "".join(f"_{TYPES[dtype]}" for dtype in output_dtypes)

    parameters, number = [], itertools.count()
    for key, a, kind in zip(input_names, inputs, types, strict=True):
        space = "constant" if a.size < 8 else "device"
        parameters.append(f"const {space} {kind}{'*' if a.ndim else '&'} {key} [[buffer({next(number)})]]")
        if a.ndim and f"{key}_shape" in source:
            parameters.append(f"const constant int* {key}_shape [[buffer({next(number)})]]")
        if a.ndim and f"{key}_strides" in source:
            parameters.append(f"const constant int64_t* {key}_strides [[buffer({next(number)})]]")
    for key, dtype in zip(output_names, output_dtypes, strict=True):
        parameters.append(f"device {TYPES[dtype]}* {key} [[buffer({next(number)})]]")
    parameters += [f"{ATTRIBUTES[key][0]} {key} [[{key}]]" for key in attributes(source)]

    text = header
    if template:
        kinds = ["bool" if isinstance(v, bool) else "int" if isinstance(v, int) else "typename" for _, v in template]
        text += f"template <{', '.join(f'{kind} {key}' for kind, (key, _) in zip(kinds, template, strict=True))}>\n"
    text += f"[[kernel]] void {function}(\n" + ",\n".join(f"  {one}" for one in parameters) + ") {\n" + source + "\n}\n"
    if template:
        whole = f"{function}<{arguments}>"
        text += f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({whole}) {whole};\n'
    return text


def attributes(source):
    """What a body asks about its thread, in MLX's order: by the names' alphabet."""
    return sorted(name for name in ATTRIBUTES if name in source)


def type_of(array):
    return TYPES[array.dtype if isinstance(array, mx.array) else getattr(mx, array.dtype.name.replace("bool", "bool_"))]


def memory_of(array):
    """The bytes from a numpy array's first number to its last one, with what lies between."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return np.ctypeslib.as_array((ctypes.c_uint8 * (high - low)).from_address(low)).copy()


def to_numpy(array):
    """numpy has no bfloat16: its bits are kept in uint16."""
    mx.eval(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def to_mlx(octets, shape, dtype):
    kinds = {
        mx.float32: np.float32,
        mx.float16: np.float16,
        mx.bfloat16: np.uint16,
        mx.uint32: np.uint32,
        mx.int32: np.int32,
    }
    array = mx.array(octets.view(kinds[dtype]).reshape(shape))
    return array.view(dtype) if dtype == mx.bfloat16 else array


def _line_of(address):
    """The line of a kernel that an address in this process belongs to."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            path, offset = line.split()[-1], address - start + int(line.split()[2], 16)
            command = ["addr2line", "-i", "-e", path, hex(offset - 1)]
            found = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
            lines = [re.sub(r".*:(\d+).*", r"line \1", place) for place in found if "metal.hpp" not in place]
            return lines[0] if lines else "line ?"
    return "line ?"
