"""A new folder at a place the user named: there whole, or not at all."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.hub.leftovers import remove_leftovers, temporary_folder


def write_new_folder(folder: Path, build: Callable[[Path], None]) -> None:
    """Let `build` fill a temporary folder beside `folder`, then give it that name.

    Whoever is interrupted or killed leaves no half folder under the name, and the next run removes what a killed one
    left beside it. Raises UsageError where something is there already, CheckpointError where the disk is full or not
    writable.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already and not empty; name a new folder, or remove it first.")
    with explain_failed_writes(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        with temporary_folder(folder) as work:
            work.chmod(0o755)
            build(work)
            for path in work.iterdir():
                _flush(path)
            work.rename(folder)
        _flush(folder.parent)


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest of the folders above it that is there."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def try_writing(folder: Path) -> None:
    """Raises OSError where nothing can be written into a folder; leaves nothing there."""
    with tempfile.TemporaryDirectory(dir=folder):
        pass


@contextmanager
def explain_failed_writes(path: Path) -> Iterator[None]:
    """Raise CheckpointError in place of what a write to `path` raises where the disk is full or not writable."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # MLX reports a failed write as a RuntimeError
        full = shutil.disk_usage(path.parent).free < 2**20 if path.parent.is_dir() else False
        if full or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"the disk is full while writing {path}. Make room and run it again.") from error
        raise CheckpointError(f"cannot write {path}: {error}. Name a folder you can write to.") from error


def _flush(path: Path) -> None:
    """Bring a file or folder to the disk, so that a power cut cannot leave empty files under the final name."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
