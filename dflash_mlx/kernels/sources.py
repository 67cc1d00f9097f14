"""The texts of kernels, which lie beside the code as files of their own."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

_FOLDER = Path(__file__).parent


def source(file: str) -> str:
    """The text of a file in this folder, as "quantized_rows/kernel.metal"."""
    return (_FOLDER / file).read_text(encoding="utf-8")


def included(file: str, inputs: Sequence[str] = ()) -> str:
    """A line that stands for the text of a CUDA kernel's file, or of a header's.

    MLX computes a hash of a kernel's text for every launch, over a hundred times a round; a line takes no time. It also
    looks there for the shapes and strides of `inputs` that the kernel wants, so they are named, and so is the text.
    """
    text = source(file)
    wanted = [f"{name}_{fact}" for name in inputs for fact in ("shape", "strides", "ndim") if f"{name}_{fact}" in text]
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f'#include "{(_FOLDER / file).as_posix()}"  // {" ".join([digest, *wanted])}\n'
