"""The pair that `chat` and `generate` take when none is named, and `dflash-mlx default`, which remembers one."""

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_mlx.cli import options
from dflash_mlx.cli.output import note
from dflash_mlx.errors import DFlashError, UsageError

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx default qwen3-4b

  dflash-mlx default

  dflash-mlx default --clear
"""
_DEMO = "demo"


def default_command(
    pair: Annotated[
        str | None, typer.Argument(metavar="[PAIR]", help="A known pair.", autocompletion=options.complete_pair)
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Forget the pair that was remembered.")] = False,
) -> None:
    """Remember the pair that chat and generate use when none is named; without PAIR, say which one that is.

    When nothing is remembered, it is the largest known pair that is downloaded and fits this machine, else the demo.
    """
    from dflash_mlx.hub.registry import find_pair

    if clear and pair is not None:
        raise UsageError("--clear forgets the default, and PAIR sets it; give one of them.")
    if clear:
        write_default(None)
        print("no default is remembered now")
    elif pair is not None:
        name = find_pair(pair).name
        write_default(name)
        print(f"{name} is the default now")
    else:
        name, reason = default_pair()
        print(f"{name} ({reason})")


def with_default(choice: options.ModelChoice) -> options.ModelChoice:
    """The user's choice of models, or the default pair where nothing is chosen, with a line on stderr."""
    if choice.pair is not None or choice.model is not None or choice.draft_model is not None:
        return choice
    name, reason = default_pair()
    note(f"using the pair {name} ({reason}); choose another with --pair.")
    return replace(choice, pair=name)


def default_pair() -> tuple[str, str]:
    """The pair that is used when none is named, and why."""
    from dflash_mlx.hub.registry import find_pair

    remembered = read_default()
    if remembered is not None:
        try:
            return find_pair(remembered).name, "your default"
        except UsageError as error:
            note(f"your default cannot be used: {error}", style="yellow")
    from dflash_mlx.cli.models import describe
    from dflash_mlx.hub.registry import list_pairs

    return best_pair(map(describe, list_pairs()))


def best_pair(pairs: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """The largest pair that is downloaded and fits, else the demo; pairs as `models.describe` gives them."""
    usable = [pair for pair in pairs if pair["downloaded"] and pair["fits_memory"] and _DEMO not in pair["aliases"]]
    if not usable:
        return _DEMO, "no larger known pair is downloaded"
    best = max(usable, key=lambda pair: (pair["memory"]["total_mb"], pair["name"]))
    return best["name"], "the largest downloaded pair that fits this machine"


def settings_path() -> Path:
    """Where settings are kept: in $DFLASH_MLX_HOME where that is set, else where the user's other settings are."""
    home = os.environ.get("DFLASH_MLX_HOME")
    if home:
        return Path(home).expanduser().absolute() / "settings.json"
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "dflash-mlx" / "settings.json"


def read_default() -> str | None:
    """The pair that was remembered; None where there is none, or where the file cannot be read, which is said."""
    path = settings_path()
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        note(f"{path} cannot be read ({error}); `dflash-mlx default PAIR` writes it anew.", style="yellow")
        return None
    pair = settings.get("pair") if isinstance(settings, dict) else None
    return pair if isinstance(pair, str) else None


def write_default(pair: str | None) -> None:
    """Remember a pair, or forget it (None). The file is whole or not there at any moment. Raises DFlashError."""
    from dflash_mlx.hub.leftovers import write_atomically

    path = settings_path()
    try:
        if pair is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"pair": pair}) + "\n")
    except OSError as error:
        raise DFlashError(f"cannot write {path}: {error.strerror}. Check the folder, or name the pair.") from error
