"""Storage types of GGUF tensors -> arrays in MLX's layout, without loss of precision.

MLX's affine quantization stores `value = scale * code + bias` for every group of 32, 64 or 128 columns. The ggml types
below are the same formula over groups of 32, so their codes, scales and offsets are only moved to where MLX expects
them. `mx.load` also reads GGUF files, but silently turns every other quantized type into float16; here a type is
either kept exactly or refused.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.gguf_file import GGUFFile, TensorInfo

GROUP = 32  # columns that share a scale in every supported quantized type


@dataclass(frozen=True)
class Dense:
    """A tensor of plain numbers. `values` is float32 or float16, or uint16 bit patterns where `dtype` is bfloat16."""

    values: np.ndarray  # the tensor's own shape
    dtype: str  # "float32" | "float16" | "bfloat16"


@dataclass(frozen=True)
class Packed:
    """A matrix in MLX's affine layout: value[r, c] = scales[r, c // 32] * code[r, c] + biases[r, c // 32]."""

    weight: np.ndarray  # (rows, columns * bits / 32) uint32, codes packed from the lowest bit up
    scales: np.ndarray  # (rows, columns / 32) float16
    biases: np.ndarray  # (rows, columns / 32) float16
    bits: int

    def take_rows(self, order: np.ndarray) -> "Packed":
        return Packed(self.weight[order], self.scales[order], self.biases[order], self.bits)


def read_tensor(file: GGUFFile, info: TensorInfo) -> Dense | Packed:
    """The tensor `info` of `file`. Raises CheckpointError, naming tensor and type, for a type that is not supported."""
    raw = file.data(info)
    kind = info.type.name
    if kind in _DENSE:
        return Dense(raw.reshape(-1).view(_DENSE[kind][0]).reshape(info.shape), _DENSE[kind][1])
    if kind not in _PACKED:
        raise CheckpointError(
            f"{file.path}: tensor {info.name!r} is stored as {kind}, which MLX cannot hold without loss. "
            f"Use a file made of {', '.join(supported_types())} only."
        )
    if len(info.shape) != 2:
        raise CheckpointError(
            f"{file.path}: tensor {info.name!r} is {kind} with shape {info.shape}; expected a matrix."
        )
    packed = _PACKED[kind](raw.reshape(info.shape[0], -1, info.type.bytes))
    if not (np.isfinite(packed.scales).all() and np.isfinite(packed.biases).all()):
        raise CheckpointError(f"{file.path}: tensor {info.name!r} ({kind}) has a scale that is not a finite float16.")
    return packed


def supported_types() -> list[str]:
    return [*_DENSE, *_PACKED]


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block: (rows, groups)."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _nibbles(bytes16: np.ndarray) -> np.ndarray:
    """Codes of 32 columns from 16 bytes: low halves are columns 0 to 15, high halves 16 to 31."""
    return np.concatenate([bytes16 & 15, bytes16 >> 4], axis=-1)


def _fifth_bits(bytes4: np.ndarray) -> np.ndarray:
    """The fifth bit of 32 columns, shifted to its place, from a 32-bit mask."""
    return np.unpackbits(bytes4, axis=-1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> Packed:
    scales = _halves(blocks, 0)  # value = scale * (code - 8)
    return Packed(_pack(_nibbles(blocks[..., 2:]), 4), scales, _times(scales, -8), 4)


def _q4_1(blocks: np.ndarray) -> Packed:
    return Packed(_pack(_nibbles(blocks[..., 4:]), 4), _halves(blocks, 0), _halves(blocks, 2), 4)


def _q5_0(blocks: np.ndarray) -> Packed:
    scales = _halves(blocks, 0)  # value = scale * (code - 16)
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Packed(_pack(codes, 5), scales, _times(scales, -16), 5)


def _q5_1(blocks: np.ndarray) -> Packed:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Packed(_pack(codes, 5), _halves(blocks, 0), _halves(blocks, 2), 5)


def _q8_0(blocks: np.ndarray) -> Packed:
    scales = _halves(blocks, 0)  # value = scale * signed byte; MLX's codes are unsigned
    return Packed(_pack(blocks[..., 2:] ^ 128, 8), scales, _times(scales, -128), 8)


def _times(scales: np.ndarray, power: int) -> np.ndarray:
    """scales * a power of two: exact in float16 unless it overflows or is none, which `read_tensor` refuses."""
    with np.errstate(over="ignore", invalid="ignore"):
        return scales * np.float16(power)


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (rows, groups, 32) uint8 -> (rows, columns * bits / 32) uint32: a stream of bits, lowest first."""
    rows = codes.shape[0]
    if bits == 8:
        stream = codes
    elif bits == 4:
        stream = codes[..., 0::2] | codes[..., 1::2] << 4
    else:
        each = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
        stream = np.packbits(each.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(stream).reshape(rows, -1).view("<u4")


_DENSE = {"F32": ("<f4", "float32"), "F16": ("<f2", "float16"), "BF16": ("<u2", "bfloat16")}
_PACKED: dict[str, Callable[[np.ndarray], Packed]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}
