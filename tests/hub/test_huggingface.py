"""Downloads from a Hub that breaks lines, flips bytes and refuses: never a broken model, always a clear line."""

import errno
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_hub
import huggingface_hub
import pytest
from fake_hub import FakeHub
from huggingface_hub import constants, errors

from dflash_mlx.errors import CheckpointError, DownloadError
from dflash_mlx.hub import hub_files, huggingface
from dflash_mlx.hub.download import ensure_model, find_on_disk, is_ready
from dflash_mlx.hub.hub_errors import explain
from dflash_mlx.hub.hub_files import damaged_files
from dflash_mlx.hub.registry import ModelSource

SOURCE = ModelSource(kind="hub", repo="owner/name")
WEIGHTS = "model.safetensors"


def safetensors(size: int = 60_000, seed: int = 0) -> bytes:
    body = random.Random(seed).randbytes(size)
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + body


def model_files(**more: bytes) -> dict[str, bytes]:
    return {
        "config.json": json.dumps({"model_type": "qwen3"}).encode(),
        WEIGHTS: safetensors(),
        "tokenizer.json": b"{}",
        "README.md": b"# card",
        "modeling.py": b"raise SystemExit",
        "pytorch_model.bin": b"pickle",
        "onnx/config.json": b"{}",
        **more,
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub with the model owner/name, and an empty cache for it."""
    with fake_hub.serve() as server:
        server.repos["owner/name"] = model_files()
        for key, value in server.env(tmp_path).items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)  # what the client writes at a time, 10 MB otherwise
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client waits between its attempts
        yield server


def is_whole(folder: Path, hub: FakeHub, repo: str = "owner/name") -> bool:
    wanted = {n: c for n, c in hub.repos[repo].items() if n.endswith((".json", ".safetensors")) and "/" not in n}
    return {path.name: path.read_bytes() for path in folder.iterdir()} == wanted


def test_only_weights_configs_and_tokenizers_are_fetched(hub: FakeHub) -> None:
    assert not is_ready(SOURCE)
    folder = ensure_model(SOURCE)
    assert is_whole(folder, hub)
    assert folder.name == fake_hub.COMMIT
    asked = len(hub.log)
    assert is_ready(SOURCE)
    assert ensure_model(SOURCE) == folder
    assert len(hub.log) == asked, "a complete copy needs no network"


@pytest.mark.parametrize(
    ("config", "file"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "pytorch_model.bin"),
        ({"medusa_num_heads": 5}, "medusa_lm_head.pt"),
    ],
)
def test_a_drafter_without_safetensors_is_fetched_as_a_pytorch_file(
    hub: FakeHub, config: dict[str, Any], file: str
) -> None:
    about = json.dumps(config).encode()
    hub.repos["owner/name"] = {"config.json": about, file: b"PK", "model.pt": b"x", "a.py": b"x"}
    assert not is_ready(SOURCE)
    folder = ensure_model(SOURCE)
    assert sorted(path.name for path in folder.iterdir()) == sorted(["config.json", file])
    assert is_ready(SOURCE)
    hub.repos["owner/name"] = model_files(**{"config.json": about})
    names = [huggingface_hub.hf_api.RepoSibling(rfilename=name, size=1, lfs=None) for name in hub.repos["owner/name"]]
    assert "pytorch_model.bin" not in [file.name for file in huggingface.wanted_files(names)]


def test_the_wanted_files_of_a_repository() -> None:
    names = [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "tokenizer.model",
        "merges.txt",
    ]
    unwanted = ["modeling.py", "pytorch_model.bin", "model.pt", "original/consolidated.safetensors", "onnx/config.json"]
    entries = [huggingface_hub.hf_api.RepoSibling(rfilename=name, size=1, lfs=None) for name in [*names, *unwanted]]
    found = [file.name for file in huggingface.wanted_files(entries)]
    assert sorted(found) == sorted(names)
    assert found[-1] == "model.safetensors"


def test_a_broken_line_is_picked_up_where_it_broke(hub: FakeHub) -> None:
    hub.cuts[WEIGHTS] = [20_480, 28_672]
    assert is_whole(ensure_model(SOURCE), hub)
    assert hub.gets(WEIGHTS) == [None, "bytes=20480-", "bytes=49152-"]


def test_a_later_run_goes_on_where_an_earlier_one_stopped(hub: FakeHub) -> None:
    hub.cuts[WEIGHTS] = [20_480, *[0] * 9]
    with pytest.raises(DownloadError, match="owner/name"):
        ensure_model(SOURCE)
    assert not is_ready(SOURCE)
    hub.cuts.clear()
    hub.log.clear()
    assert is_whole(ensure_model(SOURCE), hub)
    assert hub.gets(WEIGHTS) == ["bytes=20480-"]


def test_a_flipped_byte_is_noticed_and_fetched_again(hub: FakeHub) -> None:
    hub.flips[WEIGHTS] = 1
    messages: list[str] = []
    assert is_whole(ensure_model(SOURCE, report=lambda text, done: messages.append(text)), hub)
    assert any("wrong checksum" in message for message in messages)


def test_a_file_that_arrives_damaged_twice_is_refused(hub: FakeHub) -> None:
    hub.flips[WEIGHTS] = 2
    with pytest.raises(DownloadError, match="damaged twice"):
        ensure_model(SOURCE)
    assert not is_ready(SOURCE)
    assert is_whole(ensure_model(SOURCE), hub)


def test_damage_in_the_cache_is_found_and_repaired(hub: FakeHub) -> None:
    folder = ensure_model(SOURCE)
    blob = (folder / WEIGHTS).resolve()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    assert damaged_files(folder) == [WEIGHTS]
    fixed = huggingface.fetch(SOURCE, report=lambda text, done: None, verify=True)
    assert is_whole(fixed, hub)
    assert damaged_files(fixed) == []


def test_a_cut_file_in_the_cache_is_fetched_again(hub: FakeHub) -> None:
    folder = ensure_model(SOURCE)
    os.truncate((folder / WEIGHTS).resolve(), 100)
    assert not is_ready(SOURCE)
    assert is_whole(ensure_model(SOURCE), hub)


def test_a_branch_that_moved_on_keeps_the_old_copy_until_the_new_one_is_whole(hub: FakeHub) -> None:
    old = ensure_model(SOURCE)
    hub.commits["owner/name"] = fake_hub.OLD_COMMIT
    hub.repos["owner/name"][WEIGHTS] = safetensors(seed=1)
    hub.cuts[WEIGHTS] = [100, *[0] * 9]
    with pytest.raises(DownloadError):
        huggingface.fetch(SOURCE, report=lambda text, done: None)
    assert find_on_disk(SOURCE) == old
    hub.cuts.clear()
    new = huggingface.fetch(SOURCE, report=lambda text, done: None)
    assert new.name == fake_hub.OLD_COMMIT
    assert find_on_disk(SOURCE) == new
    assert is_whole(new, hub)


def test_a_pinned_revision(hub: FakeHub) -> None:
    pinned = ModelSource(kind="hub", repo="owner/name", revision=fake_hub.COMMIT)
    assert ensure_model(pinned) == find_on_disk(pinned)
    assert find_on_disk(SOURCE) is None, "a pinned download says nothing about the branch"


@pytest.mark.parametrize(
    ("pattern", "status", "headers", "reason"),
    [
        ("GET /api/models", 401, {}, "no public model owner/name"),
        ("GET /api/models", 404, {"X-Error-Code": "RepoNotFound"}, "no public model owner/name"),
        ("HEAD .*config.json", 401, {"X-Error-Code": "GatedRepo"}, "is gated: its owner grants access"),
        ("HEAD .*config.json", 403, {"X-Error-Code": "GatedRepo"}, "is gated: its owner grants access"),
        ("GET .*safetensors", 403, {}, "is gated: its owner grants access"),
        ("GET /api/models", 429, {}, r"slow down \(429\)"),
        ("GET .*safetensors", 429, {}, r"slow down \(429\)"),
        ("GET /api/models", 503, {}, r"problem of its own \(503\)"),
        ("GET .*safetensors", 500, {}, r"problem of its own \(500\)"),
    ],
)
def test_refusals_say_what_to_do(hub: FakeHub, pattern: str, status: int, headers: dict[str, str], reason: str) -> None:
    hub.answers[pattern] = (status, headers)
    with pytest.raises(DownloadError, match=reason) as caught:
        ensure_model(SOURCE)
    assert "\n" not in str(caught.value)
    assert not is_ready(SOURCE)
    hub.answers.clear()
    assert is_whole(ensure_model(SOURCE), hub)


def test_a_missing_revision(hub: FakeHub) -> None:
    with pytest.raises(DownloadError, match="no revision 'v9'"):
        ensure_model(ModelSource(kind="hub", repo="owner/name", revision="v9"))


def test_a_hub_that_stops_answering(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.hangs[WEIGHTS] = 0
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    with pytest.raises(DownloadError, match="did not answer in time"):
        ensure_model(SOURCE)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 30)
    hub.hangs.clear()
    assert is_whole(ensure_model(SOURCE), hub)


def test_no_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="Check the network"):
        ensure_model(SOURCE)


def test_a_disk_that_is_too_small_is_noticed_before_the_download(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 50_000))  # type: ignore[attr-defined]
    with pytest.raises(DownloadError, match="set HF_HOME to a folder on a larger disk"):
        ensure_model(SOURCE)
    assert hub.gets(WEIGHTS) == []


def test_a_disk_that_fills_up(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    class FullDisk(io.FileIO):
        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_on_full_disk(path: Path, mode: str = "r", **options: Any) -> Any:
        return FullDisk(path, mode) if path.name.endswith(".part") and "a" in mode else real(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_on_full_disk)
    with pytest.raises(DownloadError, match="the disk is full"):
        ensure_model(SOURCE)
    monkeypatch.setattr(Path, "open", real)
    assert not is_ready(SOURCE)
    assert is_whole(ensure_model(SOURCE), hub)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, r"no \*\.safetensors weights"),
        ({"model.gguf": b"x"}, "no config.json"),
        (
            model_files(**{"config.json": b'{"model_type": "odd", "auto_map": {"AutoModel": "m.M"}}'}),
            "model type 'odd'",
        ),
        (model_files(**{"config.json": b'{"model_type": "qwen3", "model_file": "m.py"}'}), "its own code"),
    ],
)
def test_what_cannot_run_here_is_refused_before_its_weights(hub: FakeHub, files: dict[str, bytes], reason: str) -> None:
    hub.repos["owner/name"] = files
    with pytest.raises(CheckpointError, match=reason):
        ensure_model(SOURCE)
    assert hub.gets(WEIGHTS) == []


PULL = """
import sys
from dflash_mlx.hub.download import ensure_model
from dflash_mlx.hub.registry import ModelSource
print(ensure_model(ModelSource(kind="hub", repo="owner/name")))
"""


def pull(hub: FakeHub, home: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PULL],
        env={**os.environ, **hub.env(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once_share_one_download(tmp_path: Path) -> None:
    with fake_hub.serve() as hub:
        hub.repos["owner/name"] = model_files()
        hub.seconds_a_chunk = 0.02
        both = [pull(hub, tmp_path) for _ in range(2)]
        answers = [process.communicate(timeout=60) for process in both]
        assert [process.returncode for process in both] == [0, 0], answers
        assert answers[0][0] == answers[1][0]
        assert is_whole(Path(answers[0][0].strip()), hub)
        assert len(hub.gets(WEIGHTS)) == 1


@pytest.mark.slow
def test_killed_at_any_moment_there_is_never_a_broken_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    with fake_hub.serve() as hub:
        hub.repos["owner/name"] = model_files()
        hub.seconds_a_chunk = 0.03  # the weights take half a second
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        for _ in range(8):
            process = pull(hub, tmp_path)
            before = len(hub.log)
            while len(hub.log) == before and process.poll() is None:
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.35))
            process.kill()
            process.communicate()
            folder = huggingface.find_cached(SOURCE) if is_ready(SOURCE) else None
            assert folder is None or is_whole(folder, hub)
            if folder:
                shutil.rmtree(tmp_path / "hub")
        hub.seconds_a_chunk = 0
        answer, problems = pull(hub, tmp_path).communicate(timeout=60)
        assert is_whole(Path(answer.strip()), hub), problems


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (caused(errors.LocalEntryNotFoundError("x"), errors.OfflineModeIsEnabled("offline")), "HF_HUB_OFFLINE"),
        (caused(errors.LocalEntryNotFoundError("x"), ConnectionError("refused\nmore")), "refused. Check the network"),
        (TimeoutError(), "did not answer in time"),
        (RuntimeError("proxy says no"), "proxy says no. Check the network"),
    ],
)
def test_what_the_client_wraps_is_unwrapped(error: BaseException, reason: str) -> None:
    line = explain(SOURCE, error)
    assert reason in line
    assert "\n" not in line


def test_checksums_of_both_kinds(tmp_path: Path) -> None:
    content = b"hello"
    for name in ("a.safetensors", "config.json"):
        mark = fake_hub.etag(name, content)
        (tmp_path / mark).write_bytes(content)
        assert not hub_files.damaged(tmp_path / mark)
        (tmp_path / mark).write_bytes(b"hellp")
        assert hub_files.damaged(tmp_path / mark)
