"""The start of the command `dflash-mlx`. It stands outside `dflash_mlx`, because that may hold another project's files.

This project is the distribution `dflash-on-mlx`. The distribution `dflash-mlx` on PyPI belongs to somebody else and
installs a module `dflash_mlx`, too. Where both are installed, one overwrites files of the other, and a file such as
`dflash_mlx/runtime.py` is hidden by the other one's folder `dflash_mlx/runtime/`.
"""

import os
import sys

_BEGIN, _END = "dflash_mlx-", ".dist-info"


def other_version() -> str | None:
    """The version of the other distribution `dflash-mlx`, if it is installed where Python looks for modules.

    Only names in folders are read, since every start of the command does this.
    """
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # it does not exist, or is a zip file
            continue
        for name in names:
            if name.startswith(_BEGIN) and name.endswith(_END):
                return name[len(_BEGIN) : -len(_END)]
    return None


def explain(version: str) -> str:
    """What is wrong when the other distribution is there, and what to do."""
    return (
        f"another program, the distribution dflash-mlx {version}, is installed in this environment and has the same "
        "module dflash_mlx; remove both with `pip uninstall dflash-mlx dflash-on-mlx`, then install this one again"
    )


def main() -> int:
    """Run the command line; returns the exit code. The console script's entry."""
    other = other_version()
    try:
        from dflash_mlx.cli.app import main as run
    except Exception:
        if other is None:
            raise
        print(f"error: {explain(other)}", file=sys.stderr)
        return 1
    # Not while a shell completes a command, and doctor says it in its own report.
    if other is not None and "_DFLASH_MLX_COMPLETE" not in os.environ and sys.argv[1:2] != ["doctor"]:
        print(f"warning: {explain(other)}", file=sys.stderr)
    return run()
