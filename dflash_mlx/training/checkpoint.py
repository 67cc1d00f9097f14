"""What a training continues from: weights, optimizer and progress, in one file that a kill cannot damage."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map, tree_unflatten

from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.errors import CheckpointError
from dflash_mlx.training.batches import Place
from dflash_mlx.training.optimizers import make_optimizer
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.state import write_atomic
from dflash_mlx.training.trees import Tree, flat


@dataclass
class TrainState:
    """Everything that a continued training needs. `parameters` are the float32 masters.

    With `feature_sizes` (taps * D,) the master of the first matrix, `fc`, is the one for features that are divided by
    these sizes: see `weights`.
    """

    parameters: Tree
    optimizer: Tree
    step: int = 0
    seconds: float = 0.0
    place: Place = field(default_factory=Place)
    conversations: int = 0
    losses: list[list[float]] = field(default_factory=list)
    replays: list[dict[str, Any]] = field(default_factory=list)
    feature_sizes: mx.array | None = None


def weights(parameters: Tree, feature_sizes: mx.array | None, dtype: mx.Dtype) -> Tree:
    """The drafter's weights for the masters `parameters`, in the compute dtype."""
    if feature_sizes is not None:
        parameters = parameters | {"fc": {"weight": parameters["fc"]["weight"] / feature_sizes}}
    return tree_map(lambda x: x.astype(dtype), parameters)


def fresh_state(drafter: DFlashDrafter, options: TrainOptions, *, feature_sizes: mx.array | None = None) -> TrainState:
    """Training from the drafter's present weights; a new drafter's random `fc` is taken for divided features."""
    parameters = tree_map(lambda x: x.astype(mx.float32), drafter.parameters())
    if feature_sizes is not None and options.init_from is not None:
        parameters["fc"]["weight"] = parameters["fc"]["weight"] * feature_sizes
    optimizer = make_optimizer(options)
    optimizer.init(parameters)
    mx.eval(parameters, optimizer.state)
    return TrainState(parameters, optimizer.state, feature_sizes=feature_sizes)


def save_state(path: Path, state: TrainState) -> None:
    """Write the state as one safetensors file, whole or not at all."""
    arrays = {f"parameters.{name}": x for name, x in flat(state.parameters).items()}
    arrays |= {f"optimizer.{name}": x for name, x in flat(state.optimizer).items()}
    if state.feature_sizes is not None:
        arrays["features.sizes"] = state.feature_sizes
    progress = {
        "step": state.step,
        "seconds": state.seconds,
        "epoch": state.place.epoch,
        "index": state.place.index,
        "conversations": state.conversations,
        "losses": state.losses,
        "replays": state.replays,
    }
    write_atomic(path, lambda part: mx.save_safetensors(str(part), arrays, {"progress": json.dumps(progress)}))


def load_state(path: Path) -> TrainState | None:
    """The saved state, None where there is none. Raises CheckpointError."""
    if not path.exists():
        return None
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        arrays, metadata = loaded
        return _state(arrays, json.loads(metadata["progress"]))
    except (RuntimeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Delete it to start the training anew.") from error


def _state(arrays: dict[str, mx.array], progress: dict[str, Any]) -> TrainState:
    trees: dict[str, list[tuple[str, mx.array]]] = {"parameters": [], "optimizer": [], "features": []}
    for name, x in arrays.items():
        part, _, rest = name.partition(".")
        trees[part].append((rest, x))
    return TrainState(
        parameters=tree_unflatten(trees["parameters"]),
        optimizer=tree_unflatten(trees["optimizer"]),
        step=progress["step"],
        seconds=progress["seconds"],
        place=Place(progress["epoch"], progress["index"]),
        conversations=progress["conversations"],
        losses=progress["losses"],
        replays=progress["replays"],
        feature_sizes=dict(trees["features"]).get("sizes"),
    )


def budget_share(options: TrainOptions, state: TrainState) -> float:
    """How much of the training budget is spent, 0 to 1."""
    minutes, steps = options.training_budget
    by_time = state.seconds / 60 / minutes if minutes else 0.0
    by_steps = state.step / steps if steps else 0.0
    return min(1.0, max(by_time, by_steps))
