"""`dflash-mlx launch`: any other command on several machines, started by MLX's launcher."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dflash_mlx.errors import UsageError

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx launch --hosts 10.0.0.1,10.0.0.2 -- serve --pair qwen3-8b

  dflash-mlx launch --hostfile hosts.json -- generate "Why is the sky blue?" --pair qwen3-8b

  dflash-mlx launch -n 3 -- generate "Why is the sky blue?" --pair demo
"""

# What a terminal has for Ctrl-C, and for the end of what is typed.
INTERRUPT, END = b"\x03", b"\x04"

Hosts = Annotated[
    str | None,
    typer.Option("--hosts", metavar="IP,IP", help="The machines' addresses; ssh must reach them. Rank 0 first."),
]
HostFile = Annotated[
    Path | None, typer.Option("--hostfile", metavar="FILE", help="The machines, in the format of mlx.launch.")
]
Processes = Annotated[
    int | None, typer.Option("-n", metavar="N", min=2, help="This many processes on each machine, to try it out.")
]
BackendName = Annotated[
    str | None, typer.Option("--backend", metavar="NAME", help="How they talk: ring or jaccl, for instance.")
]


def launch_command(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND [OPTIONS]", help="The command of dflash-mlx, after --.")
    ],
    hosts: Hosts = None,
    hostfile: HostFile = None,
    processes: Processes = None,
    backend: BackendName = None,
) -> None:
    """Run a command on several machines that compute one model together.

    Each machine needs dflash-mlx at the same path. Only the first one prints and answers. This starts mlx.launch, which
    has more options.
    """
    launch(command, hosts=hosts, hostfile=hostfile, processes=processes, backend=backend)


def launch(
    command: Sequence[str], *, hosts: str | None, hostfile: Path | None, processes: int | None, backend: str | None
) -> None:
    """Run a command of dflash-mlx on several machines until it ends there. Raises UsageError."""
    if hosts is None and hostfile is None and processes is None:
        raise UsageError("say on which machines: --hosts IP,IP or --hostfile FILE; or -n 2 for processes on this one.")
    launcher = shutil.which("mlx.launch", path=str(Path(sys.executable).parent)) or shutil.which("mlx.launch")
    if launcher is None:
        raise UsageError("mlx.launch is not there; install MLX's Python package with its commands again.")
    options = {"--hosts": hosts, "--hostfile": hostfile, "-n": processes, "--backend": backend}
    given = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    run_launcher([launcher, *given, "--", sys.executable, "-m", "dflash_mlx.cli.launched", *command])


def run_launcher(words: list[str]) -> None:
    """Run MLX's launcher, and pass on to it what comes on stdin, its end, and Ctrl-C (see `launched`)."""
    # In a session of its own, Ctrl-C in the terminal does not reach it: it would leave its ranks to themselves.
    launcher = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    assert launcher.stdin is not None
    to_launcher = launcher.stdin.fileno()

    def send(data: bytes) -> None:
        with suppress(OSError):  # it has ended
            os.write(to_launcher, data)

    def pass_on() -> None:
        with suppress(OSError):  # there is no stdin, or this runs in a terminal's background
            while data := os.read(0, 4096):
                send(data)
        send(END)

    signal.signal(signal.SIGTTIN, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda number, frame: send(INTERRUPT))
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: launcher.terminate())
    threading.Thread(target=pass_on, daemon=True).start()
    launcher.wait()
