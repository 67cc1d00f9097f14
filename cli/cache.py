"""`dflash-mlx cache`: what lies on this disk, and how to free it."""

import difflib
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli import options
from dflash_mlx.cli.output import is_terminal, note, terminal_width
from dflash_mlx.cli.prompt import at_keyboard
from dflash_mlx.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from dflash_mlx.hub.disk import Item

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx cache list

  dflash-mlx cache remove measurements

  dflash-mlx cache remove mlx-community/Qwen3-4B-4bit --yes

  dflash-mlx cache remove --all
"""

cache_app = typer.Typer(
    help="List what dflash-mlx keeps on this disk, and free it.", rich_markup_mode="rich", no_args_is_help=False
)


@cache_app.callback(invoke_without_command=True)
def cache_command(context: typer.Context) -> None:
    """List what dflash-mlx keeps on this disk, and free it."""
    if context.invoked_subcommand is None:
        list_command()


@cache_app.command("list")
def list_command(as_json: options.Json = False) -> None:
    """Models, measurements and leftovers with their sizes. Example: dflash-mlx cache list

    Models of known pairs in the Hugging Face cache are listed too; other programs share that cache.
    """
    from dflash_mlx.hub.disk import list_items

    items = list_items()
    if as_json:
        print(json.dumps([_to_json(item) for item in items], ensure_ascii=False, indent=2))
        return
    _print_table(items)
    if items:
        note("`dflash-mlx cache remove NAME` frees one of them.")


@cache_app.command("remove")
def remove_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="What to remove, as `cache list` names it.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All of it, but nothing of the Hugging Face cache.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, for scripts.")] = False,
) -> None:
    """Free disk space, after a question. Example: dflash-mlx cache remove measurements

    What dflash-mlx did not write is never removed. A model of the shared Hugging Face cache goes only when it is named.
    """
    from dflash_mlx.hub.disk import list_items, remove_item

    if bool(names) == everything:
        raise UsageError("say what to remove: names from `dflash-mlx cache list`, or --all.")
    chosen = choose(list_items(), names or ())
    if not chosen:
        note("there is nothing to remove.")
        return
    _print_table(chosen)
    if not yes and not _confirmed():
        note("nothing was removed.")
        return
    freed = sum(remove_item(item) for item in chosen)
    print(f"{_size_words(freed)} freed")


def choose(items: "list[Item]", names: "tuple[str, ...] | list[str]") -> "list[Item]":
    """The items of these names; without names all but those that other programs share. Raises UsageError."""
    if not names:
        return [item for item in items if item.kind != "hub"]
    by_name = {item.name.lower(): item for item in items}
    for name in names:
        if name.lower() not in by_name:
            close = difflib.get_close_matches(name.lower(), by_name, n=2, cutoff=0.5)
            meant = did_you_mean([by_name[found].name for found in close])
            raise UsageError(f"nothing here is called {name!r}.{meant} `dflash-mlx cache list` shows what there is.")
    return list({name.lower(): by_name[name.lower()] for name in names}.values())


def _confirmed() -> bool:
    if not at_keyboard():
        raise UsageError("nobody is there to be asked; add --yes to remove it.")
    sys.stderr.write("Remove this? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _to_json(item: "Item") -> dict[str, Any]:
    facts = {"name": item.name, "kind": item.kind, "bytes": item.size, "about": item.about}
    return {**facts, "paths": [str(path) for path in item.paths]}


def _print_table(items: "list[Item]") -> None:
    """Sizes and names, and what they are where the terminal has room for it."""
    rows = [(_size_words(item.size), item.name, item.about) for item in items]
    if not rows:
        print("nothing of dflash-mlx is on this disk")
        return
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    room = terminal_width() if is_terminal(sys.stdout) else 1000
    for size, name, about in rows:
        line = f"{size:>{widths[0]}}  {name:<{widths[1]}}"
        print((f"{line}  {about}" if sum(widths) + 4 <= room else line).rstrip())


def _size_words(size: int) -> str:
    for limit, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= limit:
            return f"{size / limit:.1f} {unit}"
    return f"{size} bytes"
