"""What a run says before it starts, and when it refuses."""

import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
from tiny import SECOND, VOCAB, tiny_drafter

from dflash_mlx.errors import DFlashError
from dflash_mlx.training import TrainOptions, run
from dflash_mlx.training.checkpoint import fresh_state
from dflash_mlx.training.data import batch_rows
from dflash_mlx.training.estimate import estimate
from dflash_mlx.training.loading import load
from dflash_mlx.training.probe import data_minutes, time_line, training_minutes
from dflash_mlx.training.store import ConversationStore
from dflash_mlx.training.trees import count_parameters

GB = 10**9


@pytest.fixture
def options(target_folder, tmp_path):
    return TrainOptions(
        model=str(target_folder), out=tmp_path, layers=2, block_size=8, max_length=64, anchors=8, batch_size=8,
        data_batch=4, data_tokens=10_000, steps=100, micro_batch=4, max_user_tokens=8,
    )  # fmt: skip


@pytest.fixture
def loaded(options):
    return load(options, quiet=True)


def plan(loaded, options, *, memory_bytes=16 * GB):
    return estimate(loaded.target, tiny_drafter(), options, memory_bytes=memory_bytes, itemsize=4)


def test_less_memory_means_smaller_parts(loaded, options):
    options = replace(options, micro_batch=None, batch_size=48, anchors=64, max_length=512)
    sizes = [plan(loaded, options, memory_bytes=int(size * GB)).micro_batch for size in (16, 4, 1.5, 0.8)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] >= 1
    assert all(48 % size == 0 for size in sizes)


def test_memory_grows_with_what_is_asked_for(loaded, options):
    small = plan(loaded, options).memory
    for more in ({"anchors": 64}, {"max_length": 512}, {"micro_batch": 8}):
        assert plan(loaded, replace(options, **more)).memory > small
    assert small > 16 * count_parameters(tiny_drafter().parameters())


def test_dflash2_heads_take_more(loaded, options):
    second = estimate(loaded.target, tiny_drafter(**SECOND), options, memory_bytes=16 * GB, itemsize=4)
    first = plan(loaded, options)
    more = second.parameters - first.parameters
    assert more == count_parameters(tiny_drafter(**SECOND).parameters()) - count_parameters(tiny_drafter().parameters())
    assert second.memory > first.memory + 20 * more


def test_what_cannot_fit_the_memory_is_refused(loaded, options):
    with pytest.raises(DFlashError, match=r"needs about .* GB of memory and .* Lower --anchors"):
        plan(loaded, options, memory_bytes=1_000_000)
    with pytest.raises(DFlashError, match="needs about"):
        plan(loaded, replace(options, batch_size=4096, micro_batch=4096, anchors=512, max_length=4096))


def test_what_cannot_fit_the_disk_is_refused(loaded, options, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10, 9, 1000))
    with pytest.raises(DFlashError, match=r"writes about .* are free in .* choose another --out"):
        plan(loaded, options)


def test_a_refusal_leaves_nothing_that_binds_the_next_run(options):
    with pytest.raises(DFlashError, match="at once takes about"):
        run(replace(options, data_batch=10**9), quiet=True)
    result = run(replace(options, data_tokens=500, steps=1, measure=0, holdout=0.2), quiet=True)
    assert result.stage == "done"


def test_rows_that_are_written_at_once(loaded, options):
    free = replace(options, data_batch=None)
    # A row holds keys and values of 4 layers, 2 heads of 8 numbers, in float32, half as much again while they grow.
    row = 4 * 2 * 2 * 8 * 4 * options.max_length * 1.5 + VOCAB * 16
    assert batch_rows(loaded.target, free, memory_bytes=int(20.5 * row / 0.4), kind="metal") == 20
    assert batch_rows(loaded.target, free, memory_bytes=1000 * GB, kind="cpu") == 32
    assert batch_rows(loaded.target, options, memory_bytes=16 * GB, kind="cpu") == 4
    with pytest.raises(DFlashError, match="Lower --data-batch or --max-length"):
        batch_rows(loaded.target, options, memory_bytes=int(3.5 * row / 0.4), kind="cpu")


def test_budgets_in_minutes_are_taken_at_their_word(loaded, options):
    options = replace(options, data_tokens=None, steps=None, data_minutes=7, minutes=300)
    store = ConversationStore(options.out / "none")
    line = time_line(loaded, tiny_drafter(), store, None, options, plan(loaded, options), rows=4)
    assert line == "time: data about 7 minutes, training about 5.0 hours, then measuring 200 answers"
    short = replace(options, data_minutes=2, minutes=1)
    line = time_line(loaded, tiny_drafter(), store, None, short, plan(loaded, short), rows=4)
    assert line.startswith("time: data about 2 minutes, training about a minute, ")


def test_budgets_of_work_are_extrapolated(loaded, options):
    """Ten times the work is ten times the time, and what was done counts by its own measured rate."""
    drafter, store = tiny_drafter(), ConversationStore(options.out / "none")
    few, many = options, replace(options, data_tokens=10**8, steps=10**6)
    assert data_minutes(loaded, store, many, rows=4) > 100 * data_minutes(loaded, store, few, rows=4) > 0
    state = None
    assert training_minutes(loaded, drafter, state, many, plan(loaded, options)) > 100 * training_minutes(
        loaded, drafter, state, few, plan(loaded, options)
    )
    store.tokens, store.seconds = 4000, 60.0
    assert data_minutes(loaded, store, few, rows=4) == pytest.approx(1.5)
    state = fresh_state(drafter, options)
    state.step, state.seconds = 40, 120.0
    assert training_minutes(loaded, drafter, state, few, plan(loaded, options)) == pytest.approx(3.0)


def test_the_probe_leaves_the_drafter_as_it_was(loaded, options):
    drafter = tiny_drafter()
    before = {name: x.tolist() for name, x in drafter.fc.parameters().items()}
    training_minutes(loaded, drafter, None, options, plan(loaded, options))
    assert {name: x.tolist() for name, x in drafter.fc.parameters().items()} == before
