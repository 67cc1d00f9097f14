"""`dflash-mlx models`: the pairs that are known, and what each needs."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli import options
from dflash_mlx.runtime import total_memory_bytes

if TYPE_CHECKING:
    from dflash_mlx.hub.registry import ModelSource, PairSpec

# Weights take the room of the files; caches, activations and the rest of the system need some too.
_SHARE_FOR_MODELS = 0.7

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx models

  dflash-mlx models show demo

  dflash-mlx models --json
"""

models_app = typer.Typer(
    help="List the known pairs of model and drafter: size, whether they are on disk, whether they fit.",
    rich_markup_mode="rich",
)


@models_app.callback(invoke_without_command=True)
def list_command(context: typer.Context, as_json: options.Json = False) -> None:
    if context.invoked_subcommand is not None:
        return
    from dflash_mlx.hub.registry import list_pairs

    pairs = [describe(spec) for spec in list_pairs()]
    if as_json:
        print(json.dumps(pairs, ensure_ascii=False, indent=2))
    else:
        _print_table(pairs)


@models_app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", autocompletion=options.complete_pair)],
    as_json: options.Json = False,
) -> None:
    """Everything that is known about one pair. Example: dflash-mlx models show demo"""
    from dflash_mlx.hub.registry import find_pair

    pair = describe(find_pair(name))
    if as_json:
        print(json.dumps(pair, ensure_ascii=False, indent=2))
        return
    labels = {
        "name": "name",
        "aliases": "also called",
        "title": "what it is",
        "target": "target (answers)",
        "drafter": "drafter (guesses)",
        "size": "on disk",
        "block_size": "block size",
        "thinking": "thinking mode",
        "verified": "tried",
        "downloaded": "downloaded",
        "fits_memory": "fits in memory",
        "license": "licence",
        "notes": "notes",
    }
    words = {**pair, "size": _size(pair["disk_mb"])}
    for key, label in labels.items():
        if words[key] not in ("", []):
            print(f"{label + ':':<20}{_words(words[key])}")
    for other in pair["other_targets"]:
        print(f"{'other target:':<20}{other}")


def describe(spec: "PairSpec") -> dict[str, Any]:
    """A pair for --json: the registry's words, and what holds on this machine."""
    from dflash_mlx.hub.download import is_ready

    return {
        "name": spec.name,
        "aliases": list(spec.aliases),
        "title": spec.title,
        "target": str(spec.target),
        "drafter": "comes with dflash-mlx" if spec.drafter.kind == "shipped" else str(spec.drafter),
        "disk_mb": spec.disk_mb,
        "block_size": spec.block_size,
        "thinking": spec.thinking,
        "verified": spec.verified,
        "downloaded": is_ready(spec.target) and is_ready(spec.drafter),
        "fits_memory": fits_memory(spec.disk_mb, total_memory_bytes()),
        "license": spec.license,
        "notes": spec.notes,
        "other_targets": [str(source) for source in spec.other_targets],
        "sources": {"target": _source(spec.target), "drafter": _source(spec.drafter)},
    }


def fits_memory(disk_mb: int | None, memory_bytes: int) -> bool | None:
    """Whether models of this size leave room for caches and the system; None where the size is unknown."""
    return None if disk_mb is None else disk_mb * 1e6 <= memory_bytes * _SHARE_FOR_MODELS


def _source(source: "ModelSource") -> dict[str, Any]:
    return {key: value for key, value in asdict(source).items() if value not in (None, False)}


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return "unknown" if value is None else " ".join(str(value).split())


def _size(disk_mb: int | None) -> str:
    if disk_mb is None:
        return "unknown"
    return f"{disk_mb} MB" if disk_mb < 1000 else f"{disk_mb / 1000:.1f} GB"


def _print_table(pairs: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # In a pipe nothing may be cut off or wrapped: there the table is as wide as it needs.
    console = Console(width=None if sys.stdout.isatty() else 500)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("name", "also", "target", "drafter", "size", "block", "on disk", "fits"):
        table.add_column(column, overflow="fold")
    for pair in pairs:
        table.add_row(
            pair["name"],
            ", ".join(pair["aliases"]),
            pair["target"],
            pair["drafter"],
            _size(pair["disk_mb"]),
            str(pair["block_size"]),
            _words(pair["downloaded"]),
            _words(pair["fits_memory"]),
        )
    console.print(table)
