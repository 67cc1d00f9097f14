"""A wheel with a GGUF file in it, and the source that names both."""

import base64
import hashlib
import zipfile
from pathlib import Path

from dflash_mlx.hub.registry import ModelSource


def write_wheel(path: Path, file: Path) -> None:
    info = "tiny_gguf-1.0.dist-info"
    parts = {
        "tiny_gguf/tiny.gguf": file.read_bytes(),
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in parts.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    parts[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


def wheel_source(wheel: Path, file: Path) -> ModelSource:
    """The model "tiny", which is `file` in `wheel`."""
    return ModelSource(
        kind="pypi-gguf",
        name="tiny",
        wheel="tiny-gguf",
        version="1.0",
        wheel_sha256=sha256(wheel),
        file="tiny_gguf/tiny.gguf",
        sha256=sha256(file),
        download_mb=1,
        disk_mb=1,
    )


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
