"""Single files of a Hub repository: fetched with resume, checked against their checksum, put into the Hub's cache.

In that cache a file lies under its ETag, which is its SHA-256 for large files (LFS) and its git hash for small ones:
https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from dflash_mlx.errors import DownloadError
from dflash_mlx.hub.store import Report

_PART = ".dflash-mlx.part"
_CHUNK = 1 << 22


class _Named(Protocol):
    @property
    def sha256(self) -> str | None: ...


def fetch_blob(repo: str, name: str, *, revision: str, progress: Callable[[int], None], report: Report) -> Path:
    """Fetch one file of a commit (`revision`) into the Hub's cache; returns its path in the snapshot.

    What an earlier, stopped run has fetched is kept. A file whose checksum is wrong is fetched once more from the
    start. progress(bytes of this file so far). Raises DownloadError and the client's own errors.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    url = hf_hub_url(repo, name, revision=revision)
    facts = get_hf_file_metadata(url)
    if facts.etag is None:
        raise DownloadError(f"the Hub gives no checksum for {name} of {repo}. Check HF_ENDPOINT, then try again.")
    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    blob = blobs / facts.etag
    if damaged(blob):
        blob.unlink()
    if not blob.exists():
        part = blobs / f"{facts.etag}{_PART}"
        for last in (False, True):
            _download(facts.location, url, part, size=facts.size, progress=progress)
            if not damaged(part, etag=facts.etag):
                part.replace(blob)
                break
            part.unlink()
            if last:
                raise DownloadError(f"{name} of {repo} arrived damaged twice (wrong checksum). Try again later.")
            report(f"{name} arrived damaged (wrong checksum); fetching it again", None)
    return Path(hf_hub_download(repo, name, revision=revision))


def bytes_in_parts(snapshot: Path, files: Iterable[_Named]) -> int:
    """Bytes that stopped runs have already fetched of these files."""
    blobs = snapshot.parents[1] / "blobs"
    parts = [blobs / f"{file.sha256}{_PART}" for file in files if file.sha256]
    return sum(part.stat().st_size for part in parts if part.exists())


def damaged(path: Path, *, etag: str | None = None) -> bool:
    """Whether a file exists and is not what its ETag (its own name, unless given) says. Reads all of it."""
    wanted = etag or path.name
    if not path.is_file() or not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", wanted):
        return False
    digest = hashlib.sha256() if len(wanted) == 64 else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() != wanted


def damaged_files(snapshot: Path) -> list[str]:
    """Names of the files in a snapshot folder of the Hub's cache whose checksum is wrong."""
    return [path.name for path in sorted(snapshot.iterdir()) if path.is_symlink() and damaged(path.resolve())]


def checkable_files(snapshot: Path) -> int:
    """How many files of a folder have a checksum: those that the Hub's cache holds under it."""
    return sum(path.is_symlink() for path in snapshot.iterdir())


def _download(location: str, url: str, part: Path, *, size: int | None, progress: Callable[[int], None]) -> None:
    """Bring `part` to its full length, from where it ends now."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers() | {"accept-encoding": "identity"}  # ranges are of the file, not of a packed form
    if urlparse(location).netloc != urlparse(url).netloc:
        # The storage behind the Hub has its own signature in the address and must not see the user's token.
        headers.pop("authorization", None)
    if part.exists() and size is not None and part.stat().st_size > size:
        part.unlink()
    with part.open("ab") as file:
        start = file.tell()
        http_get(
            location, file, resume_size=start, headers=headers, expected_size=size, tqdm_class=_bar(progress, start)
        )


def _bar(progress: Callable[[int], None], start: int) -> Any:
    """The client reports its bytes to a progress bar class; this one passes them on."""

    class Bar:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.done = start

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            self.done += int(n or 0)
            progress(self.done)

    return Bar
