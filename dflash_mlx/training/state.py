"""What a training run keeps on disk: atomic writes, and the check that a rerun continues the same thing.

    OUT/                 the drafter, once exported: config.json, model.safetensors, README.md, curves.svg, train.json
    OUT/work/data.json       what the data was made with
    OUT/work/data/*.npz      the conversations, a shard a batch
    OUT/work/training.json   what the training was started with
    OUT/work/state.safetensors   weights, optimizer and progress of the training

A file is written beside its place and renamed, so that a kill at any moment leaves either the old one or the new one.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_mlx.errors import CheckpointError, DFlashError, UsageError
from dflash_mlx.hub.new_folder import explain_failed_writes


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write(temporary path)` make the file and put it in place of `path`. The suffix is kept.

    Raises CheckpointError where the disk is full or not writable.
    """
    temporary = path.with_name(f".{path.stem}.part{path.suffix}")
    with explain_failed_writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def remove_parts(out: Path) -> None:
    """Remove what a killed run was writing under temporary names. For whoever holds the lock of the run."""
    for folder in (out, out / "work", out / "work" / "data"):
        for part in folder.glob(".*.part.*"):
            part.unlink()


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, None where there is no file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Delete it to start this stage anew.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object, found {type(value).__name__}.")
    return value


def require_same(path: Path, identity: dict[str, Any], *, what: str, begun: bool, remove: str) -> None:
    """Record what a stage is made with or, when it was `begun` before, compare with the record of then.

    Raises UsageError naming every difference: state made with other options cannot be continued.
    """
    before = read_json(path) if begun else None
    if before is None:
        write_json(path, identity)
        return
    differences = [
        f"{key.replace('_', '-')} was {before.get(key)!r} and is now {identity.get(key)!r}"
        for key in sorted(before.keys() | identity.keys())
        if before.get(key) != identity.get(key)
    ]
    if differences:
        raise UsageError(
            f"the {what} in {path.parent} was made with other options: {'; '.join(differences)}. "
            f"Run with the same options to continue it, choose another --out, or delete {remove} to start it anew."
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process from training in the same folder. The lock dies with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DFlashError(
                f"another process is training in {folder.parent}. Wait for it, or choose another --out."
            ) from None
        yield
