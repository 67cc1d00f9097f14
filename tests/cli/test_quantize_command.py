"""`dflash-mlx quantize`: folders that appear whole or not at all, and what the result can do."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_mlx.hub.folder import check_folder

DRAFTER = "smollm2-135m-dflash"


def test_a_drafter_of_a_pair_with_card_and_json(run, tmp_path):
    out = tmp_path / "out"
    code, stdout, err = run("quantize", "demo", "--part", "drafter", "--bits", "4", "--out", str(out), "--json")
    assert code == 0, err
    facts = json.loads(stdout)
    assert (facts["part"], facts["scheme"]) == ("drafter", "4 bits, groups of 64, affine")
    assert facts["size_mb_after"] < facts["size_mb_before"]
    assert 4 < facts["bits_per_weight_after"] < 5
    check_folder(out)
    assert "dflash-mlx" in (out / "README.md").read_text()
    code, _, err = run("quantize", "demo", "--part", "drafter", "--out", str(out))
    assert code == 2
    assert "is there already" in err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["demo", "--bits", "7"], "bits is 7"),
        (["nonsense"], "there is no folder 'nonsense' here, and no pair is called"),
        (["./nonsense"], "there is no folder './nonsense'"),
        (["a/b", "--part", "drafter"], "--part is for pairs"),
        (["demo", "--mode", "q4"], "mode is 'q4'"),
    ],
)
def test_misuse(run, tmp_path, arguments, reason):
    code, out, err = run("quantize", *arguments, "--out", str(tmp_path / "x"))
    assert (code, out) == (2, "")
    assert reason in err
    assert not (tmp_path / "x").exists()


def test_a_failed_upload_keeps_the_folder(run, tmp_path, monkeypatch):
    def refuse(self, *args, **options):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    code, _, err = run("quantize", "demo", "--part", "drafter", "--out", str(tmp_path / "x"), "--push", "me/x")
    assert code == 1
    assert "could not upload to me/x: no network" in " ".join(err.split())
    check_folder(tmp_path / "x")


@pytest.mark.parametrize(("after", "warned"), [(90, False), (100, True), (120, True)])
def test_a_copy_that_is_not_smaller_is_said(run, tmp_path, monkeypatch, after, warned):
    facts = {"out": "x", "source": "y", "scheme": "z", "size_mb_before": 100, "size_mb_after": after}
    monkeypatch.setattr("dflash_mlx.cli.quantize._quantize", lambda *_, **__: facts)
    code, _, err = run("quantize", "demo", "--bits", "8", "--out", str(tmp_path / "x"))
    assert (code, "not smaller" in err) == (0, warned)


@pytest.mark.model
@pytest.mark.long
def test_killed_at_any_moment_there_is_no_half_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_home: Path
) -> None:
    monkeypatch.setenv("DFLASH_MLX_HOME", str(demo_home))
    chance = random.Random(1)
    killed = 0
    for attempt in range(3):
        out = tmp_path / f"out-{attempt}"
        process = subprocess.Popen(
            [sys.executable, "-m", "dflash_mlx.cli.app", "quantize", "demo", "--bits", "8", "--out", str(out)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ},
        )
        while process.poll() is None and not list(tmp_path.glob(f".out-{attempt}.making-*/*")):
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += not out.exists()
        assert not out.exists() or check_folder(out)
    assert killed, "every run was faster than the kill"


@pytest.mark.model
@pytest.mark.long
def test_a_quantized_target_generates_and_finds_its_drafter(run, tmp_path, monkeypatch, demo_home):
    monkeypatch.setenv("DFLASH_MLX_HOME", str(demo_home))
    out = tmp_path / "demo-4bit"
    code, _, err = run("quantize", "demo", "--bits", "4", "--out", str(out))
    assert code == 0, err
    code, answer, err = run("generate", "Why is the sky blue?", "--model", str(out), "--max-tokens", "12", "--json")
    assert code == 0, err
    found = json.loads(answer)
    assert found["mode"] == "dflash"
    assert found["generation_tokens"] == 12
    plain = run("generate", "Why is the sky blue?", "--model", str(out), "--max-tokens", "12", "--no-draft", "--json")
    assert json.loads(plain[1])["token_ids"] == found["token_ids"]
    assert "fine-tune" not in err
