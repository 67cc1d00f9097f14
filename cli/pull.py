"""`dflash-mlx pull`: models onto this disk before they are needed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx.cli import options
from dflash_mlx.cli.live import quiet_keyboard
from dflash_mlx.cli.models_table import size_words
from dflash_mlx.cli.output import LoadProgress, note
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.hub.registry import ModelSource

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx pull qwen3-4b

  dflash-mlx pull z-lab/Qwen3-4B-DFlash-b16 --revision main

  dflash-mlx pull qwen3-4b --verify
"""


def pull_command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PAIR|REPO",
            help="A known pair (its target and drafter), or one model of the Hub: owner/name.",
            autocompletion=options.complete_pair,
        ),
    ],
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="REV", help="A commit, tag or branch of the model, to stay with it."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare a copy that is here with its checksums, and repair it.")
    ] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Ask the Hub for a newer state; a copy that is here is used otherwise.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Download a pair or a model, and check what arrives.

    It can be stopped at any moment; the next run goes on from there. Only weights, configuration, tokenizer and
    template files are fetched, never code. Models that LM Studio has, or that lie in a folder of
    $DFLASH_MLX_MODEL_DIRS, are used from there.
    """
    sources = _sources(what, revision)
    found = []
    with quiet_keyboard(), LoadProgress() as progress:
        from dflash_mlx.hub.download import pull

        for role, source in sources:
            progress.report(f"looking for {source}", None)
            pulled = pull(source, verify=verify, update=update, report=progress.report)
            found.append(_describe(role, source, pulled))
    if as_json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
        return
    for model in found:
        print(_line(model))
    _mention_drafter(what, sources)


def _sources(what: str, revision: str | None) -> "list[tuple[str, ModelSource]]":
    from dflash_mlx.hub.registry import find_pair, parse_source

    if "/" not in what:
        if revision:
            raise UsageError("--revision is for one model of the Hub; name it as owner/name.")
        if Path(what).is_dir():
            raise UsageError(_here_already(what))
        try:
            spec = find_pair(what)
        except UsageError as error:
            raise UsageError(f"{error} A single model of the Hub is named as owner/name.") from None
        return [("target", spec.target), ("drafter", spec.drafter)]
    source = parse_source(what)
    if source.kind != "hub":
        raise UsageError(_here_already(what))
    if revision and source.revision:
        raise UsageError(f"{what} names a revision, and so does --revision; give one of them.")
    return [("model", replace(source, revision=revision or source.revision))]


def _here_already(what: str) -> str:
    return f"{what} is a folder on this disk already; pull takes a pair, or a model of the Hub."


def _describe(role: str, source: "ModelSource", pulled: Any) -> dict[str, Any]:
    from dflash_mlx.hub.memory import folder_bytes

    return {
        "role": role,
        "source": str(source),
        "folder": str(pulled.folder),
        "revision": pulled.revision,
        "weights_mb": round(folder_bytes(pulled.folder) / 1e6),
        "fetched": pulled.fetched,
        "verified_files": pulled.verified_files,
    }


def _line(model: dict[str, Any]) -> str:
    parts = [f"{model['role']}: {model['source']}", size_words(model["weights_mb"])]
    if model["revision"]:
        parts.append(f"revision {model['revision'][:12]}")
    if model["verified_files"] is not None:
        parts.append(f"checksums of {model['verified_files']} files are right")
    return f"{', '.join(parts)}\n  {model['folder']}"


def _mention_drafter(what: str, sources: "list[tuple[str, ModelSource]]") -> None:
    """A target alone decodes plainly; say what would make it faster, where that is known without asking anyone."""
    from dflash_mlx.hub.registry import list_pairs
    from dflash_mlx.hub.resolve import local_facts, match_target

    [(role, source), *_] = sources
    if role != "model":
        return
    try:
        match = match_target(local_facts(source), list_pairs())
    except UsageError:  # a drafter itself, or one of several targets of the same build
        return
    if match is None:
        return
    drafter = match.pair.drafter
    if drafter.kind == "hub":
        note(f"its drafter is {drafter}: dflash-mlx pull {drafter}", copyable=True)
    else:
        command = f'dflash-mlx generate "Why is the sky blue?" --model {source}'
        note(f"its drafter comes with dflash-mlx: {command}", copyable=True)
