"""Drafter folders -> drafters: z-lab's layout and that of speculators, quantized or not."""

import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.config import DraftConfig, parse_draft_config
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.drafters.dflash2 import DFlash2Drafter
from dflash_mlx.drafters.torch_file import read_mask_embedding, read_tensors
from dflash_mlx.errors import WRONG_VALUES, CheckpointError
from dflash_mlx.hub.folder import TORCH_WEIGHTS, read_json
from dflash_mlx.runtime import lacks_bfloat16
from dflash_mlx.targets.loading import expand, keeps_quantized

Weights = dict[str, mx.array]
Network = TypeVar("Network", bound=nn.Module)

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
    weights = _tidy(read_weights(folder))
    ids = reduced_vocabulary(weights, size=raw.get("draft_vocab_size"), of=config.vocab_size)
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


def read_weights(folder: Path) -> Weights:
    """All tensors of a folder's safetensors files, or of its file of PyTorch. Raises CheckpointError."""
    files = sorted(folder.glob("*.safetensors"))
    others = [folder / name for name in TORCH_WEIGHTS if (folder / name).exists()]
    if not files and not others:
        raise CheckpointError(f"no .safetensors file in the drafter folder {folder}.")
    if not files:
        return read_tensors(others[0])
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


def reduced_vocabulary(weights: Weights, *, size: int | None, of: int) -> tuple[int, ...]:
    """The target's ids of the `size` tokens that are drafted, out of a vocabulary `of` so many; () where it is all.

    The tensors that say so are taken out of `weights`. Raises CheckpointError.
    """
    offsets = weights.pop("d2t", None)
    weights.pop("t2d", None)
    if size in (None, of):
        return ()
    if offsets is None:
        raise CheckpointError(
            f"the drafter drafts {size} of {of} tokens, and the tensor d2t, which says which ones, is "
            "missing; the checkpoint is incomplete."
        )
    ids = cast("list[int]", (mx.arange(offsets.shape[0]) + offsets.astype(mx.int64)).tolist())
    if len(ids) != size or len(set(ids)) != size or not all(0 <= i < of for i in ids):
        raise CheckpointError(
            f"the drafter's tensor d2t should name {size} different tokens of {of}; found {len(ids)} "
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
    try:
        drafter = make_drafter(checkpoint.config)
    except WRONG_VALUES as error:
        raise CheckpointError(
            f"cannot build a drafter as config.json in {folder} describes it: {error}. Fetch the folder again."
        ) from error
    quantization = checkpoint.raw.get("quantization")
    return filled(
        drafter, checkpoint.weights, folder, quantization=quantization, dtype=dtype, keep_quantized=keep_quantized
    )


def filled(
    network: Network,
    weights: Weights,
    folder: Path,
    *,
    quantization: dict[str, Any] | None,
    dtype: mx.Dtype,
    keep_quantized: bool | None = None,
) -> Network:
    """A drafter's network with the weights from a folder, all of them, in the precision that suits it here.

    quantization: what config.json says of quantized weights, if it does; layers may have entries of their own. Raises
    CheckpointError; see `load_drafter`.
    """
    try:
        if quantization:
            _quantize_as(network, weights, quantization)
        network.load_weights(list(weights.items()), strict=True)
    except WRONG_VALUES as error:
        what = textwrap.shorten(str(error), 300).rstrip(". ")
        raise CheckpointError(
            f"the drafter's weights in {folder} do not fit its config.json: {what}. Fetch the folder again; if that "
            "does not help, it is of a kind that this version does not run."
        ) from error
    activations, bits = drafter_precision(dtype, lacks_bfloat16=lacks_bfloat16())
    if quantization:
        if keep_quantized is None:
            keep_quantized = keeps_quantized(network, activations)
        if not keep_quantized:
            network = cast(Network, expand(network, activations))
    elif bits is not None and keep_quantized is not False:
        nn.quantize(network, bits=bits, group_size=_GROUP, class_predicate=_can_quantize)
    network.set_dtype(activations)
    network.eval()
    mx.eval(network.parameters())
    return network


def _quantize_as(network: nn.Module, weights: Weights, quantization: dict[str, Any]) -> None:
    """Give a network quantized layers where the weights are."""

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in weights:
            return False
        own = next((value for name, value in quantization.items() if name.endswith(path)), None)
        return own if isinstance(own, dict) else True

    nn.quantize(
        network,
        group_size=quantization["group_size"],
        bits=quantization["bits"],
        mode=quantization.get("mode", "affine"),
        class_predicate=how,
    )


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
