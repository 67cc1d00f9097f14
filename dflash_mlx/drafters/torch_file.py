"""Tensors out of a file of `torch.save`, without PyTorch and without running anything that the file asks for.

Such a file is a zip archive with a pickle that describes the tensors, and their bytes. Some drafters are kept in one
(`pytorch_model.bin`), others their row for the mask token (`mask_embedding.pt`). The unpickler here knows the names
that a description needs and refuses all others.
"""

import math
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from dflash_mlx.errors import CheckpointError

_TYPES = {
    "BFloat16Storage": mx.bfloat16,
    "HalfStorage": mx.float16,
    "FloatStorage": mx.float32,
    "LongStorage": mx.int64,
    "IntStorage": mx.int32,
    "BoolStorage": mx.bool_,
}
_MOST_DESCRIBED = 16_000_000  # bytes of a description; those of real files have some thousand
# What a file that is damaged, or not what it should be, may raise.
_BROKEN = (
    OSError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    EOFError,
    RuntimeError,
    zlib.error,
    zipfile.BadZipFile,
    pickle.PickleError,
)
T = TypeVar("T")


@dataclass
class _Storage:
    dtype: mx.Dtype
    key: str


@dataclass
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _rebuild(storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any) -> _Tensor:
    return _Tensor(storage, offset, shape, strides)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _TYPES:
            return _TYPES[name]
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor")):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        return _Storage(dtype, str(key))


def read_tensors(path: Path) -> dict[str, mx.array]:
    """All tensors of a dictionary of them, as a model's weights are saved. Raises CheckpointError."""

    def read(found: Any, tensor: Callable[[_Tensor], mx.array]) -> dict[str, mx.array]:
        if not isinstance(found, dict):
            raise TypeError(f"it holds a {type(found).__name__}")
        return {str(name): tensor(value) for name, value in found.items() if isinstance(value, _Tensor)}

    return _opened(
        path,
        read,
        "the drafter's weights",
        "a dictionary of tensors saved by torch.save; fetch the file again, or save the tensors as safetensors",
    )


def read_mask_embedding(path: Path, mask_token_id: int) -> mx.array:
    """The tensor in the file: alone, or in a dictionary that may name the mask token. Raises CheckpointError."""

    def read(found: Any, tensor: Callable[[_Tensor], mx.array]) -> mx.array:
        if isinstance(found, dict):
            said = found.get("mask_token_id", mask_token_id)
            if said != mask_token_id:
                raise ValueError(f"it is for the mask token {said}, config.json says {mask_token_id}")
            [found] = [value for value in found.values() if isinstance(value, _Tensor)]
        row = tensor(found)
        if not mx.issubdtype(row.dtype, mx.floating):
            raise TypeError(f"it holds numbers of the type {row.dtype}")
        return row

    return _opened(
        path,
        read,
        "the drafter's mask embedding",
        "a tensor saved by torch.save; fetch the file again, or put the row into the drafter's safetensors file as "
        "mask_embedding",
    )


def _opened(path: Path, read: Callable[[Any, Callable[[_Tensor], mx.array]], T], what: str, expected: str) -> T:
    """What `read` makes of a file's description, with a function that reads the tensors described in it."""
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no zip archive, as torch.save has written them since PyTorch 1.6")
        with zipfile.ZipFile(path) as archive:
            packed = [item.filename for item in archive.infolist() if item.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise ValueError(f"{packed[0]} is compressed")
            [description] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if archive.getinfo(description).file_size > _MOST_DESCRIBED:
                raise ValueError(f"its description is larger than {_MOST_DESCRIBED:,} bytes")
            with archive.open(description) as file:
                found = _Unpickler(file).load()
            folder = description.removesuffix("data.pkl")
            return read(found, lambda tensor: _values(archive.read(f"{folder}data/{tensor.storage.key}"), tensor))
    except _BROKEN as error:
        raise CheckpointError(f"cannot read {what} in {path}: {error}. Expected {expected}.") from error


def _values(raw: bytes, tensor: _Tensor) -> mx.array:
    """A tensor out of the bytes of its storage."""
    size = 1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if length > 1 and stride != size:
            raise ValueError(f"a tensor of the shape {tensor.shape} is not stored row by row")
        size *= length
    values = mx.array(np.frombuffer(raw, dtype=np.uint8)).view(tensor.storage.dtype)
    return values[tensor.offset : tensor.offset + math.prod(tensor.shape)].reshape(tensor.shape)
