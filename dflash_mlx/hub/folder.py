"""Checks of a checkpoint folder that read no weights: complete files, safetensors that are not cut, no foreign code."""

import importlib.util
import json
import struct
from pathlib import Path
from typing import Any

from dflash_mlx.errors import WRONG_VALUES, CheckpointError
from dflash_mlx.hub.naming import is_drafter

# Where some drafters have their weights instead.
TORCH_WEIGHTS = ("pytorch_model.bin", "medusa_lm_head.pt")
_MOST_HEADER_BYTES = 100_000_000  # the safetensors format's own limit


def check_folder(folder: Path) -> Path:
    """`folder`, if it holds config.json and complete *.safetensors files. Raises CheckpointError with what is wrong.

    A drafter's weights may be in a file of PyTorch (`TORCH_WEIGHTS`; `drafters.torch_file`).
    """
    if not folder.is_dir():
        raise CheckpointError(f"expected a model folder, found no folder at {folder}.")
    config = read_json(folder / "config.json")
    files = sorted(folder.glob("*.safetensors"))
    if not files and not (is_drafter(config) and any((folder / name).exists() for name in TORCH_WEIGHTS)):
        others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".npz"))
        found = f"found {others[0]}" if others else "found none"
        raise CheckpointError(f"{folder} has no weights: expected *.safetensors, {found}.")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointError(f"{index} has no weight_map. Fetch the folder again.")
        for name in sorted({str(shard) for shard in shards.values()} - {path.name for path in files}):
            raise CheckpointError(f"{folder} is incomplete: {name} is missing. Fetch the folder again.")
    for path in files:
        check_safetensors(path)
    check_code(str(folder), config)
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is not a model folder: {path.name} is missing.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Fetch the folder again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object, found {type(value).__name__}.")
    return value


def check_safetensors(path: Path) -> None:
    """Compare the file's size with what its header announces. Raises CheckpointError for a cut or padded file."""
    try:
        size = path.stat().st_size
        header, length = _read_header(path)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (OSError, *WRONG_VALUES) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file ({_size(path)}). Fetch it again.") from error
    if size != expected:
        raise CheckpointError(f"{path} is damaged: expected {expected:,} bytes, found {size:,}. Fetch it again.")


def tensors_of(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file by name, as its header describes them: dtype, shape, data_offsets.

    Raises CheckpointError.
    """
    try:
        header, _ = _read_header(path)
        return {name: entry for name, entry in header.items() if name != "__metadata__"}
    except (OSError, *WRONG_VALUES) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file ({_size(path)}). Fetch it again.") from error


def _read_header(path: Path) -> tuple[Any, int]:
    """A safetensors file's header, and how many bytes it has."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MOST_HEADER_BYTES + 1
        return (json.loads(file.read(length)) if length <= _MOST_HEADER_BYTES else None), length


def _size(path: Path) -> str:
    try:
        return f"{path.stat().st_size:,} bytes"
    except OSError as error:
        return error.strerror or "unreadable"


def check_code(name: str, config: dict[str, Any]) -> None:
    """Refuse a checkpoint that only its own Python code can build; that code is never fetched nor run.

    Many checkpoints name code for other libraries (`auto_map`) and need none here: drafters, which this project
    builds, and the model types that mlx-lm has.
    """
    if is_drafter(config):
        return
    if config.get("model_file"):
        raise CheckpointError(
            f"{name} asks to run its own code ({config['model_file']!r}), which is never done. "
            "Use a checkpoint of a model type that mlx-lm knows."
        )
    if config.get("auto_map") and not _mlx_lm_knows(str(config.get("model_type"))):
        raise CheckpointError(
            f"{name} is of model type {config.get('model_type')!r}, which mlx-lm does not know, and its own code "
            "is never run. Update mlx-lm, or use another checkpoint."
        )


def _mlx_lm_knows(model_type: str) -> bool:
    """Whether mlx-lm has a class for the type, without importing mlx-lm unless its list of other names is needed."""
    package = importlib.util.find_spec("mlx_lm")
    places = package.submodule_search_locations if package else None
    if any(model_type == file.stem for place in places or () for file in (Path(place) / "models").glob("*.py")):
        return True
    from mlx_lm.utils import MODEL_REMAPPING

    return model_type in MODEL_REMAPPING
