"""`dflash-mlx models`: the pairs that are known, what each needs, and whether it works here."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from dflash_mlx.cli import options
from dflash_mlx.cli.models_table import print_table, size_words, yes_or_no
from dflash_mlx.cli.output import note, say

if TYPE_CHECKING:
    from dflash_mlx.hub.registry import PairSpec

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx models

  dflash-mlx models list --all

  dflash-mlx models qwen3.5

  dflash-mlx models list --fits --downloaded

  dflash-mlx models show demo

  dflash-mlx models check demo
"""

_LABELS = {
    "name": "name",
    "aliases": "also called",
    "title": "what it is",
    "target": "target (answers)",
    "drafter": "drafter (guesses)",
    "gated": "access",
    "method": "drafter's method",
    "methods": "ways to draft",
    "size": "on disk",
    "memory": "in memory",
    "fits_memory": "fits this machine",
    "downloaded": "downloaded",
    "block_size": "block size",
    "variants": "other revisions",
    "thinking": "thinking mode",
    "verified": "tested",
    "license": "licence",
    "notes": "notes",
}
_VERIFIED = {
    "measured": "yes: its tokens and its speed were measured",
    "runs": "yes: it ran and gave the target's tokens",
    "loads": "in part: it was loaded and checked",
    "listed": "no: it is listed from what its makers publish",
}
_THINKING = {
    "none": "the target has none",
    "off": "drafter made for answers without thinking",
    "on": "drafter made for answers with thinking",
    "both": "drafter made for both",
    "unknown": "not published",
}


class _Group(TyperGroup):
    """`models qwen` is short for `models list qwen`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


models_app = typer.Typer(
    cls=_Group,
    help="List the known pairs of model and drafter: size, whether they are on disk, whether they fit.",
    rich_markup_mode="rich",
)
Name = Annotated[str, typer.Argument(metavar="PAIR", autocompletion=options.complete_pair)]


@models_app.command("list")
def list_command(
    text: Annotated[str, typer.Argument(metavar="[FILTER]", help="Only pairs with this text in them.")] = "",
    fits: Annotated[bool, typer.Option("--fits", help="Only pairs that this machine's memory holds.")] = False,
    downloaded: Annotated[bool, typer.Option("--downloaded", help="Only pairs that are on this disk.")] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also pairs that are too large for this machine, or of unknown size.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """The known pairs in a table. Without a filter: those that this machine's memory holds.

    A wide terminal also shows the models' ids; --json always lists every pair. Example: dflash-mlx models list gemma
    """
    from dflash_mlx.hub.registry import list_pairs

    pairs = [describe(spec) for spec in list_pairs() if _mentions(spec, text)]
    pairs = [p for p in pairs if (p["fits_memory"] or not fits) and (p["downloaded"] or not downloaded)]
    if as_json:
        print(json.dumps(pairs, ensure_ascii=False, indent=2))
        return
    only_fitting = not (text or downloaded or show_all)
    shown = [p for p in pairs if p["fits_memory"] or not only_fitting]
    if shown:
        print_table(shown, show_fits=not (only_fitting or fits))
    elif not only_fitting:
        say("no known pair is like that; `dflash-mlx models list --all` lists them all")
    if only_fitting and len(shown) < len(pairs):
        note(
            f"{len(pairs) - len(shown)} more pairs are too large for this machine or of unknown size: "
            "`dflash-mlx models list --all` lists them too, `dflash-mlx models show NAME` says more about one."
        )


@models_app.command("show")
def show_command(name: Name, as_json: options.Json = False) -> None:
    """Everything that is known about one pair, by its name or a target's. Example: dflash-mlx models show demo"""
    pair = describe(find_spec(name))
    if as_json:
        print(json.dumps(pair, ensure_ascii=False, indent=2))
        return
    words = {
        **pair,
        "methods": [*pair["methods"], *(["mtp if its files have the head"] if pair["brings_head"] is None else [])],
        "size": size_words(pair["disk_mb"]),
        "memory": _memory_words(pair["memory"]),
        "verified": _VERIFIED[pair["verified"]],
        "thinking": _THINKING[pair["thinking"]],
        "gated": "gated: the drafter's owner must let you in" if pair["gated"] else "",
        "license": pair["license"] or "see the models' own pages",
    }
    for key, label in _LABELS.items():
        if words[key] not in ("", []):
            say(f"{label + ':':<20}{_words(words[key])}")
    for other in pair["other_targets"]:
        print(f"{'other target:':<20}{other}")


@models_app.command("check")
def check_command(name: Name, precision: options.Precision = options.DType.auto, as_json: options.Json = False) -> None:
    """Load a pair, downloading what is missing, and run the checks that target and drafter belong together.

    Example: dflash-mlx models check demo
    """
    spec = find_spec(name)
    pair = options.ModelChoice(pair=spec.name, dtype=precision, can_be_plain=False, recheck=True).open()
    if as_json:
        content = {"pair": spec.name, "ok": True, "checks": pair.checks, "load_seconds": round(pair.load_seconds, 3)}
        print(json.dumps(content, ensure_ascii=False))
        return
    for line in pair.checks:
        say(f"ok: {line}")
    say(f"{spec.name} works here: target and drafter belong together")


def find_spec(name: str) -> "PairSpec":
    """The pair by its name, or by the name of a target it is for. Raises UsageError."""
    from dflash_mlx.hub.registry import find_pair
    from dflash_mlx.hub.resolve import pair_for_target

    return pair_for_target(name).pair if "/" in name else find_pair(name)


def describe(spec: "PairSpec") -> dict[str, Any]:
    """A pair for --json: the registry's words, and what holds on this machine."""
    from dflash_mlx.hub.download import find_on_disk
    from dflash_mlx.hub.memory import pair_needs
    from dflash_mlx.runtime import backend

    target, drafter = find_on_disk(spec.target), find_on_disk(spec.drafter)
    needs = pair_needs(spec, target=target, drafter=drafter)
    head = _brings_head(spec, target)
    return {
        "name": spec.name,
        "aliases": list(spec.aliases),
        "title": spec.title,
        "base": spec.base,
        "target": str(spec.target),
        "drafter": "comes with dflash-mlx" if spec.drafter.kind == "shipped" else str(spec.drafter),
        "method": spec.method,
        "methods": ["dflash", "dflash+ngram", *(["mtp", "mtp+ngram"] if head else []), "ngram"],
        "brings_head": head,
        "gated": spec.drafter.gated or spec.target.gated,
        "disk_mb": spec.disk_mb,
        "memory": {
            "target_mb": _mb(needs.target),
            "drafter_mb": _mb(needs.drafter),
            "cache_mb": _mb(needs.cache),
            "total_mb": _mb(needs.total),
            "estimated": needs.estimated,
        },
        "block_size": spec.block_size,
        "variants": list(spec.variants),
        "thinking": spec.thinking,
        "verified": spec.verified,
        "downloaded": target is not None and drafter is not None,
        "fits_memory": needs.fits(backend().memory_bytes),
        "license": spec.license,
        "notes": spec.notes,
        "other_targets": [str(source) for source in spec.other_targets],
        "sources": {"target": _source(spec.target, target), "drafter": _source(spec.drafter, drafter)},
    }


def _brings_head(spec: "PairSpec", target: Path | None) -> bool | None:
    """Whether the target drafts with a head of its own; None where that is seen once it is on this disk."""
    from dflash_mlx.hub.own_head import HEAD_FAMILIES, brings_head

    if target is not None:
        return brings_head(target)
    return None if spec.shape.family in HEAD_FAMILIES else False


def _mentions(spec: "PairSpec", text: str) -> bool:
    places = [spec.name, *spec.aliases, spec.title, spec.method, spec.base or "", str(spec.target), str(spec.drafter)]
    return all(any(word in place.lower() for place in places) for word in text.lower().split())


def _source(source: Any, folder: Any) -> dict[str, Any]:
    known = {key: value for key, value in vars(source).items() if value not in (None, False)}
    return {**known, "folder": str(folder) if folder else None}


def _mb(size: int | None) -> int | None:
    return None if size is None else round(size / 1e6)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return yes_or_no(value)
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return "unknown" if value is None else " ".join(str(value).split())


def _memory_words(memory: dict[str, Any]) -> str:
    parts = ", ".join(f"{key} {size_words(memory[f'{key}_mb'])}" for key in ("target", "drafter", "cache"))
    return f"{'about ' if memory['estimated'] else ''}{size_words(memory['total_mb'])} ({parts})"
