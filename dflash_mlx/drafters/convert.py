"""Drafters from one public layout into the other, z-lab's and that of speculators, with the very same weights."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from dflash_mlx.drafters.checkpoint import CODEBOOKS, Checkpoint, Weights, read_checkpoint
from dflash_mlx.drafters.config import DFLASH2_FIELDS, DraftConfig
from dflash_mlx.drafters.dialects import from_speculators, is_speculators
from dflash_mlx.drafters.loading import method_of
from dflash_mlx.drafters.methods import Method
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.hub.folder import read_json
from dflash_mlx.hub.new_folder import write_new_folder

Layout = Literal["zlab", "speculators"]

_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")
# What does not belong to the shape of the layers, which speculators nests. The rest is kept as it is.
_AROUND_LAYERS = (
    "architectures",
    "auto_map",
    "block_size",
    "dflash_config",
    "draft_vocab_size",
    "is_causal",
    "mask_token_id",
    "target_layer_ids",
)


def layout_of(raw: dict[str, Any]) -> Layout:
    """The layout of a drafter's config.json."""
    return "speculators" if is_speculators(raw) else "zlab"


def convert_drafter(
    source: Path, folder: Path, *, to: Layout, target: str | None = None, target_layers: int | None = None
) -> list[str]:
    """Write the drafter in `source` to the new `folder` in another layout. Returns notes for the user, a line each.

    target: the target's name or folder, which speculators' config names. target_layers: how many layers it has, which
    z-lab's config names. Raises CheckpointError where the source cannot be read or the layout has no place for what it
    holds, UsageError where it is of another kind, has that layout already, or `folder` exists.
    """
    found = method_of(read_json(source / "config.json"))
    if found is not Method.dflash:
        what = "a language model" if found is Method.draft_model else f"a drafter for {found.value}"
        raise UsageError(f"only DFlash drafters are converted; {source} holds {what}, which is read in its own layout.")
    checkpoint = read_checkpoint(source)
    if layout_of(checkpoint.raw) == to:
        raise UsageError(f"{source} is in the layout of {_NAMES[to]} already; nothing is to be converted.")
    if checkpoint.raw.get("quantization"):
        raise CheckpointError(
            f"the drafter in {source} is quantized, and the layout of {_NAMES[to]} holds plain weights. "
            "Convert the drafter that it was made from."
        )
    if to == "zlab":
        config, weights = _to_zlab(checkpoint, target_layers)
        notes = _zlab_notes(config)
    else:
        config, weights = _to_speculators(checkpoint, target)
        notes = _speculators_notes(checkpoint, target)

    def build(work: Path) -> None:
        mx.save_safetensors(str(work / "model.safetensors"), weights, {"format": "pt"})
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for pattern in _LICENCES:
            for path in source.glob(pattern):
                shutil.copyfile(path, work / path.name)

    write_new_folder(folder, build)
    return notes


_NAMES = {"zlab": "z-lab", "speculators": "speculators"}


def zlab_config(raw: dict[str, Any]) -> dict[str, Any]:
    """A drafter's config.json in z-lab's layout, but for a reduced vocabulary and the number of the target's layers."""
    config = {**(from_speculators(raw) if is_speculators(raw) else raw)}
    config.pop("draft_vocab_size", None)
    return config | {"dflash_config": {**config["dflash_config"]}}


def _to_zlab(checkpoint: Checkpoint, target_layers: int | None) -> tuple[dict[str, Any], Weights]:
    config = zlab_config(checkpoint.raw)
    config["num_target_layers"] = target_layers or config.get("num_target_layers")
    ids = checkpoint.config.draft_token_ids
    if ids:
        config["dflash_config"]["draft_token_ids"] = list(ids)
    return config, public_names(checkpoint.weights)


def _to_speculators(checkpoint: Checkpoint, target: str | None) -> tuple[dict[str, Any], Weights]:
    config, raw = checkpoint.config, checkpoint.raw
    _require_expressible(config)
    kind = "dflash2" if config.is_dflash2 else "dflash"
    sliding = config.sliding_window is not None and "sliding_attention" in config.layer_types
    layer = {name: value for name, value in raw.items() if name not in _AROUND_LAYERS}
    layer |= {
        "model_type": "qwen3",
        "head_dim": config.head_dim,
        "num_key_value_heads": config.num_key_value_heads,
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window,
    }
    size = len(config.draft_token_ids) or config.vocab_size
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    converted = {
        "architectures": ["DFlash2DraftModel" if config.is_dflash2 else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": size,
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": sliding and config.is_causal is False,
        **({name: getattr(config, name) for name in DFLASH2_FIELDS} if config.is_dflash2 else {}),
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }
    weights = public_names(checkpoint.weights)
    if config.draft_token_ids:
        ids = mx.array(config.draft_token_ids, dtype=mx.int64)
        weights["d2t"] = ids - mx.arange(size, dtype=mx.int64)
        weights["t2d"] = mx.zeros(config.vocab_size, dtype=mx.bool_).at[ids].add(True)
    return converted, weights


def public_names(weights: Weights) -> Weights:
    """Tensors under their public names."""
    return {name.removesuffix(".weight") if name.startswith(CODEBOOKS) else name: x for name, x in weights.items()}


def _require_expressible(config: DraftConfig) -> None:
    """Refuse what the layout of speculators has no field for: the drafter would draft something else with it."""
    full = "full_attention" in config.layer_types
    found = [
        (config.output_multiplier != 1.0, f"an output_multiplier ({config.output_multiplier:g})"),
        (config.input_embedding_scale != 1.0, f"an input_embedding_scale ({config.input_embedding_scale:g})"),
        (bool(config.final_logit_softcapping), f"a final_logit_softcapping ({config.final_logit_softcapping})"),
        (config.own_mask_embedding, "a mask embedding of its own"),
        (bool(config.ropes), "rotary embeddings that differ by layer type"),
        (bool(config.is_causal) and full, "full attention that is causal inside the block (is_causal)"),
        (config.is_dflash2 and bool(config.draft_token_ids), "a selector over a reduced vocabulary"),
    ]
    parts = [words for there, words in found if there]
    if parts:
        raise CheckpointError(
            f"the drafter has {' and '.join(parts)}, for which the layout of speculators has no field. "
            "Keep it in z-lab's layout, which this program and the official loader read."
        )


def _zlab_notes(config: dict[str, Any]) -> list[str]:
    notes = []
    if config["num_target_layers"] is None:
        notes.append(
            "num_target_layers stays empty, since the source does not say it; dflash-mlx needs none, the official "
            "loader does: give the target's folder with --model"
        )
    if "draft_token_ids" in config["dflash_config"]:
        notes.append(
            "the reduced vocabulary is kept as dflash_config.draft_token_ids, which dflash-mlx reads and the official "
            "loader does not"
        )
    return notes


def _speculators_notes(checkpoint: Checkpoint, target: str | None) -> list[str]:
    notes = []
    if target is None:
        notes.append("the config names no target; vLLM needs one: give it with --model")
    if checkpoint.config.draft_token_ids and not checkpoint.config.own_head:
        notes.append(
            "the tensors d2t and t2d name the drafted tokens; the drafter has no head of its own (lm_head) for them, "
            "which dflash-mlx takes from the target and vLLM wants in the checkpoint"
        )
    return notes
