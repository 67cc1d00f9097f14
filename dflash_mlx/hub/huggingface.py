"""Checkpoints on the Hugging Face Hub: weights, configuration and tokenizer files only, never code.

Weights are safetensors. Drafters that have none are fetched as files of PyTorch, of which only tensors are read.

The Hub's cache is used as it is, so other programs share the files. A file enters it only complete and with the right
checksum (`hub_files.fetch_blob`), and weights come last, so that a download that was stopped anywhere is never taken
for a whole model.
"""

import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_mlx.errors import CheckpointError, DFlashError, DownloadError
from dflash_mlx.hub import hub_files
from dflash_mlx.hub.folder import TORCH_WEIGHTS, check_code, check_folder, read_json
from dflash_mlx.hub.hub_errors import explain
from dflash_mlx.hub.naming import is_drafter
from dflash_mlx.hub.registry import ModelSource, cache_home
from dflash_mlx.hub.store import Report, hold_lock

PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
# The same weights in other layouts, which some repositories carry beside the usual one.
UNWANTED = ["*/*", "consolidated*.safetensors"]
_ROOM = 200e6  # bytes left free on the disk


@dataclass(frozen=True)
class HubFile:
    """A file of a repository, as the Hub lists it. `sha256` is known for large files."""

    name: str
    size: int | None
    sha256: str | None


def is_ready(source: ModelSource) -> bool:
    """Whether a complete copy is in the Hub's cache. No network."""
    try:
        return find_cached(source) is not None
    except CheckpointError:
        return False


def ensure(source: ModelSource, *, report: Report) -> Path:
    """The folder in the Hub's cache; what is missing there is fetched.

    A copy that is complete is used without asking the Hub, also for a branch that has moved on. May be stopped at any
    moment and run again: it goes on where it was. Raises DownloadError with the next step where the Hub refuses or
    cannot be reached, CheckpointError where the files are not usable.
    """
    try:
        folder = find_cached(source)
    except CheckpointError as error:
        report(f"the copy in the Hub's cache cannot be used; fetching what is missing ({error})", None)
        return fetch(source, report=report, verify=True)
    return folder if folder is not None else fetch(source, report=report)


def fetch(source: ModelSource, *, report: Report, verify: bool = False) -> Path:
    """Ask the Hub for the newest state of the source's revision and fetch what the cache lacks. Raises as `ensure`.

    verify: compare the files that are there with their checksums first, and fetch those that are damaged again.
    """
    try:
        with hold_lock(lock_path(source), report):
            return _fetch(source, report, verify=verify)
    except (DFlashError, AssertionError, AttributeError, ImportError, NameError, TypeError):
        raise  # ours: a clear line already, or a bug
    except Exception as error:  # the client passes its HTTP library's own errors on, and that library changes
        raise DownloadError(explain(source, error)) from error


def find_cached(source: ModelSource) -> Path | None:
    """The cached copy, checked; None where nothing is there. Raises CheckpointError for a part of one."""
    from huggingface_hub import snapshot_download

    assert source.repo is not None
    try:
        folder = snapshot_download(
            source.repo,
            revision=source.revision,
            allow_patterns=[*PATTERNS, *TORCH_WEIGHTS],
            ignore_patterns=UNWANTED,
            local_files_only=True,
        )
    except (OSError, ValueError):
        return None
    return check_folder(Path(folder))


def is_cache(folder: Path) -> bool:
    """Whether a model folder is a snapshot in the Hub's cache."""
    return folder.parent.name == "snapshots"


def card_facts(source: ModelSource) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and the model card's YAML, asked from the Hub. Raises DownloadError, CheckpointError."""
    from huggingface_hub import HfApi, hf_hub_download

    assert source.repo is not None
    try:
        info = HfApi().model_info(source.repo, revision=source.revision)
        config = hf_hub_download(source.repo, "config.json", revision=info.sha)
    except Exception as error:
        raise DownloadError(explain(source, error)) from error
    return read_json(Path(config)), info.card_data.to_dict() if info.card_data else {}


def _fetch(source: ModelSource, report: Report, *, verify: bool) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    assert source.repo is not None
    report(f"asking the Hugging Face Hub for {source}", None)
    info = HfApi().model_info(source.repo, revision=source.revision, files_metadata=True)
    assert info.sha is not None
    files = wanted_files(info.siblings or [])
    _refuse_unusable(source, files)
    # Not by the client alone, which leaves a part under a new name whenever it is killed.
    config = hub_files.fetch_blob(
        source.repo, "config.json", revision=info.sha, progress=lambda done: None, report=report
    )
    snapshot = config.parent
    about = read_json(config)
    check_code(str(source), about)
    if not is_drafter(about):
        files = [file for file in files if file.name not in TORCH_WEIGHTS]
        _refuse_unusable(source, files)

    if verify:
        report(f"checking what is there of {source}", None)
    missing = [file for file in files if not _is_whole(snapshot / file.name, file, verify=verify)]
    _check_space(source, missing, snapshot)
    done, total = 0, sum(file.size or 0 for file in missing)
    for file in missing:
        size = file.size or 0

        def progress(bytes_done: int, name: str = file.name, before: int = done) -> None:
            words = f"fetching {source}: {name}, {(before + bytes_done) / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            report(words, (before + bytes_done) / total if total else None)

        hub_files.fetch_blob(source.repo, file.name, revision=info.sha, progress=progress, report=report)
        done += size
    if source.revision != info.sha:
        # Only now does the branch point here, so that an older complete copy was found until this moment.
        hf_hub_download(source.repo, "config.json", revision=source.revision)
    return check_folder(snapshot)


def wanted_files(siblings: list[Any]) -> list[HubFile]:
    """The files to fetch of those that the Hub lists, weights last; a PyTorch file where there is nothing else."""
    files = []
    whole = any(fnmatch.fnmatch(entry.rfilename, "*.safetensors") for entry in siblings)
    wanted = PATTERNS if whole else [*PATTERNS, *TORCH_WEIGHTS]
    for entry in siblings:
        name = entry.rfilename
        if any(fnmatch.fnmatch(name, p) for p in wanted) and not any(fnmatch.fnmatch(name, p) for p in UNWANTED):
            lfs = entry.lfs
            files.append(HubFile(name, entry.size, lfs["sha256"] if lfs else None))
    return sorted(files, key=lambda file: (_is_weights(file.name), file.name))


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") or name in TORCH_WEIGHTS


def _refuse_unusable(source: ModelSource, files: list[HubFile]) -> None:
    names = [file.name for file in files]
    if "config.json" not in names:
        raise CheckpointError(
            f"{source} has no config.json, so it is no model for MLX. Look for an MLX conversion of it."
        )
    if not any(_is_weights(name) for name in names):
        raise CheckpointError(
            f"{source} has no *.safetensors weights; GGUF files and pickles are not fetched. "
            "Look for an MLX conversion of it, at mlx-community for instance."
        )


def _is_whole(path: Path, file: HubFile, *, verify: bool) -> bool:
    if not path.is_file() or (file.size is not None and path.stat().st_size != file.size):
        return False
    return not (verify and hub_files.damaged(path.resolve()))


def _check_space(source: ModelSource, missing: list[HubFile], folder: Path) -> None:
    """Raise DownloadError, before anything is fetched, where the disk is too small for what is missing."""
    import shutil

    needed = sum(file.size or 0 for file in missing) - hub_files.bytes_in_parts(folder, missing)
    free = shutil.disk_usage(folder).free
    if missing and free < needed + _ROOM:
        raise DownloadError(
            f"{source} needs {needed / 1e9:.1f} GB more on the disk of {folder.parents[1]}, and {free / 1e9:.1f} GB "
            "are free. Make room, or set HF_HOME to a folder on a larger disk."
        )


def lock_path(source: ModelSource) -> Path:
    assert source.repo is not None
    folder = cache_home() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"hub--{source.repo.replace('/', '--')}.lock"
