"""`dflash-mlx models`: the table, one pair, JSON."""

import json

import pytest

from dflash_mlx.cli.models import describe, fits_memory
from dflash_mlx.hub.registry import ModelSource, PairSpec, list_pairs


def test_the_table_names_every_pair(run):
    code, out, err = run("models")
    assert (code, err) == (0, "")
    for pair in list_pairs():
        assert pair.name in out
    assert "\x1b" not in out


def test_json_says_what_the_registry_says(run):
    code, out, _ = run("models", "--json")
    found = {pair["name"]: pair for pair in json.loads(out)}
    assert code == 0
    assert found.keys() == {pair.name for pair in list_pairs()}
    demo = found["smollm2-135m"]
    assert demo["aliases"] == ["demo"]
    assert demo["downloaded"] is False  # the cache folder of a test is empty
    assert demo["fits_memory"] is True


def test_show_by_alias(run):
    code, out, err = run("models", "show", "demo")
    assert (code, err) == (0, "")
    assert out.startswith("name:")
    assert "smollm2-135m" in out
    assert json.loads(run("models", "show", "DEMO", "--json")[1])["name"] == "smollm2-135m"


@pytest.mark.parametrize(
    ("disk_mb", "memory", "fits"),
    [(None, 8e9, None), (123, 8e9, True), (5600, 8e9, True), (5700, 8e9, False), (18000, 16e9, False)],
)
def test_fits_memory(disk_mb, memory, fits):
    assert fits_memory(disk_mb, memory) is fits


def test_unknown_sizes_are_said_to_be_unknown(run, monkeypatch):
    hub = ModelSource(kind="hub", repo="a/b")
    spec = PairSpec(
        name="x", title="X", target=hub, drafter=hub, block_size=16, thinking="none", license="MIT", verified="listed"
    )
    monkeypatch.setattr("dflash_mlx.hub.registry.list_pairs", lambda: [spec])
    assert describe(spec)["fits_memory"] is None
    assert "unknown" in run("models")[1]
