"""Processes that are ranks of one group on this machine, started as MLX's launcher starts them."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SECONDS = 240.0  # that a group may take on a busy machine
_TESTS = Path(__file__).parent.parent


@contextlib.contextmanager
def ranks(count: int, *command: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """`count` ranks of a command; at the end those that still run are killed. folder: for the list of their addresses.

    stdout and stderr are pipes.
    """
    hosts = folder / f"hosts-{os.urandom(4).hex()}.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(count)]))
    # Threads that wait for a core would keep the other ranks from theirs.
    environment = {
        **os.environ,
        "MLX_HOSTFILE": str(hosts),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(_TESTS.parent), str(_TESTS), str(_TESTS / "server")]),
    }
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "MLX_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def finish(processes: Sequence[subprocess.Popen[str]], *, seconds: float = SECONDS) -> list[tuple[int, str, str]]:
    """Wait for all: their exit codes, and what they wrote to stdout and stderr."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=seconds)
        found.append((process.returncode, out, err))
    return found


def program(name: str, *arguments: str) -> list[str]:
    """The command line of a program beside this file."""
    return [sys.executable, str(Path(__file__).parent / name), *arguments]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
