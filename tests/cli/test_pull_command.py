"""`dflash-mlx pull` as a process against a Hub on loopback."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fake_hub
import pytest
from fake_hub import FakeHub

from dflash_mlx.cli.pull import _mention_drafter
from dflash_mlx.hub.registry import ModelSource

CONFIG = b'{"model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36}'
# A safetensors file with one tensor of 40,000 bytes.
HEADER = json.dumps({"w": {"dtype": "U8", "shape": [40_000], "data_offsets": [0, 40_000]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(250)) * 160
FILES = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}
TARGET, DRAFTER = "mlx-community/Qwen3-4B-4bit", "z-lab/Qwen3-4B-DFlash-b16"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub.serve() as server:
        server.repos = {TARGET: dict(FILES), DRAFTER: {**FILES, "config.json": b'{"dflash_config": {}}'}}
        yield server


def pull(hub: FakeHub, home: Path, *arguments: str, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "dflash_mlx.cli.app", "pull", *arguments],
        env={**os.environ, **hub.env(home), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_a_pair_is_pulled_and_then_here(hub: FakeHub, tmp_path: Path) -> None:
    code, out, err = finish(pull(hub, tmp_path, "qwen3-4b", "--json"))
    assert code == 0, err
    target, drafter = json.loads(out)
    assert (target["source"], drafter["source"]) == (TARGET, DRAFTER)
    assert target["revision"] == fake_hub.COMMIT
    assert target["fetched"] is True
    assert (Path(target["folder"]) / "model.safetensors").read_bytes() == WEIGHTS
    asked = len(hub.log)
    again = json.loads(finish(pull(hub, tmp_path, "qwen3-4b", "--json"))[1])
    assert [model["fetched"] for model in again] == [False, False]
    assert len(hub.log) == asked


def test_verify_repairs_and_says_so(hub: FakeHub, tmp_path: Path) -> None:
    folder = Path(json.loads(finish(pull(hub, tmp_path, TARGET, "--json"))[1])[0]["folder"])
    blob = (folder / "model.safetensors").resolve()
    blob.write_bytes(WEIGHTS[:-1] + b"\0")
    code, out, err = finish(pull(hub, tmp_path, TARGET, "--verify"))
    assert code == 0, err
    assert "checksums of 3 files are right" in out
    assert "its drafter is z-lab/Qwen3-4B-DFlash-b16" in err
    assert blob.read_bytes() == WEIGHTS


def test_stopped_by_the_user_and_run_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.hangs["model.safetensors"] = 8192
    process = pull(hub, tmp_path, TARGET)
    while not hub.gets("model.safetensors"):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out) == (130, "")
    assert err.rstrip().endswith("stopped.")
    hub.hangs.clear()
    assert finish(pull(hub, tmp_path, TARGET))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["no/such"], 1, "no public model no/such"),
        (
            ["nonsense"],
            2,
            "no pair is called 'nonsense'. `dflash-mlx models list --all` lists the pairs. A single model",
        ),
        (["."], 2, "is a folder on this disk already"),
        ([TARGET, "--revision", "v9"], 1, "no revision 'v9'"),
        ([f"{TARGET}@v1", "--revision", "v1"], 2, "names a revision"),
        (["qwen3-4b", "--revision", "v1"], 2, "--revision is for one model"),
    ],
)
def test_refusals(hub: FakeHub, tmp_path: Path, arguments: list[str], code: int, reason: str) -> None:
    found, out, err = finish(pull(hub, tmp_path, *arguments))
    assert (found, out) == (code, "")
    assert reason in err
    assert "Traceback" not in err
    assert err.rstrip().splitlines()[-1].startswith("error: ")


def test_offline(hub: FakeHub, tmp_path: Path) -> None:
    code, _, err = finish(pull(hub, tmp_path, TARGET, HF_HUB_OFFLINE="1"))
    assert code == 1
    assert "HF_HUB_OFFLINE is set: unset it" in err


def test_other_folders_come_first(hub: FakeHub, tmp_path: Path) -> None:
    place = tmp_path / ".lmstudio" / "models" / TARGET
    place.mkdir(parents=True)
    for name, content in FILES.items():
        (place / name).write_bytes(content)
    assert json.loads(finish(pull(hub, tmp_path, TARGET, "--json"))[1])[0]["folder"] == str(place)
    shutil.copytree(place, tmp_path / "mine" / "Qwen3-4B-4bit")
    found = json.loads(finish(pull(hub, tmp_path, TARGET, "--json", DFLASH_MLX_MODEL_DIRS=str(tmp_path / "mine")))[1])
    assert found[0]["folder"] == str(tmp_path / "mine" / "Qwen3-4B-4bit")
    assert hub.log == []


@pytest.mark.skipif(not Path("/dev/full").exists() or os.geteuid() != 0, reason="mounts a small disk, as root")
def test_a_disk_that_is_really_full(hub: FakeHub, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting")
    try:
        code, _, err = finish(pull(hub, disk, TARGET))
        assert code == 1
        assert "free. Make room" in err.replace("\n", " ")
        assert "Traceback" not in err
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_hint_after_a_target_can_be_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ModelSource(kind="hub", repo="HuggingFaceTB/SmolLM2-135M-Instruct")
    _mention_drafter(str(source), [("model", source)])
    hint = capsys.readouterr().err
    assert "comes with dflash-mlx" in hint
    assert "pull" not in hint  # its drafter is in the package, so there is nothing to pull
    assert "--model HuggingFaceTB/SmolLM2-135M-Instruct" in hint
