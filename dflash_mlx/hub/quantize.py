"""Drafter checkpoints -> one quantized safetensors file, as mlx-lm lays quantized models out."""

import json
from pathlib import Path
from typing import Any

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.folder import check_folder, read_json

# What a training run leaves in config.json and readers of a checkpoint do not need.
_DROPPED = ("eval",)


def quantize_drafter(source: Path, folder: Path, *, bits: int = 8, group_size: int = 64) -> None:
    """Write the drafter in `source` to the existing `folder`: matrices quantized (affine), the rest in bfloat16.

    The config keeps the DFlash fields and gains mlx-lm's `quantization`. Raises CheckpointError where `source` is not
    complete or already quantized.
    """
    import mlx.core as mx

    check_folder(source)
    config = read_json(source / "config.json")
    if "quantization" in config or "quantization_config" in config:
        raise CheckpointError(f"{source} is quantized already; expected a checkpoint in bfloat16 or float32.")
    arrays: dict[str, mx.array] = {}
    for path in sorted(source.glob("*.safetensors")):
        loaded: Any = mx.load(str(path))
        for name, values in loaded.items():
            if values.ndim != 2 or values.shape[1] % group_size:
                arrays[name] = values.astype(mx.bfloat16)
                continue
            stem = name.removesuffix(".weight")
            arrays[name], scales, biases = mx.quantize(values.astype(mx.float32), group_size, bits)
            arrays[f"{stem}.scales"] = scales.astype(mx.bfloat16)
            arrays[f"{stem}.biases"] = biases.astype(mx.bfloat16)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, metadata={"format": "mlx"})
    quantization: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": "affine"}
    kept = {key: value for key, value in config.items() if key not in _DROPPED}
    content = json.dumps({**kept, "dtype": "bfloat16", "quantization": quantization}, indent=2)
    (folder / "config.json").write_text(content + "\n", encoding="utf-8")
