"""Whether a target brings a head of its own for multi-token prediction, seen without reading weights."""

import re
from pathlib import Path

from dflash_mlx.hub.folder import read_json, tensors_of
from dflash_mlx.hub.naming import families_of

# The model files of mlx-lm whose targets' heads can be run (`drafters.mtp`).
HEAD_FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
HEAD_TENSOR = re.compile(r"(?:^|\.)mtp\.(.+)$")
_FURTHER_LAYER = re.compile(r"layers\.[1-9]")


def brings_head(folder: Path) -> bool:
    """Whether a target's folder has a head that can be run. Raises CheckpointError."""
    if not set(families_of(read_json(folder / "config.json"))) & set(HEAD_FAMILIES):
        return False
    names = [name for file in sorted(folder.glob("*.safetensors")) for name in tensors_of(file)]
    head = [found[1] for name in names if (found := HEAD_TENSOR.search(name))]
    return bool(head) and not further_layers(head)


def further_layers(names: list[str]) -> list[str]:
    """Those tensors of a head, named without "mtp.", that belong to layers after the first, which are not run."""
    return sorted(name for name in names if _FURTHER_LAYER.match(name))
