"""Commands in processes of their own that a test may kill at any moment, and what they leave on the disk.

A process is forked from one that has imported everything, so a run takes as long as its work, and a random moment of it
is mostly one of work. The command's own code runs in it from beginning to end.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 120.0  # that a run may take on a busy machine
# pip asks for the version of Rust, and rustup then writes its settings. The Hub's client writes its tag in place, once.
_OTHERS = (".rustup", ".rustup/*", "*CACHEDIR.TAG")
_PRELOAD = (
    "dflash_mlx.cli.app",
    "dflash_mlx.drafters.convert",
    "dflash_mlx.hub.quantize",
    "dflash_mlx.server.app",
    "dflash_mlx.server.run",
    "dflash_mlx.training",
    "kill_runs",
    "mlx_lm.convert",
)


@dataclass(frozen=True)
class Command:
    """A command line whose files all lie in `root`, which holds nothing before its first run.

    before: called in the command's process, before it. varying: patterns of the paths whose content differs from run to
    run, such as times; of those only the format is compared. optional: patterns of those that need not be there. same:
    compares what `state` cannot.
    """

    name: str
    root: Path
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    stdin: str = ""
    before: Callable[..., None] | None = None
    varying: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    same: Callable[[Path, Path], bool] | None = None

    def clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True, exist_ok=True)

    def state(self, root: Path | None = None) -> dict[str, str]:
        """Path in the folder -> what is there, for every file, link and folder that has to be there."""
        root = root or self.root
        found = {}
        for path in sorted(root.rglob("*")):
            name = str(path.relative_to(root))
            with contextlib.suppress(FileNotFoundError):  # gone in the meantime
                found[name] = self._content(path, name)
        return {
            name: content
            for name, content in found.items()
            if content == "damaged" or not _matches(name, (*self.optional, *_OTHERS))
        }

    def _content(self, path: Path, name: str) -> str:
        if path.is_symlink():
            return f"link to {os.readlink(path)}"
        if path.is_dir():
            return "folder"
        if _matches(name, self.varying):
            return "whole" if is_whole(path) else "damaged"
        return hashlib.sha256(path.read_bytes()).hexdigest()


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def is_whole(path: Path) -> bool:
    """Whether a file can be read as what its name says."""
    from dflash_mlx.hub.folder import check_safetensors

    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return all(arrays[name] is not None for name in arrays)
        elif path.suffix == ".safetensors":
            check_safetensors(path)
        else:
            return path.stat().st_size > 0
    except Exception:
        return False
    return True


class Run:
    """A command that runs since now. `seconds` count from there."""

    def __init__(self, command: Command, *, largest_file: int | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        self._reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_child, args=(command, writer, largest_file))
        self._process.start()
        writer.close()
        begun = os.read(self._reader.fileno(), 1)
        assert begun == b"!", (begun + os.read(self._reader.fileno(), 10_000)).decode()
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def running(self) -> bool:
        return self._process.is_alive()

    def send(self, number: int) -> None:
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def end(self) -> tuple[int, str]:
        """The exit code, negative for a signal, and all that it wrote."""
        self._process.join(SECONDS)
        assert not self.running(), "the command hangs"
        output = b""
        while piece := os.read(self._reader.fileno(), 65536):
            output += piece
        self._reader.close()
        assert self._process.exitcode is not None
        return self._process.exitcode, output.decode()


def run(command: Command, *, largest_file: int | None = None) -> tuple[int, str]:
    """The exit code and the output of a command that nothing disturbs.

    largest_file: bytes that a file may have; a write beyond them fails as on a full disk, with another number.
    """
    return Run(command, largest_file=largest_file).end()


def time_of(command: Command) -> tuple[float, float]:
    """Seconds from a command's beginning to its first file, and to its end."""
    found, first = Run(command), None
    while found.running():
        first = found.seconds if first is None and any(command.root.iterdir()) else first
        time.sleep(0.001)
    end = found.seconds
    code, output = found.end()
    assert code == 0, output
    return end if first is None else first, end


def _child(command: Command, writer: Connection, largest_file: int | None) -> None:
    """The process: streams and limits as a shell would set them, then the command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (1, 2):
        os.dup2(writer.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = _stdin(command.stdin), os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.update(command.environment)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    from dflash_mlx.cli.app import main

    if command.before is not None:
        command.before()
    os.write(1, b"!")
    code = main(list(command.words))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _stdin(text: str) -> Any:
    file = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  it ends with the process
    file.write(text)
    file.seek(0)
    return file


@contextlib.contextmanager
def end_forkserver() -> Iterator[None]:
    """Whatever forks the processes takes its environment from here, and ends with the block."""
    from multiprocessing.forkserver import _forkserver  # type: ignore[attr-defined]

    _forkserver._stop()
    try:
        yield
    finally:
        _forkserver._stop()
