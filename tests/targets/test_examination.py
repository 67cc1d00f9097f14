"""What is compared between machines, and that wrong sums and other files are told."""

import hashlib
import re
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest
from tiny_folder import write_target

from dflash_mlx.hub.registry import ModelSource
from dflash_mlx.targets.examination import Machine, checksums, look, problems

VERSIONS = {"dflash-mlx": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"}
FILES = {"config.json": "c0", "model.safetensors": "ab"}
FIRST = Machine(0, "mac1", "M3", "macOS", 10**9, VERSIONS, FILES, 0.3, 900.0, 0)
SECOND = replace(FIRST, rank=1, host="mac2")


def test_machines_that_are_alike():
    assert problems([FIRST, SECOND, replace(SECOND, rank=2, files=None)]) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"versions": {**VERSIONS, "mlx": "0.32.3"}}, ["rank 1 (mac2) has mlx 0.32.3, and rank 0 has 0.32.4"]),
        ({"files": {**FILES, "model.safetensors": "ac"}}, ["rank 1 (mac2) has another model.safetensors than rank 0"]),
        ({"files": {**FILES, "more.safetensors": "ac"}}, ["rank 1 (mac2) has another more.safetensors than rank 0"]),
        ({"wrong_sums": 3}, ["rank 1 (mac2) got 3 wrong sums"]),
        ({"refused": "it cannot be divided"}, ["it cannot be divided"]),
        ({"versions": {}}, [f"rank 1 (mac2) has {name} None" for name in VERSIONS]),
    ],
)
def test_what_differs_is_named(changes, said):
    found = problems([FIRST, replace(SECOND, **changes)])
    assert [sentence[: len(start)] for sentence, start in zip(found, said, strict=True)] == said


def test_files_are_those_of_the_target(tmp_path):
    for name in ("config.json", "model.safetensors", "notes.txt"):
        (tmp_path / name).write_text(name)
    expected = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("config.json", "model.safetensors")}
    assert checksums(tmp_path) == expected


@pytest.mark.parametrize(("error", "wrong"), [(0.0, 0), (1.0, 65)])
def test_sums_are_checked(error, wrong, monkeypatch):
    monkeypatch.setattr(mx.distributed, "all_sum", lambda own, group: own + error)
    found = look(SimpleNamespace(rank=0, size=1, ranks=None), None)
    assert (found.wrong_sums, found.files) == (wrong, None)
    assert found.small_ms > 0


@pytest.mark.parametrize(
    ("family", "size", "share", "refused"),
    [
        ("llama", 2, r"a part of every layer, 0\.0 GB", ""),
        ("llama", 3, "", r"4 heads \(num_attention_heads\) cannot be divided by 3 machines"),
        ("kimi_k25", 3, r"1 of 4 layers, 0\.0 GB", ""),
        ("phi3", 2, "", "cannot divide models of the kind phi3"),
    ],
)
def test_what_a_machine_would_hold(family, size, share, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(mx.distributed, "all_sum", lambda own, group: own)
    folder = write_target(tmp_path / "target", family=family)
    ranks = SimpleNamespace(rank=lambda: 1, size=lambda: size)
    found = look(SimpleNamespace(rank=1, size=size, ranks=ranks), ModelSource(kind="folder", path=str(folder)))
    assert re.fullmatch(share, found.share)
    assert re.search(refused, found.refused) if refused else found.refused == ""


def test_what_all_machines_refuse_is_said_once():
    refused = {"refused": "it cannot be divided"}
    assert problems([replace(FIRST, **refused), replace(SECOND, **refused)]) == ["it cannot be divided"]
