"""Costs of a round: measured by real rounds, remembered on disk, and not when something disturbed them."""

import mlx.core as mx
import pytest
from tiny import tiny_drafter, tiny_target

from dflash_mlx.decoding import costs
from dflash_mlx.decoding.width import RoundCosts


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path))
    target, drafter = tiny_target("llama"), tiny_drafter()
    return lambda: costs.load_or_measure(target, drafter, block_size=8, folders=(), dtype=mx.float32)


def stored(tmp_path):
    return list((tmp_path / "round-costs").glob("*.json"))


@pytest.mark.parametrize("trees", [True, False])
def test_every_kind_of_round_is_timed(trees, monkeypatch):
    target = tiny_target("llama")
    monkeypatch.setattr(target, "_trees", trees)
    monkeypatch.setattr(costs, "_TREE_GAIN", 100.0)
    measured = costs.measure(target, tiny_drafter(), block_size=8)
    assert measured.places == (7 if trees else 0)
    assert {0, 1, 7, *((15,) if trees else ())} <= measured.round_seconds.keys()
    assert measured.draft_seconds.keys() == {w for w in measured.round_seconds if 0 < w <= 7}
    assert all(0 < seconds < 5 for seconds in [*measured.round_seconds.values(), *measured.draft_seconds.values()])


def test_trees_that_take_too_long_are_not_chosen(monkeypatch):
    monkeypatch.setattr(costs, "_TREE_GAIN", 0.01)
    monkeypatch.setattr(costs, "_WIDE_TREE_GAIN", 0.01)
    assert costs.measure(tiny_target("llama"), tiny_drafter(), block_size=8).places == 0
    monkeypatch.setattr(costs, "_WIDE_TREE_GAIN", 100.0)
    assert costs.measure(tiny_target("llama"), tiny_drafter(), block_size=8).places == 7


def test_measured_once_then_remembered(load, tmp_path, monkeypatch):
    found = RoundCosts({0: 1.0, 1: 1.1, 7: 1.2}, {1: 0.1, 7: 0.2}, steep=False, places=7)
    monkeypatch.setattr(costs, "measure", lambda *_, **__: found)
    assert load() == found
    monkeypatch.setattr(costs, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert load() == found
    (path,) = stored(tmp_path)
    path.write_text('{"round_seconds"')
    monkeypatch.setattr(costs, "measure", lambda *_, **__: found)
    assert load() == found


def test_a_disturbed_measurement_is_repeated_and_not_remembered(load, tmp_path, monkeypatch):
    disturbed = RoundCosts({0: 3.4, 1: 1.1, 7: 3.7}, {1: 0.2, 7: 0.2}, steep=True)
    good = RoundCosts({0: 1.0, 1: 1.1, 7: 2.0}, {1: 0.2, 7: 0.2}, steep=True)
    runs = [disturbed, disturbed, disturbed, good]
    monkeypatch.setattr(costs, "measure", lambda *_, **__: runs.pop(0))
    assert load() == disturbed
    assert not stored(tmp_path)
    assert load() == good
    assert len(stored(tmp_path)) == 1
