"""Measurements of this machine that are remembered on disk."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx_lm

from dflash_mlx import __version__
from dflash_mlx.hub.leftovers import write_atomically
from dflash_mlx.hub.registry import cache_home
from dflash_mlx.runtime import backend

# What comes of reading something that is not as it was stored.
UNUSABLE = OSError, ValueError, KeyError, AttributeError, TypeError


def fingerprint(folders: Sequence[Path], *settings: object) -> str:
    """Changes with anything that changes what models in these folders cost here."""
    machine = backend()
    parts = [*settings, machine.kind, machine.chip, machine.mlx_version, machine.blas, os.cpu_count()]
    digest = hashlib.sha256("|".join(map(str, parts)).encode())
    for folder in folders:
        digest.update((folder / "config.json").read_bytes())
        for file in sorted(folder.glob("*.safetensors")):
            digest.update(f"{file.name}:{file.stat().st_size}".encode())
    return digest.hexdigest()[:24]


def file_marks(folders: Sequence[Path]) -> str:
    """Changes when a file in these folders does, by what the file system says: name, size, number, times of changes.

    Nobody sets the time of the last change of a file's state (ctime), so that another file of the same size and date is
    noticed. A checksum would take longer than what is remembered by it: all gigabytes would have to be read.
    """
    files = [file for folder in folders for file in sorted(folder.iterdir()) if not file.name.startswith(".")]
    states = [(file.name, file.stat()) for file in files if file.is_file()]
    return str([(name, state.st_size, state.st_ino, state.st_mtime_ns, state.st_ctime_ns) for name, state in states])


def name_by_files(kind: str, folders: Sequence[Path], schema: int, *settings: object) -> str:
    """Under which name to store what was found out about models: another one when a file of theirs changes.

    It changes with this package and mlx-lm, too. schema: of what is stored.
    """
    versions = schema, __version__, mlx_lm.__version__
    return f"{kind}/{fingerprint(folders, *versions, *settings, file_marks(folders))}"


def table_of(stored: Mapping[str, float]) -> dict[int, float]:
    """A table (number -> seconds) as it was stored; see `UNUSABLE`."""
    return {int(number): float(seconds) for number, seconds in stored.items()}


def read_json(name: str) -> Any:
    """What was stored as `name`. Raises OSError and ValueError."""
    return json.loads(_path(name).read_text(encoding="utf-8"))


def forget(name: str) -> None:
    """Let it be measured again the next time."""
    with suppress(OSError):  # a cache folder that cannot be written to
        _path(name).unlink(missing_ok=True)


def store(name: str, value: Mapping[str, Any]) -> None:
    """Remember a value; a read-only cache folder only means that it is measured again next time."""
    path = _path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(value))
    except OSError:
        pass


def _path(name: str) -> Path:
    return cache_home() / f"{name}.json"
