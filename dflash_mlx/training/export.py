"""The finished drafter as a folder in the public checkpoint layout, with a model card and curves."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.checkpoint import CODEBOOKS
from dflash_mlx.drafters.config import DFLASH2_FIELDS, DraftConfig
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.errors import DFlashError
from dflash_mlx.hub.new_folder import explain_failed_writes
from dflash_mlx.hub.quantize import quantize_drafter
from dflash_mlx.hub.upload import upload
from dflash_mlx.training.curves import Curve, draw_curves
from dflash_mlx.training.state import write_atomic, write_json, write_text
from dflash_mlx.training.trees import flat

PUBLIC_FILES = ("config.json", "model.safetensors", "README.md", "curves.svg", "train.json")
# What another checkpoint's config.json says about its own export.
_NOT_KEPT = ("quantization", "quantization_config", "draft_token_ids")
_GENERATE = 'dflash-mlx generate "Why is the sky blue?"'
_KINDS = {"dflash": "DFlash", "dflash2": "DFlash 2"}


def checkpoint_config(config: DraftConfig) -> dict[str, Any]:
    """config.json of a drafter as the public checkpoints have it.

    block_size stands in both places that readers look for it.
    """
    sliding = config.sliding_window is not None
    return {
        **kind_fields(config),
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            **dflash2_fields(config),
        },
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_target_layers": config.num_target_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": True,
        "layer_types": list(config.layer_types),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window,
        "dtype": "bfloat16",
    }


def kind_fields(config: DraftConfig) -> dict[str, Any]:
    """What tells DFlash 2 from DFlash in a config.json, at its top."""
    said = {} if config.is_causal is None else {"is_causal": config.is_causal}
    return {"architectures": ["DFlash2DraftModel" if config.is_dflash2 else "DFlashDraftModel"], **said}


def dflash2_fields(config: DraftConfig) -> dict[str, Any]:
    """The sizes of DFlash 2's parts, which are in `dflash_config`; none for DFlash."""
    return {name: getattr(config, name) for name in DFLASH2_FIELDS} if config.is_dflash2 else {}


def export_drafter(
    drafter: DFlashDrafter,
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    quantize: int | None,
    draft_token_ids: Sequence[int] = (),
) -> None:
    """Write config.json and model.safetensors (bfloat16, or `quantize` bits) to `folder`.

    config: the config.json to keep, for a drafter that came from another checkpoint, whatever parts it has gained.
    draft_token_ids: the only tokens to draft; empty for all.
    """
    config = config or checkpoint_config(drafter.config)
    config = {key: value for key, value in config.items() if key not in _NOT_KEPT}
    nested = {key: value for key, value in (config.get("dflash_config") or {}).items() if key not in _NOT_KEPT}
    nested |= {"draft_token_ids": list(draft_token_ids)} if draft_token_ids else {}
    config |= kind_fields(drafter.config) | {"dflash_config": nested | dflash2_fields(drafter.config)}
    weights = {public_name(name): x.astype(mx.bfloat16) for name, x in flat(drafter.parameters()).items()}
    mx.eval(weights)
    folder.mkdir(parents=True, exist_ok=True)
    if quantize is None:
        write_atomic(
            folder / "model.safetensors", lambda part: mx.save_safetensors(str(part), weights, {"format": "mlx"})
        )
        write_json(folder / "config.json", config)
        return
    group_size = _group_size(drafter)
    plain, small = folder / "work" / "plain", folder / "work" / "quantized"
    with explain_failed_writes(folder / "model.safetensors"):
        try:
            for place in (plain, small):
                place.mkdir(parents=True, exist_ok=True)
            mx.save_safetensors(str(plain / "model.safetensors"), weights, {"format": "mlx"})
            write_json(plain / "config.json", config)
            quantize_drafter(plain, small, bits=quantize, group_size=group_size)
            for name in ("model.safetensors", "config.json"):
                (small / name).replace(folder / name)
        finally:
            for place in (plain, small):
                shutil.rmtree(place, ignore_errors=True)


def public_name(name: str) -> str:
    """A tensor's name in the public checkpoints, where the selector's codebooks are not modules."""
    stem = name.removesuffix(".weight")
    return stem if stem in CODEBOOKS else name


def _group_size(drafter: DFlashDrafter) -> int:
    """The largest of MLX's group sizes that divides the rows of every matrix; codebooks are not quantized."""
    matrices = (x for name, x in flat(drafter.parameters()).items() if x.ndim == 2 and public_name(name) == name)
    widths = {int(x.shape[1]) for x in matrices}
    for size in (64, 32):
        if all(width % size == 0 for width in widths):
            return size
    raise DFlashError(f"cannot quantize matrices of widths {sorted(widths)}: none of 64 and 32 divides them all.")


def write_report(
    folder: Path, facts: dict[str, Any], *, losses: list[list[float]], replays: list[dict[str, Any]]
) -> None:
    """train.json, curves.svg and the model card."""
    write_json(folder / "train.json", facts)
    picture = draw_curves(
        [
            Curve("training loss by step", "#c0392b", [(point[0], point[2]) for point in losses]),
            Curve(
                "acceptance length on held-out answers (replay) by step",
                "#2471a3",
                [(r["step"], r["mean_acceptance_length"]) for r in replays],
            ),
        ]
    )
    for name, text in (("curves.svg", picture), ("README.md", model_card(facts))):
        write_text(folder / name, text)


def _command(target: str) -> list[str]:
    """How to try the drafter. A target that is no Hub id lies somewhere on the reader's disk."""
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", target):
        return ["DIR is the folder of this drafter:", "", f"    {_GENERATE} --model {target} --draft-model DIR"]
    return [
        "TARGET is the folder of the target, DIR that of this drafter:",
        "",
        f"    {_GENERATE} --model TARGET --draft-model DIR",
    ]


def model_card(facts: dict[str, Any]) -> str:
    """The README.md of a drafter, from the facts of its training (see `pipeline.collect_facts`)."""
    target, data, recipe = facts["target"], facts["data"], facts["recipe"]
    lines = [
        "---",
        f"license: {facts['license'] or 'other'}",
        "library_name: mlx",
        *([f"base_model: {target}"] if "/" in target and not target.startswith("/") else []),
        "tags: [dflash, speculative-decoding, mlx]",
        "---",
        "",
        f"# A {_KINDS[recipe['heads']]} drafter for {target}",
        "",
        f"A block-diffusion drafter ({facts['parameters'] / 1e6:.1f}M parameters, {recipe['layers']} layers, blocks of "
        f"{recipe['block_size']}) that lets `{target}` answer faster without changing its answers. "
        "It shares the target's embedding and vocabulary head and works with that target only.",
        "",
        *_dflash2_words(recipe),
        *_command(target),
        "",
        "## Data",
        "",
        f"{data['conversations']:,} conversations ({data['tokens']:,} tokens), {data['origin']}. "
        f"{data['greedy']:,} answers are greedy; {data['looped']:,} were cut because they repeated themselves. "
        f"{data['held_out']:,} conversations were held out. None has more than {recipe['max_length']:,} tokens: expect "
        "worse drafts after longer contexts.",
        "",
        "## Training",
        "",
        f"{facts['steps']:,} steps in {facts['training_minutes']:.1f} minutes on {facts['device']}, "
        f"mlx {facts['mlx_version']}:",
        "",
        "```json",
        json.dumps(recipe, indent=2),
        "```",
        "",
        "![loss and acceptance](curves.svg)",
        "",
        "## Measured",
        "",
        *_figures(facts),
        "",
        *_vocabulary(facts),
        f"License: {facts['license'] or 'not stated; the data was written by the target, so its terms apply'}.",
        "",
    ]
    return "\n".join(lines)


def _dflash2_words(recipe: dict[str, Any]) -> list[str]:
    if recipe["heads"] == "dflash":
        return []
    return [
        f"Convolutions over {recipe['conv_kernel_size']} rows mix the places of a block in each layer, and a selector "
        f"(codes of {recipe['selector_rank']} numbers) chooses each draft among the head's best "
        f"{recipe['selector_top_k']} tokens by the draft before it.",
        "",
    ]


def _figures(facts: dict[str, Any]) -> list[str]:
    lines = ["| on held-out greedy answers | mean acceptance length | draft 1, 2, ... kept |", "| --- | --- | --- |"]
    for name, key in (("replay of the recorded answers", "replay"), ("the decode loop", "measured")):
        result = facts.get(key)
        if result:
            rates = " ".join(f"{rate:.2f}" for rate in result["per_position"])
            count = result.get("conversations", result.get("prompts"))
            lines.append(f"| {name} ({count}) | {result['mean_acceptance_length']:.3f} | {rates} |")
    return lines


def _vocabulary(facts: dict[str, Any]) -> list[str]:
    chosen = facts.get("draft_vocabulary")
    if not chosen:
        return []
    return [
        f"It drafts {chosen['tokens']:,} tokens only (`draft_token_ids` in config.json), which are "
        f"{chosen['covered']:.2%} of the answers' tokens in the training data and {chosen['covered_held_out']:.2%} of "
        "the held-out ones. The replay above was measured with the whole vocabulary.",
        "",
    ]


def push(folder: Path, repo: str, *, api: Any = None) -> str:
    """Upload the public files to a Hub repository, created where needed. Returns its address. Raises DFlashError.

    api: what to upload with, the Hub's HfApi unless given.
    """
    return upload(folder, repo, files=PUBLIC_FILES, api=api)
