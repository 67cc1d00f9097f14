"""The texts of kernels, which lie beside the code as files of their own."""

from pathlib import Path


def source(file: str) -> str:
    """The text of a file in this folder, as "quantized_rows/kernel.metal"."""
    return (Path(__file__).parent / file).read_text(encoding="utf-8")
