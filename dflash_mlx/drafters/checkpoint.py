"""Drafter folders -> drafters: z-lab's layout and that of speculators, quantized or not."""

import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.config import DraftConfig, parse_draft_config
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.drafters.dflash2 import DFlash2Drafter
from dflash_mlx.drafters.torch_file import read_mask_embedding
from dflash_mlx.errors import WRONG_VALUES, CheckpointError
from dflash_mlx.hub.folder import read_json
from dflash_mlx.runtime import lacks_bfloat16
from dflash_mlx.targets.loading import expand, keeps_quantized

Weights = dict[str, mx.array]

CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
MASK_FILE = "mask_embedding.pt"
_GROUP = 64  # weights that share a scale, where a drafter is quantized on loading
# Copies of the target's own weights that speculators may write; the drafter uses the target's.
_COPIES = ("embed_tokens.", "verifier_norm.", "verifier_lm_head.")


@dataclass
class Checkpoint:
    """A drafter folder as it was read: config.json, what it means, and tensors under the names of this package."""

    raw: dict[str, Any]
    config: DraftConfig
    weights: Weights


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read config.json and the safetensors files. Raises CheckpointError."""
    raw = read_json(folder / "config.json")
    config = parse_draft_config(raw)
    weights = _tidy(_read_weights(folder))
    ids = _reduced_vocabulary(raw, config, weights)
    if ids:
        config = replace(config, draft_token_ids=ids, own_head="lm_head.weight" in weights)
    elif config.draft_token_ids and "lm_head.weight" in weights:
        config = replace(config, own_head=True)
    else:
        # Over the whole vocabulary it is a copy of the target's.
        for name in [name for name in weights if name.startswith("lm_head.")]:
            del weights[name]
    if "mask_embedding" not in weights and (folder / MASK_FILE).exists():
        weights["mask_embedding"] = read_mask_embedding(folder / MASK_FILE, config.mask_token_id)
    if "mask_embedding" in weights:
        weights["mask_embedding"] = weights["mask_embedding"].reshape(-1)
        config = replace(config, own_mask_embedding=True)
    return Checkpoint(raw, config, weights)


def _read_weights(folder: Path) -> Weights:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no .safetensors file in the drafter folder {folder}.")
    weights: Weights = {}
    try:
        for file in files:
            weights.update(cast(Weights, mx.load(str(file))))
    except RuntimeError as error:
        raise CheckpointError(f"cannot read the drafter's weights in {folder}: {error}") from error
    return weights


def _tidy(weights: Weights) -> Weights:
    """The names of this package: the public codebooks and mask rows come with and without ".weight"."""
    renamed = {name: f"{name}.weight" for name in CODEBOOKS} | {"mask_embedding.weight": "mask_embedding"}
    return {renamed.get(name, name): x for name, x in weights.items() if not name.startswith(_COPIES)}


def _reduced_vocabulary(raw: dict[str, Any], config: DraftConfig, weights: Weights) -> tuple[int, ...]:
    """The target's ids of the tokens that the drafter drafts, where a tensor says so; takes it out of `weights`."""
    offsets = weights.pop("d2t", None)
    weights.pop("t2d", None)
    size = raw.get("draft_vocab_size")
    if size in (None, config.vocab_size):
        return ()
    if offsets is None:
        raise CheckpointError(
            f"the drafter drafts {size} of {config.vocab_size} tokens, and the tensor d2t, which says which ones, is "
            "missing; the checkpoint is incomplete."
        )
    ids = cast("list[int]", (mx.arange(offsets.shape[0]) + offsets.astype(mx.int64)).tolist())
    if len(ids) != size or len(set(ids)) != size or not all(0 <= i < config.vocab_size for i in ids):
        raise CheckpointError(
            f"the drafter's tensor d2t should name {size} different tokens of {config.vocab_size}; found {len(ids)} "
            f"entries from {min(ids, default=0)} to {max(ids, default=0)}. Fetch the folder again."
        )
    return tuple(ids)


def make_drafter(config: DraftConfig) -> DFlashDrafter:
    """A drafter with random weights."""
    return DFlash2Drafter(config) if config.is_dflash2 else DFlashDrafter(config)


def load_drafter(folder: Path, *, dtype: mx.Dtype, keep_quantized: bool | None = None) -> DFlashDrafter:
    """Read a drafter folder: config.json and safetensors in a public layout, quantized or not.

    `dtype` is the target's, and that of activations and unquantized weights unless it does not suit a drafter (see
    `drafter_precision`). Quantized weights are kept or expanded as `keep_quantized` says; None does what is faster
    here. Raises CheckpointError.
    """
    checkpoint = read_checkpoint(folder)
    weights = checkpoint.weights
    quantization = checkpoint.raw.get("quantization")
    try:
        drafter = _drafter_without_weights(checkpoint, quantization)
    except WRONG_VALUES as error:
        raise CheckpointError(
            f"cannot build a drafter as config.json in {folder} describes it: {error}. Fetch the folder again."
        ) from error
    try:
        drafter.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        what = textwrap.shorten(str(error), 300)
        raise CheckpointError(
            f"the drafter's weights in {folder} do not fit its config.json: {what} Fetch the folder again; if that "
            "does not help, it is of a kind that this version does not run."
        ) from error
    activations, bits = drafter_precision(dtype, lacks_bfloat16=lacks_bfloat16())
    if quantization:
        if keep_quantized is None:
            keep_quantized = keeps_quantized(drafter, activations)
        if not keep_quantized:
            drafter = cast(DFlashDrafter, expand(drafter, activations))
    elif bits is not None and keep_quantized is not False:
        nn.quantize(drafter, bits=bits, group_size=_GROUP, class_predicate=_can_quantize)
    drafter.set_dtype(activations)
    drafter.eval()
    mx.eval(drafter.parameters())
    return drafter


def _drafter_without_weights(checkpoint: Checkpoint, quantization: dict[str, Any] | None) -> DFlashDrafter:
    """The drafter that the weights are put into, with quantized layers where they are quantized."""
    drafter = make_drafter(checkpoint.config)
    if quantization:
        nn.quantize(
            drafter,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            mode=quantization.get("mode", "affine"),
            class_predicate=lambda path, module: (
                hasattr(module, "to_quantized") and f"{path}.scales" in checkpoint.weights
            ),
        )
    return drafter


def drafter_precision(dtype: mx.Dtype, *, lacks_bfloat16: bool) -> tuple[mx.Dtype, int | None]:
    """What a drafter computes in beside a target in `dtype`, and the bits that its weights are brought to, if any.

    Never float16: drafters are trained in bfloat16, overflow in it, and then draft nonsense. A chip that only imitates
    bfloat16 is fastest with float32 activations over 4-bit weights (M1 Max: 1.39 times plain decoding, against 1.20
    in bfloat16); what small weights save in reading is more than what wide activations cost.
    """
    if dtype == mx.float32:
        return mx.float32, None
    return (mx.float32, 4) if lacks_bfloat16 else (mx.bfloat16, None)


def _can_quantize(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % _GROUP == 0
