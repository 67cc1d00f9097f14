"""One tensor out of a file of `torch.save`, without PyTorch and without running anything that the file asks for.

Some drafters keep their row for the mask token in `mask_embedding.pt`: a zip archive with a pickle that describes the
tensor, and its bytes. The unpickler here knows the names that a description needs and refuses all others.
"""

import math
import pickle
import zipfile
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.errors import CheckpointError

_TYPES = {"BFloat16Storage": mx.bfloat16, "HalfStorage": mx.float16, "FloatStorage": mx.float32}
_MOST_BYTES = 16_000_000  # a row of an embedding has some ten thousand
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


@dataclass
class _Storage:
    dtype: mx.Dtype
    key: str


@dataclass
class _Tensor:
    storage: _Storage
    offset: int
    shape: tuple[int, ...]


def _rebuild(storage: _Storage, offset: int, shape: tuple[int, ...], *_: Any) -> _Tensor:
    return _Tensor(storage, offset, shape)


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


def read_mask_embedding(path: Path, mask_token_id: int) -> mx.array:
    """The tensor in the file: alone, or in a dictionary that may name the mask token. Raises CheckpointError."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(item.file_size for item in archive.infolist()) > _MOST_BYTES:
                raise ValueError(f"it is larger than {_MOST_BYTES:,} bytes")
            [description] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            with archive.open(description) as file:
                found = _Unpickler(file).load()
            if isinstance(found, dict):
                said = found.get("mask_token_id", mask_token_id)
                if said != mask_token_id:
                    raise ValueError(f"it is for the mask token {said}, config.json says {mask_token_id}")
                [found] = [value for value in found.values() if isinstance(value, _Tensor)]
            raw = archive.read(f"{description.removesuffix('data.pkl')}data/{found.storage.key}")
        values = mx.array(np.frombuffer(raw, dtype=np.uint8)).view(found.storage.dtype)
        return values[found.offset : found.offset + math.prod(found.shape)].reshape(found.shape)
    except _BROKEN as error:
        raise CheckpointError(
            f"cannot read the drafter's mask embedding in {path}: {error}. Expected a tensor saved by torch.save; "
            "fetch the file again, or put the row into the drafter's safetensors file as mask_embedding."
        ) from error
