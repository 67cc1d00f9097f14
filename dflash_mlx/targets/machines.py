"""Where a target is loaded: on this machine, or a share of it on each machine of a group."""

import json
import sys
from dataclasses import asdict
from functools import cache

import mlx.core as mx

from dflash_mlx.hub.download import ensure_model
from dflash_mlx.hub.registry import ModelSource
from dflash_mlx.ranks import started_together
from dflash_mlx.ranks.group import Group, join_group
from dflash_mlx.ranks.mirror import Leader, Mirrored, follow, guard, mirrored
from dflash_mlx.targets.loading import load_target
from dflash_mlx.targets.target import Target


class Machines(Mirrored):
    """All machines of a group: what rank 0 and the others begin with."""

    def __init__(self, group: Group) -> None:
        self.group = group
        if group.rank == 0:
            Leader(group, self)

    def load_target(self, source: ModelSource, *, dtype: str) -> tuple[Target, mx.Dtype]:
        """`loading.load_target`, of a share on each machine; what is missing is fetched by each. Raises the same."""
        target, activations = self._load(json.dumps(asdict(source)), dtype)
        assert self.leader is not None
        guard(target.model, self.leader)
        # What a round costs depends on it, too.
        target.kernels = f"{self.group.size} machines"
        return target, activations

    @mirrored
    def _load(self, source: str, dtype: str) -> tuple[Target, mx.Dtype]:
        folder = ensure_model(ModelSource(**json.loads(source)))
        return load_target(folder, dtype=dtype, group=self.group)


@cache
def other_machines() -> Machines | None:
    """The machines that this process, which is rank 0, works with; None where it was started alone.

    A process of another rank stays here: it does its part of what rank 0 does, and ends with it. Raises GroupError.
    """
    group = join_group() if started_together() else None
    if group is None:
        return None
    machines = Machines(group)
    if group.rank > 0:
        print(f"rank {group.rank} of {group.size} computes for rank 0.", file=sys.stderr, flush=True)
        follow(group, machines)
    return machines
