"""Where a target is loaded: on this machine, or a share of it on each machine of a group."""

import json
import signal
import threading
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache

import mlx.core as mx

from dflash_mlx.hub.download import ensure_model
from dflash_mlx.hub.registry import ModelSource
from dflash_mlx.ranks import started_together
from dflash_mlx.ranks.group import Group, join_group
from dflash_mlx.ranks.mirror import Leader, Mirrored, follow, guard, mirrored
from dflash_mlx.targets.examination import Machine, look
from dflash_mlx.targets.loading import load_target
from dflash_mlx.targets.target import Target
from dflash_mlx.wired import wired


class Machines(Mirrored):
    """All machines of a group: what rank 0 and the others begin with."""

    def __init__(self, group: Group) -> None:
        self.group, self._held = group, ExitStack()
        if group.rank == 0:
            Leader(group, self)

    def load_target(self, source: ModelSource, *, dtype: str) -> tuple[Target, mx.Dtype]:
        """`loading.load_target`, of a share on each machine; what is missing is fetched by each. Raises the same."""
        target, activations = self._load(json.dumps(asdict(source)), dtype)
        assert self.leader is not None
        guard(target.model, self.leader)
        return target, activations

    def examine(self, source: ModelSource | None) -> list[Machine]:
        """What each machine is and has, by rank. source: the target whose files are compared. Raises OSError."""
        return self._examine(json.dumps(asdict(source)) if source is not None else "")

    @mirrored
    def _examine(self, source: str) -> list[Machine]:
        own = look(self.group, ModelSource(**json.loads(source)) if source else None)
        if self.group.rank > 0:
            self.group.channels[0].send({"found": asdict(own)})
            return []
        others = [Machine(**channel.receive()["found"]) for channel in self.group.channels]
        return sorted([own, *others], key=lambda machine: machine.rank)

    @mirrored
    def _load(self, source: str, dtype: str) -> tuple[Target, mx.Dtype]:
        folder = ensure_model(ModelSource(**json.loads(source)))
        target, activations = load_target(folder, dtype=dtype, group=self.group)
        if self.group.rank > 0:
            self._held.enter_context(wired(target.model))
        return target, activations


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
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's
        follow(group, machines)
    return machines
