"""Loading a target from its folder."""

import textwrap
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.errors import WRONG_VALUES, CheckpointError
from dflash_mlx.hub.folder import read_json
from dflash_mlx.ranks.group import Group
from dflash_mlx.targets.division import divide
from dflash_mlx.targets.target import Target, wrap_model

# On CUDA a quantized model is expanded while it then takes no more than this share of the memory.
_EXPANDED_SHARE = 0.25
# Layers or experts of a model, so many that a config which names more is damaged.
_MOST_PARTS = 10_000


def load_target(folder: Path, *, dtype: str, group: Group | None = None) -> tuple[Target, mx.Dtype]:
    """Load a model folder with mlx-lm: `open_target`, and its weights are read. Raises CheckpointError."""
    target, wanted = open_target(folder, dtype=dtype, group=group)
    mx.eval(target.model.parameters())
    return target, wanted


def open_target(folder: Path, *, dtype: str, group: Group | None = None) -> tuple[Target, mx.Dtype]:
    """A target whose weights MLX reads when they are used first. `dtype`: a name or "auto" (`runtime.resolve_dtype`).

    group: only this rank's share; the target's head stays whole, since rank 0's drafter uses it.

    Quantized weights are expanded where MLX's quantized products are slower than plain ones: on a CPU, and on CUDA
    while the expanded model takes little of the memory. The checkpoint's own Python is never run. Returns the target
    and its activation dtype. Raises CheckpointError.
    """
    from mlx_lm.utils import load_model

    from dflash_mlx.runtime import resolve_dtype

    config = read_json(folder / "config.json")
    _check_counts(config, folder)
    try:
        model, config = load_model(folder, lazy=True)
    except (FileNotFoundError, AssertionError, *WRONG_VALUES) as error:
        what = textwrap.shorten(str(error), 300) or "its config.json does not fit together."
        raise CheckpointError(f"cannot load the model in {folder}: {what}") from error
    wanted = resolve_dtype(dtype, model_dtype=activation_dtype(model))
    if keeps_quantized(model, wanted):
        model.set_dtype(wanted)
    else:
        model = expand(model, wanted)
    target = wrap_model(model, config)
    if group is not None:
        divide(target, group)
    return target, wanted


def _check_counts(config: dict[str, Any], folder: Path) -> None:
    """Refuse more layers or experts than models have, before mlx-lm makes each of them."""
    for part in (config, config.get("text_config")):
        for name, count in part.items() if isinstance(part, dict) else ():
            if name.endswith(("layers", "experts")) and isinstance(count, int | float) and count > _MOST_PARTS:
                raise CheckpointError(
                    f"cannot load the model in {folder}: its config.json has a larger {name} than any model; "
                    f"expected at most {_MOST_PARTS}. Fetch the folder again."
                )


def keeps_quantized(model: nn.Module, dtype: mx.Dtype) -> bool:
    """Whether this machine computes faster with a model's quantized weights than with expanded ones."""
    from mlx_lm.utils import get_total_parameters

    from dflash_mlx.runtime import backend

    machine = backend()
    if machine.kind == "cuda":
        return bool(get_total_parameters(model) * dtype.size > _EXPANDED_SHARE * machine.memory_bytes)
    return machine.kind == "metal"


def expand(model: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """Dequantize a model's weights into `dtype`, by way of float32, so that no bit is lost before the last rounding."""
    from mlx_lm.utils import dequantize_model

    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    model.set_dtype(dtype)
    return model


def activation_dtype(model: nn.Module) -> mx.Dtype:
    """The floating dtype most of a model's own arrays have (scales and norms, for a quantized one)."""
    counts: dict[mx.Dtype, int] = {}
    for array in dict(tree_flatten(model.parameters())).values():
        if mx.issubdtype(array.dtype, mx.floating):
            counts[array.dtype] = counts.get(array.dtype, 0) + 1
    return max(counts, key=lambda kind: counts[kind])
