"""Whether a kernel is used is decided by a race, whose verdict is remembered."""

import json
import os
import time
from pathlib import Path

import mlx.core as mx
import pytest

from dflash_mlx.kernels import race as module
from dflash_mlx.kernels.race import Verdict, Verdicts, one_by_one, race, repeats


def inputs(rows):
    return mx.ones((rows, 4), dtype=mx.float16) * mx.arange(4)


def plain(x):
    return [x + 1]


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a way takes; ways are told apart by their names."""
    taken = {"plain": 1.0, "own": 0.9}
    monkeypatch.setattr(module, "_seconds", lambda way, x: taken[way.__name__])
    monkeypatch.setattr(module, "_STALL_SECONDS", 5.0)
    return taken


@pytest.mark.parametrize(("seconds", "won"), [(0.5, True), (0.95, True), (0.96, False), (2.0, False)])
def test_a_kernel_must_be_five_percent_faster(seconds, won, clock):
    def own(x):
        return [1 + x]

    clock["own"] = seconds
    verdict = race(plain, own, inputs, rows=(2, 4))
    assert verdict == Verdict({2: (1.0, seconds), 4: (1.0, seconds)})
    assert verdict.used_for() == (False, False, won, won, won)


def wrong(x):
    return [x + 1.2]


def undefined(x):
    return [x * mx.nan]


def refused(x):
    raise RuntimeError("no\n compiler")


@pytest.mark.parametrize(("own", "note"), [(wrong, "differ"), (undefined, "differ"), (refused, "4 rows: no compiler")])
def test_a_kernel_that_is_wrong_or_fails_is_not_used_from_there_on(own, note, clock):
    """What is odd at one number of rows ends the race, and a note says what it was."""

    def half(x):
        return plain(x) if x.shape[0] < 4 else own(x)

    clock["half"] = 0.1
    verdict = race(plain, half, inputs, rows=(2, 4, 8))
    assert note in verdict.note
    assert verdict.used_for() == (False, False, True)


def test_a_kernel_that_stalls_is_not_used(clock, monkeypatch):
    def own(x):
        return plain(x)

    moments = iter([0.1, 0.1, 7.0, 0.1])
    monkeypatch.setattr(module, "_seconds", lambda way, x: next(moments) if way is own else 1.0)
    verdict = race(plain, own, inputs, rows=(2,))
    assert verdict == Verdict({}, "2 rows stalled for 7000 ms")
    assert verdict.used_for() == ()


def test_quick_races_have_more_turns_and_the_least_counts(clock, monkeypatch):
    """What else the computer does makes single turns longer, never shorter."""
    turns = []

    def own(x):
        return plain(x)

    def seconds(way, x):
        turns.append(way)
        return (1 + len(turns) % 3) * (1e-4 if way is own else 2e-4)

    monkeypatch.setattr(module, "_seconds", seconds)
    assert race(plain, own, inputs, rows=(2,)) == Verdict({2: (2e-4, 1e-4)})
    assert turns.count(own) == 1 + module._MOST_TIMED
    turns.clear()
    monkeypatch.setattr(module, "_SECONDS", 0.0)
    race(plain, own, inputs, rows=(2,))
    assert turns.count(own) == 1 + module._TIMED


def test_what_lies_between_two_races_follows_both():
    verdict = Verdict({2: (1.0, 0.5), 4: (1.0, 0.5), 8: (1.0, 2.0), 16: (1.0, 0.5)})
    assert [rows for rows, on in enumerate(verdict.used_for()) if on] == [2, 3, 4, 16]
    assert not verdict.won(17)


def test_ways_are_really_timed():
    def slow(x):
        time.sleep(0.01)
        return plain(x)

    ((ordinary, own),) = race(plain, slow, inputs, rows=(2,)).seconds.values()
    assert own >= 0.01 > ordinary


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path))
    return tmp_path


def test_verdicts_are_remembered(home):
    """For this kernel and this source; a stall, which may be another program's doing, only for now."""
    good, odd = Verdict({2: (1.0, 0.5)}), Verdict({2: (1.0, 0.5)}, "4 rows stalled for 200 ms")
    raced, reports = [], []

    def races(**verdicts):
        return {shape: lambda shape=shape: raced.append(shape) or verdicts[shape] for shape in verdicts}

    verdicts = Verdicts("one", "source")
    for _ in range(2):
        found, notes = verdicts.complete(races(a=good, b=odd, c=odd), lambda *report: reports.append(report))
        assert found == {"a": good, "b": odd, "c": odd}
        assert notes == ["a kernel is not used where its race came to no end, for b and 1 more: " + odd.note]
    assert raced == ["a", "b", "c"]
    assert len(reports) == 3
    again, others = Verdicts("one", "source"), (Verdicts("one", "changed"), Verdicts("other", "source"))
    assert again.complete(races(a=odd, b=good)) == ({"a": good, "b": good}, [])
    assert [one.complete(races(a=good))[0] for one in others] == [{"a": good}] * 2
    assert raced[3:] == ["b", "a", "a"]


@pytest.mark.parametrize("content", ["", "[]", '{"verdicts": {"24x32": {"seconds": {"2": 1}, "note": ""}}}', "{}"])
def test_verdicts_that_cannot_be_read_are_none(content, home):
    verdict, races = Verdict({2: (1.0, 0.5)}), {"24x32": lambda: Verdict({2: (1.0, 0.5)})}
    Verdicts("one", "source").complete(races)
    [file] = (home / "kernels").iterdir()
    assert json.loads(file.read_text())["verdicts"]["24x32"]["seconds"] == {"2": [1.0, 0.5]}
    file.write_text(content)
    raced = []
    Verdicts("one", "source").complete({"24x32": lambda: raced.append(1) or verdict})
    assert raced == [1]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_only_means_another_race(home):
    Path(home).chmod(0o500)
    verdicts = Verdicts("one", "source")
    for _ in range(2):
        assert verdicts.complete({"24x32": lambda: Verdict({2: (1.0, 0.5)})})[1] == []


def test_what_is_raced_waits_for_the_last_one():
    """A GPU computes what is independent at the same time, which the layers of a model are not."""
    inputs = []

    def spoilt(x, number):
        inputs.append(x)
        return x * number

    found = one_by_one(spoilt, mx.ones((1, 2)), [[mx.array(mx.nan)], [mx.array(1.0)]])
    assert len(found) == 2
    assert mx.isfinite(inputs[0]).all().item()
    assert mx.isnan(inputs[1]).all().item()


def test_operands_are_so_many_that_they_come_from_memory():
    assert [repeats(size) for size in (1, 10_000_000, 99_000_000, 10**9)] == [16, 10, 2, 1]
