"""What of this project lies on this disk: models, measurements, leftovers, and the known models in the Hub's cache.

Only what this project wrote is found here, so only that can be removed: a model's folder by the files in its stamp,
measurements by their names, leftovers by the temporary names that their makers gave them.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dflash_mlx.errors import DFlashError
from dflash_mlx.hub.huggingface import lock_path
from dflash_mlx.hub.leftovers import held
from dflash_mlx.hub.registry import ModelSource, cache_home, list_pairs
from dflash_mlx.hub.store import STAMP, hold_lock

Kind = Literal["model", "measurements", "leftovers", "hub"]
MEASUREMENTS, LEFTOVERS = "measurements", "leftovers"
_MEASURED = ("round-costs", "group-costs", "pair-checks", "ways")
_MEASURED_FILE = re.compile(r"[0-9a-f]{24}\.json")
_TEMPORARY = re.compile(r"\..+\.making-.+")


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something that can be removed under its name. `size` is in bytes; `about` says what it is."""

    name: str
    kind: Kind
    size: int
    about: str
    paths: tuple[Path, ...]


def list_items() -> list[Item]:
    """Everything that is there, the shared Hub's cache last. No network."""
    home = cache_home()
    items = list(_models(home / "models"))
    found = (file for folder in _MEASURED for file in _files(home / folder))
    measured = tuple(file for file in found if _MEASURED_FILE.fullmatch(file.name))
    if measured:
        files = "1 file" if len(measured) == 1 else f"{len(measured)} files"
        items.append(_item(MEASUREMENTS, "measurements", f"speeds of this machine, checks of pairs, {files}", measured))
    left = tuple(_leftovers(home))
    if left:
        items.append(_item(LEFTOVERS, "leftovers", "of runs that were killed", left))
    return items + list(_hub_models())


def remove_item(item: Item) -> int:
    """Remove it; returns the bytes that were freed. What this project did not write stays. Raises DFlashError."""
    try:
        if item.kind == "hub":
            return _remove_from_hub(item.name)
        if item.kind == "model":
            return _remove_model(item.paths[0])
        if item.kind == "leftovers":
            return sum(map(_remove_abandoned, item.paths))
        return sum(map(_remove, item.paths))
    except OSError as error:
        where = error.filename or item.name
        raise DFlashError(f"cannot remove {where}: {error.strerror}. Check who may write there.") from error


def _models(folder: Path) -> Iterator[Item]:
    users = {pair.target.name: pair.name for pair in list_pairs() if pair.target.kind == "pypi-gguf"}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        files = _stamped_files(path)
        if files:
            about = f"target of the pair {users[path.name]}" if path.name in users else "a converted model"
            yield Item(name=path.name, kind="model", size=_size(files), about=about, paths=(path,))


def _stamped_files(folder: Path) -> tuple[Path, ...]:
    """The files that this project wrote into a model's folder, its stamp last; none where it has no stamp."""
    if folder.is_symlink() or not (folder / STAMP).is_file():
        return ()
    try:
        names = list(json.loads((folder / STAMP).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    plain = [name for name in names if isinstance(name, str) and name not in ("", "..") and Path(name).name == name]
    return tuple(path for path in (folder / name for name in (*plain, STAMP)) if path.is_file() or path.is_symlink())


def _leftovers(home: Path) -> Iterator[Path]:
    """Temporary files and folders that no running process holds."""
    for folder in (home, home / "models", *(home / name for name in _MEASURED)):
        for path in sorted(folder.glob(".*")):
            if _TEMPORARY.fullmatch(path.name) and not path.is_symlink():
                with contextlib.suppress(OSError), held(path) as abandoned:
                    if abandoned:
                        yield path


def _hub_models() -> Iterator[Item]:
    """Known pairs' models in the Hub's cache, which other programs share."""
    known = {
        source.repo: pair.name
        for pair in list_pairs()
        for source in (pair.target, *pair.other_targets, pair.drafter)
        if source.repo is not None
    }
    for repo in _cached_repos():
        if repo.repo_type == "model" and repo.repo_id in known:
            about = f"for the pair {known[repo.repo_id]}, in the Hub's cache"
            yield Item(name=repo.repo_id, kind="hub", size=repo.size_on_disk, about=about, paths=(repo.repo_path,))


def _cached_repos() -> list[Any]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id)
    except (CacheNotFound, OSError, ValueError):
        return []


def _remove_from_hub(name: str) -> int:
    """By the Hub's own client, which knows what files of its cache share."""
    from huggingface_hub import scan_cache_dir

    with hold_lock(lock_path(ModelSource(kind="hub", repo=name)), lambda message, fraction: None):
        info = scan_cache_dir()
        found = [repo for repo in info.repos if (repo.repo_type, repo.repo_id) == ("model", name)]
        # Two repositories can hold the same commit, where one was renamed: only this one is given to the client.
        plan = replace(info, repos=frozenset(found)).delete_revisions(
            *(r.commit_hash for x in found for r in x.revisions)
        )
        plan.execute()
    stays = [repo.repo_path for repo in found if repo.repo_path.exists()]
    if stays:
        raise DFlashError(f"cannot remove all of {stays[0]}. Check who may write there.")
    return int(plan.expected_freed_size)


def _remove_model(folder: Path) -> int:
    with hold_lock(folder.parent / f".{folder.name}.lock", lambda message, fraction: None):
        # The stamp goes first: from then on the folder counts as incomplete.
        freed = sum(_remove(path) for path in reversed(_stamped_files(folder)))
        with contextlib.suppress(OSError):  # somebody else's files are in it
            folder.rmdir()
    return freed


def _remove(path: Path) -> int:
    size = _size((path,))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return size


def _remove_abandoned(path: Path) -> int:
    with held(path) as abandoned:
        return _remove(path) if abandoned else 0


def _item(name: str, kind: Kind, about: str, paths: tuple[Path, ...]) -> Item:
    return Item(name=name, kind=kind, size=_size(paths), about=about, paths=paths)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def _size(paths: tuple[Path, ...]) -> int:
    """Bytes of files, and of all that folders hold; links count nothing."""
    files = [file for path in paths for file in (path, *(path.rglob("*") if path.is_dir() else ()))]
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())
