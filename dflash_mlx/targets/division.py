"""A target divided among several machines, by the `shard` of mlx-lm's model files (tensor parallelism).

Each machine has some of the heads of every attention layer, and some columns of every MLP. After both, the parts of the
result are added over all machines, so that each of them knows the whole residual stream.
"""

from typing import Any

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.memory import SHARE
from dflash_mlx.hub.naming import text_config
from dflash_mlx.ranks.group import Group
from dflash_mlx.runtime import backend
from dflash_mlx.targets.target import Target, weight_bytes

_HEADS = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
# Families whose `shard` gives a key-value head to several machines where there are fewer heads than machines.
_SHARE_HEADS = ("qwen3_5", "qwen3_5_moe")
GB = 10**9


def check_divisible(config: dict[str, Any], machines: int) -> None:
    """Raises CheckpointError where the heads of a model (its config.json) cannot be divided by so many machines."""
    text, shared = text_config(config), config.get("model_type") in _SHARE_HEADS
    for name in _HEADS:
        heads = text.get(name)
        if not isinstance(heads, int) or heads % machines == 0:
            continue
        if name == "num_key_value_heads" and shared and machines % heads == 0:
            continue
        raise CheckpointError(
            f"this model's {heads} heads ({name}) cannot be divided by {machines} machines; take a number of machines "
            f"that {heads} can be divided by."
        )


def divide(target: Target, group: Group) -> None:
    """Leave this rank's share of the weights, before they are read. Raises CheckpointError."""
    kind = target.config.get("model_type")
    if not hasattr(target.model, "shard"):
        found = f"mlx-lm cannot divide models of the kind {kind} among machines"
        if hasattr(target.model.get("model"), "pipeline"):
            found += " except by whole layers (a pipeline), which dflash-mlx does not support"
        raise CheckpointError(f"{found}; run it on one machine, in a smaller precision if need be.")
    try:
        target.model.shard(group.ranks)
    except (AssertionError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"mlx-lm cannot divide this model ({kind}) by {group.size} machines: {error}. Take fewer machines."
        ) from error
    target.machines = group.size
    needed, there = weight_bytes(target.model), backend().memory_bytes
    if needed > SHARE * there:
        raise CheckpointError(
            f"rank {group.rank}'s share of the weights takes {needed / GB:.1f} GB, and of its {there / GB:.1f} GB of "
            f"memory at most {SHARE:.0%} should be weights; take more machines, or a smaller precision."
        )
