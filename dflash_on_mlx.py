"""The start of the command `dflash-mlx`. It stands outside `dflash_mlx`, because that may hold another project's files.

This project is the distribution `dflash-on-mlx`. The distribution `dflash-mlx` on PyPI belongs to somebody else and
installs a module `dflash_mlx`, too. Where both are installed, one overwrites files of the other, and a file such as
`dflash_mlx/runtime.py` is hidden by the other one's folder `dflash_mlx/runtime/`.
"""

import os
import sys

_BEGIN, _END = "dflash_mlx-", ".dist-info"


def other_version() -> str | None:
    """The version of the other distribution `dflash-mlx`, if it is installed where Python looks for modules."""
    found = _find()
    return found[0] if found else None


def _find() -> tuple[str, str] | None:
    """The other distribution's version and folder. Only names in folders are read, as every start does this."""
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # it does not exist, or is a zip file
            continue
        for name in names:
            if name.startswith(_BEGIN) and name.endswith(_END):
                return name[len(_BEGIN) : -len(_END)], folder
    return None


def explain(version: str) -> str:
    """What is wrong when the other distribution is there, and what to do."""
    return (
        f"another program, the distribution dflash-mlx {version}, is installed in this environment and has the same "
        "module dflash_mlx; remove both with `pip uninstall dflash-mlx dflash-on-mlx`, then install this one again"
    )


def main() -> int:
    """Run the command line; returns the exit code. The console script's entry."""
    found = _find()
    doctor = sys.argv[1:2] == ["doctor"]  # says it in its own report
    if found and os.path.realpath(found[1]) == os.path.dirname(os.path.realpath(__file__)) and not doctor:
        # Files of both lie in one folder. Some commands would start, and fail later.
        return _refuse(found[0])
    try:
        from dflash_mlx.cli.app import main as run
    except Exception:
        if found is None:
            raise
        return _refuse(found[0])
    if found and not doctor and "_DFLASH_MLX_COMPLETE" not in os.environ:  # a shell that completes shows no warnings
        print(f"warning: {explain(found[0])}", file=sys.stderr)
    return run()


def _refuse(version: str) -> int:
    print(f"error: {explain(version)}", file=sys.stderr)
    return 1
