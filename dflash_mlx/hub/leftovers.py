"""Temporary files and folders beside their final place: whoever makes one holds it, and the next run removes those of
processes that were killed."""

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


def temporary_prefix(path: Path) -> str:
    """What the names of temporary files and folders for `path` begin with."""
    return f".{path.name}.making-"


def new_temporary(path: Path) -> Path:
    """A name for a temporary file or folder beside `path`, where there is nothing yet.

    Whoever makes it knows its name before, so that Ctrl-C at any moment leaves nothing that cannot be found.
    """
    return path.with_name(temporary_prefix(path) + secrets.token_hex(8))


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold a temporary file or folder; the system lets go of it when this process ends, however it ends.

    Gives False where another process holds it, or where the disk has no locks.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            holds = True
        except OSError:
            holds = False
        yield holds
    finally:
        os.close(handle)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, for the user alone, held and empty. What is left of it in the end is removed."""
    work = new_temporary(path)
    try:
        work.mkdir(mode=0o700)
        with held(work):
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes left beside `path`. What another process holds stays, and what cannot be removed."""
    for leftover in path.parent.glob(f"{glob.escape(temporary_prefix(path))}*"):
        with contextlib.suppress(OSError), held(leftover) as abandoned:
            if not abandoned:
                continue
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all. A new file is readable by the user alone. Raises OSError."""
    remove_leftovers(path)
    temporary = new_temporary(path)
    try:
        handle = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "wb") as file, held(temporary):
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
