"""`dflash-mlx launch`: any other command on several machines, started by MLX's launcher."""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from dflash_mlx.errors import UsageError

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx launch --hosts 10.0.0.1,10.0.0.2 -- serve --pair qwen3-8b

  dflash-mlx launch --hostfile hosts.json -- generate "Why is the sky blue?" --pair qwen3-8b

  dflash-mlx launch -n 3 -- generate "Why is the sky blue?" --pair demo
"""


def launch_command(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND [OPTIONS]", help="The command of dflash-mlx, after --.")
    ],
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", metavar="IP,IP", help="The machines' addresses; ssh must reach them. Rank 0 first."),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option("--hostfile", metavar="FILE", help="The machines, in the format of mlx.launch.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option("-n", metavar="N", min=2, help="This many processes on each machine, to try it out.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", metavar="NAME", help="How they talk: ring or jaccl, for instance.")
    ] = None,
) -> None:
    """Run a command on several machines that compute one model together.

    Each machine needs dflash-mlx at the same path. Only the first one prints and answers. This starts mlx.launch, which
    has more options.
    """
    if hosts is None and hostfile is None and processes is None:
        raise UsageError("say on which machines: --hosts IP,IP or --hostfile FILE; or -n 2 for processes on this one.")
    launcher = shutil.which("mlx.launch", path=str(Path(sys.executable).parent)) or shutil.which("mlx.launch")
    if launcher is None:
        raise UsageError("mlx.launch is not there; install MLX's Python package with its commands again.")
    options = {"--hosts": hosts, "--hostfile": hostfile, "-n": processes, "--backend": backend}
    given = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    os.execv(launcher, [launcher, *given, "--", sys.executable, "-m", "dflash_mlx.cli.app", *command])
