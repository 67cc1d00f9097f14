"""Reading GGUF files: header, metadata and tensor directory, in plain Python.

Nothing in the file is trusted. Every count, length and offset is compared with the file's size before it is used,
so a truncated or hostile file ends in a `CheckpointError` that says what was expected and what was found.

Layout (ggml/docs/gguf.md): magic, version, number of tensors, number of metadata entries, the entries, the tensor
directory, padding to `general.alignment`, then the tensors' data. All numbers are little-endian.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from dflash_mlx.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65_535

_STRING, _ARRAY, _BOOL = 8, 9, 7
# Value type number -> little-endian numpy type.
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True)
class TensorType:
    """One ggml storage type: `block` values take `bytes` bytes."""

    name: str
    block: int
    bytes: int


# All types that appear in published files, so that those not supported can be refused by name.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 36),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's place in the file. `shape` is in row-major order, outermost first (the file has it reversed)."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    start: int  # byte offset from the beginning of the file
    nbytes: int


class GGUFFile:
    """An open GGUF file: `metadata` (key -> value), `tensors` (name -> TensorInfo), `data(info)` (raw bytes).

    Numbers are Python numbers, strings are str, arrays are lists of them (numeric arrays: numpy arrays).
    Use it in a `with` statement. Raises CheckpointError for anything that is not a complete GGUF version 2 or 3 file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size < 24:
                    raise CheckpointError(f"{path} is not a GGUF file: it has only {self.size} bytes.")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}.") from error
        self._at = 0
        try:
            self.version, tensor_count, entry_count = self._header()
            self.metadata = self._metadata(entry_count)
            self.tensors = self._directory(tensor_count)
        except BaseException:
            self._bytes.close()
            raise

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._bytes.close()

    def data(self, info: TensorInfo) -> np.ndarray:
        """A copy of the tensor's bytes, uint8, one row for each row of the tensor: (rows, bytes a row)."""
        raw = np.frombuffer(self._bytes[info.start : info.start + info.nbytes], dtype=np.uint8)
        rows = math.prod(info.shape[:-1])
        return raw.reshape(rows, -1)

    # -- parsing, in file order ------------------------------------------------------------------------------------

    def _header(self) -> tuple[int, int, int]:
        magic = self._take(4, "the magic number")
        if magic != MAGIC:
            raise CheckpointError(
                f"{self.path} is not a GGUF file: expected it to begin with {MAGIC!r}, found {magic!r}."
            )
        version = self._number("<I", "the version")
        if version not in VERSIONS:
            kind = (
                "a big-endian file" if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS else "version"
            )
            found = kind if kind != "version" else f"version {version}"
            raise CheckpointError(f"{self.path}: expected GGUF version 2 or 3 (little-endian), found {found}.")
        tensors = self._number("<Q", "the number of tensors")
        entries = self._number("<Q", "the number of metadata entries")
        # The smallest entry (1-byte key, 1-byte value) takes 14 bytes, the smallest directory line 33.
        self._fits(entries, 14, "metadata entries")
        self._fits(tensors, 33, "tensors")
        return version, tensors, entries

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self._string(f"metadata key {index + 1} of {count}", limit=MAX_NAME_BYTES)
            if key in metadata:
                raise self._broken(f"metadata key {key!r} appears twice")
            metadata[key] = self._value(self._number("<I", f"the type of {key!r}"), key)
        return metadata

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind in _NUMBERS:
            value = self._array(kind, 1, key)[0]
            return bool(value) if kind == _BOOL else value.item()
        if kind != _ARRAY:
            raise self._broken(f"metadata key {key!r} has the unknown value type {kind}")
        kind = self._number("<I", f"the element type of {key!r}")
        length = self._number("<Q", f"the length of {key!r}")
        if kind == _STRING:
            self._fits(length, 8, f"strings in {key!r}")
            return [self._string(f"element {i} of {key!r}") for i in range(length)]
        if kind in _NUMBERS:
            return self._array(kind, length, key)
        raise self._broken(f"metadata key {key!r} is an array of the unsupported element type {kind}")

    def _directory(self, count: int) -> dict[str, TensorInfo]:
        lines = [self._line(index, count) for index in range(count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment > 2**20:
            raise self._broken(f"general.alignment is {alignment!r}; expected a number from 1 to 1048576")
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in lines:
            if name in tensors:
                raise self._broken(f"tensor {name!r} appears twice")
            nbytes = math.prod(shape) // kind.block * kind.bytes
            start = begin + offset
            if start + nbytes > self.size:
                raise CheckpointError(
                    f"{self.path} is truncated or damaged: tensor {name!r} should end at byte {start + nbytes:,}, "
                    f"the file has {self.size:,}. Fetch the file again."
                )
            tensors[name] = TensorInfo(name, shape, kind, start, nbytes)
        return tensors

    def _line(self, index: int, count: int) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self._string(f"the name of tensor {index + 1} of {count}", limit=MAX_NAME_BYTES)
        dimensions = self._number("<I", f"the rank of {name!r}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._broken(f"tensor {name!r} has {dimensions} dimensions; expected 1 to {MAX_DIMENSIONS}")
        sizes = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions, f"the shape of {name!r}"))
        number = self._number("<I", f"the type of {name!r}")
        offset = self._number("<Q", f"the offset of {name!r}")
        if number not in TENSOR_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has the unknown type number {number}. "
                "Use a file in F16, BF16, Q8_0, Q4_0 or Q4_1."
            )
        kind = TENSOR_TYPES[number]
        if min(sizes) < 1 or sizes[0] % kind.block:
            raise self._broken(
                f"tensor {name!r} has shape {sizes[::-1]}; {kind.name} needs positive sizes "
                f"and rows in multiples of {kind.block}"
            )
        return name, tuple(reversed(sizes)), kind, offset

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _take(self, count: int, what: str) -> bytes:
        if count > self.size - self._at:
            raise CheckpointError(
                f"{self.path} is truncated or damaged: {what} needs {count:,} bytes at byte {self._at:,}, "
                f"the file has {self.size:,}. Fetch the file again."
            )
        self._at += count
        return self._bytes[self._at - count : self._at]

    def _number(self, form: str, what: str) -> int:
        value: int = struct.unpack(form, self._take(struct.calcsize(form), what))[0]
        return value

    def _string(self, what: str, *, limit: int | None = None) -> str:
        length = self._number("<Q", f"the length of {what}")
        if limit is not None and length > limit:
            raise self._broken(f"{what} claims to be {length:,} bytes long; at most {limit:,} make sense")
        try:
            return self._take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._broken(f"{what} is not UTF-8 text") from error

    def _array(self, kind: int, length: int, key: str) -> np.ndarray:
        dtype = np.dtype(_NUMBERS[kind])
        values = np.frombuffer(self._take(length * dtype.itemsize, f"the value of {key!r}"), dtype=dtype)
        return values.astype(bool) if kind == _BOOL else values

    def _fits(self, count: int, least: int, what: str) -> None:
        if count * least > self.size - self._at:
            raise self._broken(f"it claims to hold {count:,} {what}, more than {self.size:,} bytes can")

    def _broken(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {reason} (near byte {self._at:,}). Fetch the file again.")
