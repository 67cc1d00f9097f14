"""Checkpoints in other precisions: targets through mlx-lm's functions, drafters tensor by tensor in their layout."""

import io
import json
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.hub.folder import check_folder, read_json, tensors_of
from dflash_mlx.hub.naming import is_drafter
from dflash_mlx.hub.own_head import brings_head

# mode -> (bits it can have, group sizes it can have); the first of each is the default.
MODES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "affine": ((4, 2, 3, 5, 6, 8), (64, 32, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")  # mlx-lm's, by the bits of most and of some layers
# What a training run leaves in config.json and readers of a checkpoint do not need.
_DROPPED = ("eval",)
_KEPT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How weights are stored. bits None: not quantized at all."""

    bits: int | None
    group_size: int = 64
    mode: str = "affine"
    recipe: str | None = None  # some layers get more bits, as mlx-lm's recipe of that name says

    def __str__(self) -> str:
        if self.bits is None:
            return "not quantized"
        return self.recipe or f"{self.bits} bits, groups of {self.group_size}, {self.mode}"


def choose_scheme(
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    recipe: str | None = None,
    dequantize: bool = False,
) -> Scheme:
    """A scheme from what the user said, defaults filled in. Raises UsageError for what MLX cannot store."""
    if dequantize:
        if bits or group_size or recipe or mode != "affine":
            raise UsageError("--dequantize goes with none of --bits, --group-size, --mode and --recipe.")
        return Scheme(bits=None)
    if mode not in MODES:
        raise UsageError(f"mode is {mode!r}; expected one of {', '.join(MODES)}.")
    if recipe is not None:
        if recipe not in RECIPES:
            raise UsageError(f"recipe is {recipe!r}; expected one of {', '.join(RECIPES)}.")
        if mode != "affine" or bits:
            raise UsageError(
                f"the recipe {recipe} chooses the bits itself, in affine mode: leave out --bits and --mode."
            )
        bits = int(recipe.split("_")[1])
    for name, value, allowed in (("bits", bits, MODES[mode][0]), ("group size", group_size, MODES[mode][1])):
        if value is not None and value not in allowed:
            words = ", ".join(map(str, sorted(allowed)))
            raise UsageError(f"{name} is {value}; MLX's {mode} mode has {words}.")
    default_bits, default_groups = MODES[mode][0][0], MODES[mode][1][0]
    return Scheme(bits=bits or default_bits, group_size=group_size or default_groups, mode=mode, recipe=recipe)


def quantize_folder(source: Path, folder: Path, scheme: Scheme) -> None:
    """Write the target or drafter in `source` to the existing, empty `folder` in another precision.

    A source that is quantized already is expanded first; what its quantization lost stays lost. Raises
    CheckpointError and UsageError.
    """
    check_folder(source)
    config = read_json(source / "config.json")
    if is_drafter(config):
        if scheme.recipe:
            raise UsageError("recipes are for targets; a drafter's layers all have the same bits.")
        convert_drafter(source, folder, scheme)
    else:
        _convert_target(source, folder, scheme)
    for pattern in _KEPT_FILES:
        for path in source.glob(pattern):
            # The new weights have their own config and index.
            if path.is_file() and not (folder / path.name).exists() and path.name != "model.safetensors.index.json":
                shutil.copyfile(path, folder / path.name)


def quantize_drafter(source: Path, folder: Path, *, bits: int = 8, group_size: int = 64) -> None:
    """Write the drafter in `source` to the existing `folder`: matrices quantized (affine), the rest in bfloat16.

    The config keeps the DFlash fields and gains mlx-lm's `quantization`. Raises CheckpointError where `source` is not
    complete or already quantized.
    """
    check_folder(source)
    if _quantization(read_json(source / "config.json")):
        raise CheckpointError(f"{source} is quantized already; expected a checkpoint in bfloat16 or float32.")
    convert_drafter(source, folder, Scheme(bits=bits, group_size=group_size))


def convert_drafter(source: Path, folder: Path, scheme: Scheme) -> None:
    """A drafter's tensors under the same names, one by one, so that every layout of a drafter stays what it is."""
    import mlx.core as mx

    from dflash_mlx.drafters.checkpoint import MASK_FILE, read_weights
    from dflash_mlx.drafters.config import parse_draft_config
    from dflash_mlx.drafters.torch_file import read_mask_embedding

    config = read_json(source / "config.json")
    arrays = _expanded(read_weights(source), _quantization(config))
    if (source / MASK_FILE).exists() and not any(name.startswith("mask_embedding") for name in arrays):
        # In the new folder the mask's own embedding lies with the other tensors.
        arrays["mask_embedding"] = read_mask_embedding(source / MASK_FILE, parse_draft_config(config).mask_token_id)
    mx.save_safetensors(str(folder / "model.safetensors"), _stored(arrays, scheme), metadata={"format": "mlx"})
    dropped = {*_DROPPED, "quantization", "quantization_config"}
    kept = {key: value for key, value in config.items() if key not in dropped} | {"dtype": "bfloat16"}
    if scheme.bits is not None:
        kept["quantization"] = {"group_size": scheme.group_size, "bits": scheme.bits, "mode": scheme.mode}
    (folder / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _stored(arrays: dict[str, Any], scheme: Scheme) -> dict[str, Any]:
    """Tensors in a scheme: matrices quantized, and all that is not in bfloat16."""
    import mlx.core as mx

    stored: dict[str, Any] = {}
    for name, values in arrays.items():
        if not mx.issubdtype(values.dtype, mx.floating):
            stored[name] = values  # maps between vocabularies
            continue
        # A router's small matrix decides what is computed at all.
        matrix = name.endswith(".weight") and not name.endswith("gate.weight") and values.ndim >= 2
        if scheme.bits is None or not matrix or values.shape[-1] % scheme.group_size:
            stored[name] = values.astype(mx.bfloat16)
            continue
        parts = mx.quantize(values.astype(mx.float32), scheme.group_size, scheme.bits, mode=scheme.mode)
        stem = name.removesuffix(".weight")
        for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
            floating = mx.issubdtype(array.dtype, mx.floating)
            stored[f"{stem}.{part}"] = array.astype(mx.bfloat16) if floating else array
    return stored


def _keep_head(source: Path, folder: Path, model: Any, scheme: Scheme) -> None:
    """Write a target's head for multi-token prediction, which mlx-lm leaves out, into a file of its own."""
    import mlx.core as mx

    from dflash_mlx.drafters.mtp import as_layer, read_head

    config = read_json(source / "config.json")
    head = _expanded(as_layer(read_head(source, config), model), _quantization(config))
    stored = {f"mtp.{name}": array for name, array in _stored(head, scheme).items()}
    mx.save_safetensors(str(folder / "mtp.safetensors"), stored, metadata={"format": "mlx"})


def _expanded(arrays: dict[str, Any], quantization: dict[str, Any] | None) -> dict[str, Any]:
    """Tensors of a drafter with quantized ones expanded to float32."""
    if not quantization:
        return dict(arrays)
    stems = {name.removesuffix(".scales") for name in arrays if name.endswith(".scales")}
    found = {}
    for name, values in arrays.items():
        stem, _, part = name.rpartition(".")
        if stem in stems and part == "weight":
            found[name] = _expand_one(arrays, stem, quantization)
        elif stem not in stems or part not in ("scales", "biases"):
            found[name] = values
    return found


def _expand_one(arrays: dict[str, Any], stem: str, quantization: dict[str, Any]) -> Any:
    import mlx.core as mx

    mode = quantization.get("mode", "affine")
    scales, biases = arrays[f"{stem}.scales"], arrays.get(f"{stem}.biases")
    if mode == "affine":
        # By way of float32, so that nothing is rounded twice.
        scales, biases = scales.astype(mx.float32), None if biases is None else biases.astype(mx.float32)
    group_size, bits = int(quantization["group_size"]), int(quantization["bits"])
    return mx.dequantize(arrays[f"{stem}.weight"], scales, biases, group_size=group_size, bits=bits, mode=mode)


def _convert_target(source: Path, folder: Path, scheme: Scheme) -> None:
    import mlx.core as mx
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    from dflash_mlx.targets.loading import activation_dtype, expand

    try:
        model, config = load_model(source, lazy=True)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot load the model in {source}: {error}") from error
    if _quantization(config):
        model = expand(model, activation_dtype(model))
        config = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
    if scheme.bits is not None:
        predicate: Any = None
        if scheme.recipe is not None:
            predicate = mixed_quant_predicate_builder(scheme.recipe, model, scheme.group_size)
        with redirect_stdout(io.StringIO()):  # mlx-lm prints the bits a weight, which the report has, too
            model, config = quantize_model(
                model, config, scheme.group_size, scheme.bits, mode=scheme.mode, quant_predicate=predicate
            )
    _check_space(folder, model)
    mx.eval(model.parameters())
    save_model(folder, model, donate_model=True)
    save_config(config, config_path=folder / "config.json")
    if brings_head(source):
        _keep_head(source, folder, model, scheme)


def _check_space(folder: Path, model: Any) -> None:
    from dflash_mlx.targets.target import weight_bytes

    needed = weight_bytes(model)
    free = shutil.disk_usage(folder).free
    if free < needed * 1.01:
        raise CheckpointError(
            f"the result has {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free at {folder.parent}. "
            "Make room, or name a folder on another disk with --out."
        )


def _quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    return config.get("quantization") or config.get("quantization_config")


def bits_per_weight(folder: Path) -> float | None:
    """Bits that a folder's files spend on one weight, scales included; None where its config says too little.

    The weights are counted from the tensors' shapes, packed ones at the bits that their scales' shapes give away.
    """
    total_bits = weights = 0
    quantization = _quantization(read_json(folder / "config.json")) or {}
    for path in sorted(folder.glob("*.safetensors")):
        header = tensors_of(path)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            total_bits += (end - start) * 8
            stem, _, part = name.rpartition(".")
            if part in ("scales", "biases") and f"{stem}.weight" in header:
                continue
            count = 1
            for size in entry["shape"]:
                count *= size
            if part == "weight" and f"{stem}.scales" in header:
                own = quantization.get(stem)
                bits = (own if isinstance(own, dict) else quantization).get("bits")
                if not bits:
                    return None
                count = count * 32 // int(bits)
            weights += count
    return total_bits / weights if weights else None


def model_card(name: str, scheme: Scheme, facts: dict[str, Any], *, base: str | None, license_name: str | None) -> str:
    """The README.md of a quantized folder. facts: what the report says (see cli/quantize.py)."""
    lines = ["---", "library_name: mlx", f"license: {license_name or 'other'}"]
    if base:
        lines += [f"base_model: {base}", "base_model_relation: quantized"]
    lines += ["tags: [mlx]", "---", "", f"# {name}", ""]
    origin = f"`{base}`" if base else facts.get("source", "a model")
    lines += [f"Converted with dflash-mlx from {origin}: {scheme}.", ""]
    rows = [f"| {key.replace('_', ' ')} | {value} |" for key, value in facts.items() if value is not None]
    lines += ["| | |", "| --- | --- |", *rows, ""]
    return "\n".join(lines)
