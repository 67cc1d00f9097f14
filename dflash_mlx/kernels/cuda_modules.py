"""CUDA kernels that are compiled once, and not at every start.

MLX keeps what it has compiled of its own kernels in a folder, and looks there for those of `mx.fast.cuda_kernel`, too,
but never writes them there (0.32.4). It compiles each anew in every process, with headers that take a second, and a
pair needs more than a dozen. So they are compiled here without those headers, in a tenth of the time and to the same
machine code, and put where MLX looks. Where anything of that fails, MLX compiles them as ever.
"""

import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.hub.leftovers import write_atomically
from dflash_mlx.kernels.sources import FOLDER, source
from dflash_mlx.runtime import backend

# What MLX puts before a kernel.
_HEADERS = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""
_NAMESPACE = "namespace mlx::core::cu {\n\n"
# What this project's kernels need of that. MLX hands over ten numbers of shapes and strides, whatever they are.
_INSTEAD = """#include <cuda_bf16.h>
#include <cuda_fp16.h>
using int8_t = signed char; using uint8_t = unsigned char; using int16_t = short; using uint16_t = unsigned short;
using int32_t = int; using uint32_t = unsigned; using int64_t = long; using uint64_t = unsigned long;
namespace mlx::core::cu {
template <typename T> struct Ten {
  T at[10];
  __device__ const T& operator[](int i) const { return at[i]; }
};
using Shape = Ten<int32_t>;
using Strides = Ten<int64_t>;
}
"""
_TYPES = {
    mx.float32: ("float", "float"),
    mx.float16: ("float16_t", "__half"),
    mx.bfloat16: ("bfloat16_t", "__nv_bfloat16"),
    mx.bool_: ("bool", "bool"),
    mx.int32: ("int32_t", "int32_t"),
    mx.uint32: ("uint32_t", "uint32_t"),
}
# What a kernel may want to know of an input.
_FACTS = {"shape": "Shape", "strides": "Strides", "ndim": "int"}
_ENTRY = "dflash_kernel"
Constants = Sequence[tuple[str, Any]]
# Of a text; None where it is refused.
Compiler = Callable[[str], bytes | None]


def cuda_kernel(
    *,
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    file: str,
    beginning: str = "",
    header: str | None = None,
    ensure_row_contiguous: bool = True,
    shared_memory: int = 0,
) -> Callable[..., list[mx.array]]:
    """`mx.fast.cuda_kernel` of files beside this one, whose modules are provided for each kind of inputs and outputs.

    beginning: of the kernel's body, before the text of `file`. shared_memory: bytes for each block of threads, beside
    those that the text asks for.
    """
    # Another text, and so another module, for another GPU.
    body = f"{beginning}{included(file, input_names)}// {_architecture()}\n"
    before = included(header) if header is not None else ""
    launched: Any = mx.fast.cuda_kernel(
        name=name,
        input_names=input_names,
        output_names=output_names,
        source=body,
        header=before,
        ensure_row_contiguous=ensure_row_contiguous,
        shared_memory=shared_memory,
    )
    provided: set[object] = set()

    def launch(
        *, inputs: Sequence[mx.array], template: Constants, output_dtypes: Sequence[mx.Dtype], **call: Any
    ) -> list[mx.array]:
        kinds = tuple((x.dtype, x.ndim > 0) for x in inputs), tuple(template), tuple(output_dtypes)
        if kinds not in provided:
            provided.add(kinds)
            if backend().kind == "cuda" and (compiler := _compiler()) is not None:
                provide(Text(name, input_names, output_names, body, before, *kinds), compiler)
        found: list[mx.array] = launched(inputs=inputs, template=template, output_dtypes=output_dtypes, **call)
        return found

    return launch


def included(file: str, inputs: Sequence[str] = ()) -> str:
    """A line that stands for a file's text.

    MLX computes a hash of a kernel's text for every launch, over a hundred times a round; a line takes no time. It also
    looks there for what the kernel wants to know of its `inputs`, so that is named, and so is the text.
    """
    text = source(file)
    wanted = [f"{name}_{fact}" for name in inputs for fact in _FACTS if f"{name}_{fact}" in text]
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f'#include "{(FOLDER / file).as_posix()}"  // {" ".join([digest, *wanted])}\n'


@dataclass(frozen=True)
class Text:
    """A kernel's text, put together as MLX does it. inputs: their types, and whether they have a shape."""

    name: str
    input_names: Sequence[str]
    output_names: Sequence[str]
    source: str
    header: str
    inputs: Sequence[tuple[mx.Dtype, bool]]
    constants: Constants
    outputs: Sequence[mx.Dtype]

    @property
    def full_name(self) -> str:
        return f"custom_kernel_{self.name}{''.join(f'_{_in_name(value)}' for _, value in self.constants)}"

    @property
    def module(self) -> str:
        """What MLX calls the kernel's module."""
        beginning = f"{_NAMESPACE}namespace cg = cooperative_groups;\n\n__global__ void {self.full_name}"
        return f"{self.full_name}_{std_hash(self.after(_HEADERS, beginning).encode()):x}"

    @property
    def light(self) -> str:
        """The same kernel without MLX's headers, called `_ENTRY`."""
        return self.after(_INSTEAD, f'{_NAMESPACE}extern "C" __global__ void {_ENTRY}')

    def after(self, before: str, beginning: str) -> str:
        """The text with these lines before the header, and this beginning up to the kernel's name."""
        constants = "".join(f"  {_as_constant(name, value)};\n" for name, value in self.constants)
        parameters = ",\n".join(f"    {parameter}" for parameter in self._parameters())
        body = f"{constants}\n{self.source}" if constants else self.source
        return f"{before}{self.header}{beginning}(\n{parameters}) {{\n{body}\n}}\n\n}} // namespace mlx::core::cu\n"

    def _parameters(self) -> Iterator[str]:
        for name, (dtype, has_shape) in zip(self.input_names, self.inputs, strict=True):
            yield f"const {_TYPES[dtype][1]}* {name}"
            for fact, kind in _FACTS.items():
                if has_shape and f"{name}_{fact}" in self.source:
                    yield f"const __grid_constant__ {kind} {name}_{fact}"
        for name, dtype in zip(self.output_names, self.outputs, strict=True):
            yield f"{_TYPES[dtype][1]}* {name}"


def _in_name(value: Any) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    return _TYPES[value][0] if isinstance(value, mx.Dtype) else str(value)


def _as_constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {_TYPES[value][1]}"
    kind, said = ("bool", str(value).lower()) if isinstance(value, bool) else ("int", value)
    return f"constexpr {kind} {name} = {said}"


def provide(text: Text, compiler: Compiler) -> None:
    """Compile a kernel and put it where MLX looks, unless it is there."""
    module = modules_folder() / f"{text.module}.ptx"
    try:
        if module.exists() or (machine_code := compiler(text.light)) is None:
            return
        module.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(module.with_suffix(".txt"), f"mlx::core::cu::{text.full_name}\t{_ENTRY}\n")
        # The last one, since it is what MLX looks for.
        write_atomically(module, machine_code)
    except OSError:
        return  # a folder that cannot be written to, or a full disk


def modules_folder() -> Path:
    """Where MLX looks for what has been compiled."""
    chosen = os.environ.get("MLX_PTX_CACHE_DIR")
    if chosen is not None:
        return Path(chosen)
    temporary = next(filter(None, map(os.environ.get, ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))), "/tmp")
    return Path(temporary) / "mlx" / backend().mlx_version / "ptx"


def _architecture() -> str:
    """What NVIDIA calls the kind of the GPU, as MLX has it compiled for; "" where there is none."""
    info: Mapping[str, Any] = mx.device_info()
    major, minor = info.get("compute_capability_major"), info.get("compute_capability_minor")
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}" if major is not None else ""


@cache
def _compiler() -> Compiler | None:
    """By NVIDIA's library (NVRTC) that MLX has loaded, with the headers beside it; None where it is not found."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        return compiler_of(Path(next(line[line.index("/") :] for line in lines if "/libnvrtc.so" in line)))
    except (OSError, StopIteration):
        return None


def compiler_of(nvrtc: Path) -> Compiler:
    """What compiles by this library, with the headers beside it, for the GPU of this machine.

    Raises OSError where it cannot be loaded.
    """
    library = ctypes.CDLL(str(nvrtc))
    options = [
        f"--gpu-architecture={_architecture()}",
        f"--include-path={nvrtc.parents[1] / 'include'}",
        # As MLX has it; without, NVRTC 13.0 refuses functions in a kernel (lambdas).
        "--device-as-default-execution-space",
    ]
    return lambda text: compiled(library, text, options)


def compiled(library: ctypes.CDLL, text: str, options: Sequence[str]) -> bytes | None:
    """A text compiled by NVRTC, which is `library`; None where it refuses it."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    listed = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    if library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) != 0:
        return None
    try:
        if library.nvrtcCompileProgram(program, len(options), listed) != 0:
            return None
        if library.nvrtcGetCUBINSize(program, ctypes.byref(size)) != 0 or size.value == 0:
            return None
        cubin = ctypes.create_string_buffer(size.value)
        return cubin.raw if library.nvrtcGetCUBIN(program, cubin) == 0 else None
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def std_hash(data: bytes) -> int:
    """`std::hash` of GCC's library for a text, by which MLX names a kernel's module (MurmurHash64A)."""
    whole, factor = (1 << 64) - 1, 0xC6A4A7935BD1E995

    def mixed(value: int) -> int:
        return value ^ (value >> 47)

    value = 0xC70F6907 ^ (len(data) * factor & whole)
    for start in range(0, len(data) - len(data) % 8, 8):
        piece = int.from_bytes(data[start : start + 8], "little")
        value = (value ^ (mixed(piece * factor & whole) * factor & whole)) * factor & whole
    if len(data) % 8:
        value = (value ^ int.from_bytes(data[-(len(data) % 8) :], "little")) * factor & whole
    return mixed(mixed(value) * factor & whole)
