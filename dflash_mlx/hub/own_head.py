"""Whether a target brings a head of its own for multi-token prediction, seen without reading weights."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dflash_mlx.hub.folder import read_json, tensors_of
from dflash_mlx.hub.naming import families_of, text_config

# The model files of mlx-lm whose targets' heads can be run (`drafters.mtp`): those with tensors `mtp.*`, and those that
# store the head as one more of the target's layers.
NAMED = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
ONE_MORE = ("glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v3", "deepseek_v32")
HEAD_FAMILIES = (*NAMED, *ONE_MORE)
_MTP = re.compile(r"(?:^|\.)mtp\.(.+)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
# Parts of such a layer that other layers do not have, by their names in `mtp.*`, and copies of the target's own.
_PARTS = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
_COPIES = ("embed_tokens", "shared_head.head")
_FURTHER_LAYER = re.compile(r"layers\.[1-9]")


def brings_head(folder: Path) -> bool:
    """Whether a target's folder has a head that can be run. Raises CheckpointError."""
    config = read_json(folder / "config.json")
    if not set(families_of(config)) & set(HEAD_FAMILIES):
        return False
    names = [name for file in sorted(folder.glob("*.safetensors")) for name in tensors_of(file)]
    head = [own for name in names if (own := name_in_head(name, config))]
    return bool(head) and not further_layers(head)


def name_in_head(name: str, config: dict[str, Any]) -> str | None:
    """A tensor's name in the head, as in `mtp.*` without that part; None for those of the target with this config."""
    if found := _MTP.search(name):
        return found[1]
    found = _LAYER.search(name) if set(families_of(config)) & set(ONE_MORE) else None
    layer = int(found[1]) - int(text_config(config).get("num_hidden_layers") or 0) if found else -1
    if found is None or layer < 0:
        return None
    part, _, last = found[2].rpartition(".")
    if part in _COPIES:
        return None
    return f"{_PARTS[part]}.{last}" if layer == 0 and part in _PARTS else f"layers.{layer}.{found[2]}"


def further_layers(names: Iterable[str]) -> list[str]:
    """Those tensors of a head, named without "mtp.", that belong to layers after the first, which are not run."""
    return sorted(name for name in names if _FURTHER_LAYER.match(name))
