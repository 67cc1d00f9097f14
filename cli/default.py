"""What `chat` and `generate` take when nothing is said, and `dflash-mlx default`, which remembers it."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_mlx.cli import options
from dflash_mlx.cli.output import note, say
from dflash_mlx.cli.settings import SETTINGS, parser
from dflash_mlx.errors import DFlashError, UsageError

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx default qwen3-4b

  dflash-mlx default

  dflash-mlx default --temperature 0.7 --system "Answer in one sentence."

  dflash-mlx default --clear
"""
_DEMO = "demo"


def default_command(
    pair: Annotated[
        str | None, typer.Argument(metavar="[PAIR]", help="A known pair.", autocompletion=options.complete_pair)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", metavar="X", help="Remember a temperature.", parser=parser("temperature")),
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help='Remember instructions. "" forgets them.')
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Forget all that was remembered.")] = False,
) -> None:
    """Remember what chat and generate use when nothing is said: a pair, a temperature, instructions.

    Without any of these, show what is remembered. Without a remembered pair, chat and generate take the largest known
    pair that is downloaded and fits this machine, or else the demo.
    """
    from dflash_mlx.hub.registry import find_pair

    found = {"pair": None if pair is None else find_pair(pair).name, "temperature": temperature, "system": system}
    new = {name: value for name, value in found.items() if value is not None}
    if clear and new:
        raise UsageError("--clear forgets the defaults, and the others set them; give one of them.")
    if clear:
        write_settings({})
        print("no default is remembered now")
    elif new:
        settings = {**read_settings(), **new}
        write_settings({name: value for name, value in settings.items() if value != ""})
        for name, value in new.items():
            print(f"{value} is the default now" if name == "pair" else f"{name}: {value or 'none'}")
    else:
        name, reason = default_pair()
        say(f"{name} ({reason})")
        for setting in ("temperature", "system"):
            if setting in read_settings():
                print(f"{setting}: {read_settings()[setting]}")


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
    from dflash_mlx.hub.registry import chosen_home, xdg_folder

    return (chosen_home() or xdg_folder("XDG_CONFIG_HOME", ".config")) / "settings.json"


def read_default() -> str | None:
    """The pair that was remembered, or None."""
    return read_settings().get("pair")


def sampling_defaults(temperature: float | None, system: str | None) -> tuple[float, str | None]:
    """A temperature and instructions: those that the user gave, else those that are remembered."""
    settings = read_settings() if temperature is None or system is None else {}
    if temperature is None:
        temperature = settings.get("temperature", 0.0)
    return temperature, settings.get("system") if system is None else system


def read_settings() -> dict[str, Any]:
    """What was remembered, of the right kinds; nothing where the file cannot be read, which is said."""
    path = settings_path()
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        note(f"{path} cannot be read ({error}); `dflash-mlx default PAIR` writes it anew.", style="yellow")
        return {}
    found: dict[str, Any] = {}
    for name, value in settings.items() if isinstance(settings, dict) else ():
        if name in ("pair", "system") and isinstance(value, str):
            found[name] = value
        elif name == "temperature" and type(value) in (int, float) and SETTINGS["temperature"].allows(value):
            found[name] = float(value)
    return found


def write_default(pair: str | None) -> None:
    """Remember a pair, or forget it (None). Raises DFlashError."""
    others = {name: value for name, value in read_settings().items() if name != "pair"}
    write_settings(others if pair is None else {**others, "pair": pair})


def write_settings(settings: dict[str, Any]) -> None:
    """Remember this and nothing else. The file is whole or not there at any moment. Raises DFlashError."""
    from dflash_mlx.hub.leftovers import write_atomically

    path = settings_path()
    try:
        if not settings:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, ensure_ascii=False) + "\n")
    except OSError as error:
        raise DFlashError(f"cannot write {path}: {error.strerror}. Check the folder, or name the pair.") from error
