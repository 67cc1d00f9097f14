"""A target divided among several machines, by the `shard` of mlx-lm's model files (tensor parallelism).

Each machine has some of the heads of every attention layer, and some columns of every MLP. After both, the parts of the
result are added over all machines, so that each of them knows the whole residual stream.

Models without a `shard`, and those whose heads do not come out even, are divided by whole layers where mlx-lm can run
their layers on several machines (`whole_layers.py`).
"""

from typing import Any

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.memory import SHARE
from dflash_mlx.hub.naming import text_config
from dflash_mlx.ranks.group import Group
from dflash_mlx.runtime import backend
from dflash_mlx.targets.target import Target, weight_bytes
from dflash_mlx.targets.whole_layers import WholeLayers, takes_whole_layers

_HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
# Families whose `shard` gives a key-value head to several machines where there are fewer heads than machines.
_SHARE_HEADS = ("qwen3_5", "qwen3_5_moe")
GB = 10**9


def heads_left_over(config: dict[str, Any], machines: int) -> tuple[str, int] | None:
    """The first of a model's numbers of heads (its config.json) that so many machines do not divide, with its name."""
    text, shared = text_config(config), config.get("model_type") in _SHARE_HEADS
    for name in _HEADS:
        heads = text.get(name)
        if not isinstance(heads, int) or heads % machines == 0:
            continue
        if name == "num_key_value_heads" and shared and machines % heads == 0:
            continue
        return name, heads
    return None


def divide(target: Target, group: Group) -> None:
    """Leave this rank's share of the weights, before they are read. Raises CheckpointError."""
    can_shard = hasattr(target.model, "shard")
    odd = heads_left_over(target.config, group.size) if can_shard else None
    if can_shard and odd is None:
        _shard(target, group)
    elif takes_whole_layers(target.model, target.layers):
        _take_layers(target, group)
    elif odd is not None:
        name, heads = odd
        raise CheckpointError(
            f"this model's {heads} heads ({name}) cannot be divided by {group.size} machines; take a number of "
            f"machines that {heads} can be divided by."
        )
    else:
        raise CheckpointError(
            f"mlx-lm cannot divide models of the kind {target.config.get('model_type')} among machines; run it on one "
            "machine, in a smaller precision if need be."
        )
    target.machines = group.size
    needed, there = weight_bytes(target.model), backend().memory_bytes
    if needed > SHARE * there:
        raise CheckpointError(
            f"rank {group.rank}'s share of the weights takes {needed / GB:.1f} GB, and of its {there / GB:.1f} GB of "
            f"memory at most {SHARE:.0%} should be weights; take more machines, or a smaller precision."
        )


def _shard(target: Target, group: Group) -> None:
    try:
        target.model.shard(group.ranks)
    except (AssertionError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"mlx-lm cannot divide this model ({target.config.get('model_type')}) by {group.size} machines: {error}. "
            "Take fewer machines."
        ) from error


def _take_layers(target: Target, group: Group) -> None:
    if len(target.layers) < group.size:
        raise CheckpointError(
            f"this model can be divided by whole layers only, and has {len(target.layers)} for {group.size} machines; "
            f"take at most {len(target.layers)} machines."
        )
    target.whole_layers = WholeLayers(target.layers, [weight_bytes(layer) for layer in target.layers], group)
