"""What is compared between machines, and that wrong sums and other files are told."""

import hashlib
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import pytest

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
