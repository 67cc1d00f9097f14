"""The texts of kernels, which lie beside the code as files of their own."""

from pathlib import Path

FOLDER = Path(__file__).parent


def source(file: str) -> str:
    """The text of a file in this folder, as "quantized_rows/kernel.metal"."""
    return (FOLDER / file).read_text(encoding="utf-8")
