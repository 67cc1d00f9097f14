"""A ModelSource -> a folder on this disk with config.json, *.safetensors and, for targets, the tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub import huggingface, pypi
from dflash_mlx.hub.folder import check_folder
from dflash_mlx.hub.hub_files import checkable_files, damaged_files
from dflash_mlx.hub.local import find_local
from dflash_mlx.hub.registry import ModelSource, shipped_folder
from dflash_mlx.hub.store import Report

__all__ = ["Pulled", "Report", "ensure_model", "find_on_disk", "is_ready", "pull"]


def ensure_model(source: ModelSource, *, report: Report | None = None) -> Path:
    """The model's folder, fetched and converted first where it is not there yet.

    `report` is called with a message and the fraction done (None where unknown). May be interrupted at any moment and
    run again. Raises DownloadError where the model cannot be fetched, CheckpointError where it cannot be used.
    """
    report = report or _silent
    if source.kind == "pypi-gguf":
        return pypi.ensure(source, report=report)
    if source.kind == "hub":
        elsewhere = _elsewhere(source)
        return elsewhere or huggingface.ensure(source, report=report)
    return check_folder(_local(source))


@dataclass(frozen=True)
class Pulled:
    """A model that is on this disk now. `revision`: its commit, where the Hub's cache holds it."""

    folder: Path
    revision: str | None
    fetched: bool  # whether anything had to come over the network
    verified_files: int | None  # files compared with their checksums; None where that was not asked for


def pull(source: ModelSource, *, verify: bool = False, update: bool = False, report: Report | None = None) -> Pulled:
    """Bring a model onto this disk, as `ensure_model` does, and say where it is.

    verify: compare the copy that was there with its checksums and fetch what is damaged again; files that are fetched
    are always compared. update: ask the Hub whether there is a newer state. Raises as `ensure_model`.
    """
    report = report or _silent
    before = find_on_disk(source)
    if source.kind != "hub" or (before is not None and not huggingface.is_cache(before) and not update):
        return Pulled(ensure_model(source, report=report), None, fetched=before is None, verified_files=None)
    if before is None or update:
        folder = huggingface.fetch(source, report=report, verify=verify)
        changed = folder != before
    else:
        report(f"checking {source}" if verify else f"{source} is here", None)
        changed = verify and bool(damaged_files(before))
        folder = huggingface.fetch(source, report=report, verify=True) if changed else before
    checked = checkable_files(folder) if verify or changed else None
    return Pulled(folder, folder.name, fetched=changed, verified_files=checked)


def is_ready(source: ModelSource) -> bool:
    """Whether `ensure_model` would answer at once. Never touches the network."""
    if source.kind == "pypi-gguf":
        return pypi.is_ready(source)
    return find_on_disk(source) is not None


def find_on_disk(source: ModelSource) -> Path | None:
    """The complete folder of a source, without network; None where there is none."""
    try:
        if source.kind == "pypi-gguf":
            return pypi.ensure(source, report=_silent) if pypi.is_ready(source) else None
        if source.kind == "hub":
            return _elsewhere(source) or huggingface.find_cached(source)
        return check_folder(_local(source))
    except CheckpointError:
        return None


def _elsewhere(source: ModelSource) -> Path | None:
    """A copy outside the Hub's cache. Those say nothing about their revision, so a wanted one is not looked for."""
    return find_local(source.repo) if source.repo is not None and source.revision is None else None


def _local(source: ModelSource) -> Path:
    assert source.path is not None
    return shipped_folder(source.path) if source.kind == "shipped" else Path(source.path).expanduser()


def _silent(message: str, fraction: float | None) -> None:
    del message, fraction
