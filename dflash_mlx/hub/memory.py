"""How much memory a pair needs, and whether this machine has it.

Sizes come from the files where they are on this disk, else from the registry, else from the number of parameters in
the target's name and the precision in the repository's: good to a tenth or so, and marked as estimated.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.errors import WRONG_VALUES, CheckpointError
from dflash_mlx.hub.folder import TORCH_WEIGHTS, read_json
from dflash_mlx.hub.naming import split_precision, text_config
from dflash_mlx.hub.registry import ModelSource, PairSpec

CONTEXT = 8192  # tokens of conversation that the estimate leaves room for
# The rest of the system, activations and MLX's own buffers take the other quarter; it is also about what macOS lets
# the GPU use without a change of its limits.
SHARE = 0.75
_UNMARKED_BITS = 16.0
_CACHE_SHARE = 0.1  # of the target, where its config is not at hand


@dataclass(frozen=True)
class Needs:
    """Memory in bytes; None where unknown. `estimated`: some of it is worked out from names."""

    target: int | None
    drafter: int | None
    cache: int | None  # target's and drafter's, for CONTEXT tokens
    estimated: bool

    @property
    def total(self) -> int | None:
        parts = (self.target, self.drafter, self.cache)
        return None if None in parts else sum(part for part in parts if part is not None)

    def fits(self, memory_bytes: int) -> bool | None:
        """Whether the pair runs in this much memory with room for the rest; None where too little is known."""
        known = sum(part for part in (self.target, self.drafter, self.cache) if part is not None)
        if known > memory_bytes * SHARE:
            return False
        return None if self.total is None else True


def pair_needs(spec: PairSpec, *, target: Path | None, drafter: Path | None) -> Needs:
    """What a pair takes. target and drafter: their folders, where they are on this disk."""
    config = read_json(target / "config.json") if target else None
    target_bytes = _bytes(target, spec.target) or _from_name(spec)
    drafter_bytes = _bytes(drafter, spec.drafter)
    cache = None
    if config is not None:
        cache = cache_bytes(config)
        if drafter is not None:
            cache += drafter_cache_bytes(read_json(drafter / "config.json"), target=config)
    elif target_bytes is not None:
        cache = round(target_bytes * _CACHE_SHARE)
    return Needs(target_bytes, drafter_bytes, cache, estimated=target is None or drafter is None)


def cache_bytes(config: dict[str, Any], *, tokens: int = CONTEXT) -> int:
    """Keys and values of full attention over `tokens` tokens in 2 bytes each: the most that a model's caches take.

    Raises CheckpointError.
    """
    try:
        return _cache_bytes(text_config(config), tokens)
    except WRONG_VALUES as error:
        raise CheckpointError(f"the model's config.json holds a value that cannot be: {error}.") from error


def drafter_cache_bytes(config: dict[str, Any], *, target: dict[str, Any], tokens: int = CONTEXT) -> int:
    """What a drafter keeps of `tokens` tokens, by its config.json and its target's: keys and values, and features.

    Medusa heads keep the target's last hidden state of each, EAGLE-3 its own feature of each. Raises CheckpointError.
    """
    shape = {**config, **(config.get("transformer_layer_config") or {})}  # speculators nests the layers' shape
    try:
        kinds = [config.get("speculators_model_type"), *(config.get("architectures") or ())]
        if "medusa_num_heads" in config:
            return 2 * tokens * int(text_config(target).get("hidden_size") or 0)
        if any("eagle" in str(kind).lower() for kind in kinds):
            notes = 2 * tokens * int(shape.get("hidden_size") or 0)
            return notes + cache_bytes({**shape, "num_hidden_layers": 1}, tokens=tokens)
    except WRONG_VALUES as error:
        raise CheckpointError(f"the drafter's config.json holds a value that cannot be: {error}.") from error
    return cache_bytes(shape, tokens=tokens)


def _cache_bytes(text: dict[str, Any], tokens: int) -> int:
    heads = int(text.get("num_attention_heads") or 1)
    width = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    full = _full_layers(text)
    return 2 * 2 * tokens * full * kv_heads * width


def folder_bytes(folder: Path) -> int:
    """Size of a folder's weights. A drafter's may be in a file of PyTorch."""
    files = [*folder.glob("*.safetensors")] or [folder / name for name in TORCH_WEIGHTS if (folder / name).exists()]
    return sum(path.stat().st_size for path in files)


def _full_layers(text: dict[str, Any]) -> int:
    """Layers whose cache grows with the text: all, but for recurrent ones and those with a short window."""
    kinds = text.get("layer_types")
    layers = int(text.get("num_hidden_layers") or 0)
    if isinstance(kinds, list):
        return sum(kind in ("full_attention", "attention") for kind in kinds)
    interval = text.get("full_attention_interval")
    return layers // int(interval) if interval else layers


def _bytes(folder: Path | None, source: ModelSource) -> int | None:
    if folder is not None:
        return folder_bytes(folder)
    return source.disk_mb * 10**6 if source.disk_mb else None


def _from_name(spec: PairSpec) -> int | None:
    if spec.parameters_b is None or spec.target.repo is None:
        return None
    bits = split_precision(spec.target.repo)[1] or _UNMARKED_BITS
    return round(spec.parameters_b * 1e9 * bits / 8)
