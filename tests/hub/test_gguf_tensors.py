"""Tensor types against their closed forms, bit for bit in float32."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf_writer import random_tensor, write_gguf

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.gguf_file import GGUFFile
from dflash_mlx.hub.gguf_tensors import Dense, Packed, read_tensor, supported_types


def read(path: Path) -> Dense | Packed:
    with GGUFFile(path) as file:
        return read_tensor(file, file.tensors["t"])


def values_of(tensor: Dense | Packed) -> np.ndarray:
    """Through MLX, in float32."""
    if isinstance(tensor, Dense):
        array = mx.array(tensor.values)
        return np.array((array.view(mx.bfloat16) if tensor.dtype == "bfloat16" else array).astype(mx.float32))
    scales, biases = (mx.array(part).astype(mx.float32) for part in (tensor.scales, tensor.biases))
    return np.array(mx.dequantize(mx.array(tensor.weight), scales, biases, group_size=32, bits=tensor.bits))


@pytest.mark.parametrize("kind", supported_types())
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (64, 256)])
def test_every_supported_type_is_read_exactly(tmp_path: Path, kind: str, shape: tuple[int, int]) -> None:
    tensor, expected = random_tensor(np.random.default_rng(3), kind, shape)
    found = values_of(read(write_gguf(tmp_path / "f.gguf", {}, {"t": tensor})))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packing_equals_mlx_own_reader(tmp_path: Path, kind: str) -> None:
    tensor, _ = random_tensor(np.random.default_rng(4), kind, (32, 64))
    path = write_gguf(tmp_path / "f.gguf", {"general.architecture": "llama"}, {"t.weight": tensor})
    reference = mx.load(str(path))
    with GGUFFile(path) as file:
        ours = read_tensor(file, file.tensors["t.weight"])
    assert isinstance(ours, Packed)
    for name, part in (("weight", ours.weight), ("scales", ours.scales), ("biases", ours.biases)):
        np.testing.assert_array_equal(part, np.array(reference[f"t.{name}"]))


@pytest.mark.parametrize(("kind", "size"), [("Q4_K", 144), ("Q6_K", 210)])
def test_a_type_that_would_lose_precision_is_refused_by_name(tmp_path: Path, kind: str, size: int) -> None:
    path = write_gguf(tmp_path / "f.gguf", {}, {"t": (kind, (1, 256), bytes(size))})
    with pytest.raises(CheckpointError, match=rf"'t' is stored as {kind}.*Q8_0"):
        read(path)


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    block = np.array([np.inf], dtype="<f2").tobytes() + bytes(16)
    with pytest.raises(CheckpointError, match="not a finite"):
        read(write_gguf(tmp_path / "f.gguf", {}, {"t": ("Q4_0", (1, 32), block)}))


def test_a_scale_whose_offset_overflows_is_refused(tmp_path: Path) -> None:
    block = np.array([60000.0], dtype="<f2").tobytes() + bytes(32)  # 128 * 60000 is beyond float16
    with pytest.raises(CheckpointError, match="not a finite"):
        read(write_gguf(tmp_path / "f.gguf", {}, {"t": ("Q8_0", (1, 32), block)}))
