"""What the machines of a group are and have, and whether they can compute one model together: looked at beforehand."""

import hashlib
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from dflash_mlx import __version__
from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.download import find_on_disk
from dflash_mlx.hub.registry import ModelSource
from dflash_mlx.ranks.group import Group
from dflash_mlx.runtime import backend
from dflash_mlx.targets.division import GB
from dflash_mlx.targets.loading import open_target
from dflash_mlx.targets.target import weight_bytes

# float32 numbers: one row of a large model's hidden states, in bfloat16, and a chunk of a prompt.
_SMALL, _LARGE = 2048, 2_000_000
_SUMS, _LARGE_SUMS, _FIRST = 50, 5, 10


@dataclass(frozen=True)
class Machine:
    """One rank. versions: of what has to be alike; files: SHA-256 of the target's files, None where it is not there.

    small_ms: milliseconds that a sum of a few kilobytes over all ranks takes, the median; megabytes_a_second: what a
    sum of 8 MB carries; wrong_sums: how many sums had a wrong result. share: what it would hold of the target, and
    refused: why it cannot; both empty where the target is not there.
    """

    rank: int
    host: str
    chip: str
    os: str
    memory_bytes: int
    versions: dict[str, str]
    files: dict[str, str] | None
    small_ms: float
    megabytes_a_second: float
    wrong_sums: int
    share: str = ""
    refused: str = ""


def look(group: Group, source: ModelSource | None) -> Machine:
    """This rank's part; all ranks have to call it at the same time. source: the target whose files are compared."""
    facts = backend()
    seconds, wrong = _time_sums(group)
    folder = find_on_disk(source) if source is not None else None
    share, refused = _share(folder, group) if folder is not None else ("", "")
    return Machine(
        rank=group.rank,
        host=socket.gethostname(),
        chip=facts.chip,
        os=facts.os,
        memory_bytes=facts.memory_bytes,
        versions={"dflash-mlx": __version__, "mlx": facts.mlx_version, "mlx-lm": facts.mlx_lm_version},
        files=checksums(folder) if folder is not None else None,
        small_ms=1000 * statistics.median(seconds[_SMALL]),
        megabytes_a_second=4e-6 * _LARGE / statistics.median(seconds[_LARGE]),
        wrong_sums=wrong,
        share=share,
        refused=refused,
    )


def _share(folder: Path, group: Group) -> tuple[str, str]:
    """What this rank would hold of a target, or why it cannot. No weights are read."""
    try:
        target, _ = open_target(folder, dtype="auto", group=group)
    except CheckpointError as error:
        return "", str(error)
    size = f"{weight_bytes(target.model) / GB:.1f} GB"
    if target.whole_layers is None:
        return f"a part of every layer, {size}", ""
    return f"{len(target.whole_layers.own)} of {len(target.layers)} layers, {size}", ""


def _time_sums(group: Group) -> tuple[dict[int, list[float]], int]:
    """Seconds that sums over all ranks take, by their size, without the first ones; and how many were wrong."""
    seconds: dict[int, list[float]] = {_SMALL: [], _LARGE: []}
    wrong = 0
    for size in [_SMALL] * (_FIRST + _SUMS) + [_LARGE] * _LARGE_SUMS:
        # Whole numbers, so that the order in which they are added changes nothing.
        numbers = (np.arange(size) + len(seconds[size])) % 1000
        own = mx.array((numbers + group.rank).astype(np.float32))
        mx.eval(own)
        started = time.perf_counter()
        total = np.array(mx.distributed.all_sum(own, group=group.ranks))
        seconds[size].append(time.perf_counter() - started)
        wrong += not np.array_equal(total, numbers * group.size + sum(range(group.size)))
    return {_SMALL: seconds[_SMALL][_FIRST:], _LARGE: seconds[_LARGE]}, wrong


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of a target's config.json and weights, by the files' names. Raises OSError."""
    found = {}
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
        found[path.name] = digest.hexdigest()
    return found


def problems(machines: Sequence[Machine]) -> list[str]:
    """What keeps the machines from computing one model together, a sentence each. machines: by rank."""
    first, *others = machines
    said = []
    for other in others:
        name = f"rank {other.rank} ({other.host})"
        said += [
            f"{name} has {package} {other.versions.get(package)}, and rank 0 has {version}; install the same on both."
            for package, version in first.versions.items()
            if other.versions.get(package) != version
        ]
        if first.files is not None and other.files is not None and first.files != other.files:
            names = [key for key in first.files | other.files if first.files.get(key) != other.files.get(key)]
            said.append(
                f"{name} has another {', '.join(names)} than rank 0; fetch the model again (pull --verify), or copy it "
                "from there."
            )
    said += [
        f"rank {machine.rank} ({machine.host}) got {machine.wrong_sums} wrong sums of all ranks; take another backend "
        "or another version of MLX."
        for machine in machines
        if machine.wrong_sums
    ]
    # A rank's share may be too large; all else is said by all of them.
    return said + list(dict.fromkeys(machine.refused for machine in machines if machine.refused))
