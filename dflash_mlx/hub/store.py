"""Model folders under cache_home()/models: made whole or not at all, one process at a time, recognisable afterwards.

A folder is built under a temporary name beside its place and renamed when complete. It carries a stamp with the hash of
its source and the size of every file, so that a missing or cut file is noticed without reading the weights.
"""

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.errors import DownloadError
from dflash_mlx.hub.leftovers import remove_leftovers, temporary_folder

Report = Callable[[str, float | None], None]  # a message, and the fraction done where it is known

STAMP = ".dflash-mlx.json"
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Stamp:
    """What a folder was made from. Folders with another stamp are made again."""

    source_sha256: str
    converter: int  # raised when the same source would now give other files


def problem(folder: Path, stamp: Stamp) -> str | None:
    """Why the folder cannot be used, in words; None where it can. Looks at names and sizes only."""
    if not folder.is_dir():
        return "not downloaded yet"
    try:
        found = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        made_from = Stamp(found["source_sha256"], found["converter"])
        sizes = dict(found["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return "its stamp is missing or unreadable"
    if made_from != stamp:
        return "it was made from another file or by another version"
    for name, size in sizes.items():
        try:
            actual = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if actual != size:
            return f"{name} has {actual:,} bytes instead of {size:,}"
    return None


def ensure_folder(folder: Path, stamp: Stamp, build: Callable[[Path], None], *, space_mb: int, report: Report) -> Path:
    """`folder`, made by `build(temporary folder)` where it is not there or not usable.

    `build` gets a work folder on the same disk; what it puts into the subfolder `model` becomes `folder`. Another
    process that makes the same folder is waited for. Raises DownloadError when the disk is full or not writable.
    """
    if problem(folder, stamp) is None:
        remove_leftovers(folder)  # of a process that was killed between the last two steps
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.parent / f".{folder.name}.lock", report):
            # Another process may have finished it while this one waited.
            trouble = problem(folder, stamp)
            if trouble is not None:
                if folder.exists():
                    report(f"the copy in {folder} cannot be used ({trouble}); making it again", None)
                remove_leftovers(folder)
                _check_space(folder.parent, space_mb)
                _make(folder, stamp, build)
    except OSError as error:
        raise DownloadError(_explain(folder, error)) from error
    return folder


def _make(folder: Path, stamp: Stamp, build: Callable[[Path], None]) -> None:
    with temporary_folder(folder) as work:
        _fill(work, folder, stamp, build)


def _fill(work: Path, folder: Path, stamp: Stamp, build: Callable[[Path], None]) -> None:
    """Build the model in `work` and bring it to its place."""
    model = work / "model"
    model.mkdir()
    build(work)
    files = {path.name: path.stat().st_size for path in sorted(model.iterdir())}
    content = {"source_sha256": stamp.source_sha256, "converter": stamp.converter, "files": files}
    (model / STAMP).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for path in model.iterdir():
        _flush(path)
    if folder.exists():
        folder.rename(work / "old")
    model.rename(folder)
    _flush(folder.parent)


@contextmanager
def hold_lock(path: Path, report: Report) -> Iterator[None]:
    """Hold the lock file `path`. The system frees it when its holder dies, however it dies."""
    with path.open("a") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    report(f"waiting for another process that is making {path.stem.lstrip('.')}", None)
                waiting = True
                time.sleep(_POLL_SECONDS)
        yield


def _check_space(folder: Path, needed_mb: int) -> None:
    free_mb = shutil.disk_usage(folder).free // 10**6
    if free_mb < needed_mb:
        raise DownloadError(
            f"{needed_mb:,} MB of free disk space are needed in {folder}, {free_mb:,} MB are there. "
            "Make room, or set DFLASH_MLX_HOME to a folder on another disk."
        )


def _flush(path: Path) -> None:
    """Bring a file or folder to the disk, so that a power cut cannot leave a stamped folder with empty files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _explain(folder: Path, error: OSError) -> str:
    where = error.filename or folder.parent
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full while writing {where}. Make room, or set DFLASH_MLX_HOME to another disk."
    return f"cannot write {where}: {error.strerror or error}. Set DFLASH_MLX_HOME to a folder you can write to."
