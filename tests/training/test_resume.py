"""Killed at any moment, a run continues and ends as if nothing had happened."""

import json
import shutil
import signal
import subprocess
import sys
import time

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.errors import CheckpointError, DFlashError, UsageError
from dflash_mlx.training import TrainOptions, finish, run
from dflash_mlx.training.state import locked
from dflash_mlx.training.store import ConversationStore

STEPS, PROMPTS = 60, 6
RUN = (
    "import json, sys; from dflash_mlx.training import TrainOptions, run; "
    "run(TrainOptions(**json.loads(sys.argv[1])), quiet=True)"
)


def values(target, out, **changes):
    return {
        "model": str(target),
        "out": str(out),
        "data_tokens": 5000,
        "data_batch": 12,
        "max_length": 48,
        "max_user_tokens": 8,
        "layers": 1,
        "block_size": 4,
        "taps": [1, 3],
        "steps": STEPS,
        "batch_size": 4,
        "anchors": 8,
        "holdout": 0.15,
        "greedy_share": 0.6,
        "checkpoint_seconds": 0.02,
        "eval_seconds": 1000,
        "measure": PROMPTS,
        "measure_tokens": 16,
        **changes,
    }


def kill_when(ready, options):
    """Run in a process of its own and kill it, without warning, as soon as `ready()`."""
    process = subprocess.Popen([sys.executable, "-c", RUN, json.dumps(options)])
    try:
        deadline = time.monotonic() + 60
        while not ready():
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL


def saved_step(out):
    path = out / "work" / "state.safetensors"
    if not path.exists():
        return 0
    _, metadata = mx.load(str(path), return_metadata=True)
    return json.loads(metadata["progress"])["step"]


def measured(out):
    path = out / "work" / "measured.json"
    return len(json.loads(path.read_text())["answers"]) if path.exists() else 0


def shards(out):
    return len(list((out / "work" / "data").glob("shard-*.npz")))


def conversations(out):
    return [c.tokens.tolist() for c in ConversationStore(out / "work" / "data").conversations]


@pytest.fixture(scope="module")
def whole(target_folder, tmp_path_factory):
    """(folder, facts) of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, run(TrainOptions(**values(target_folder, out)), quiet=True).facts


def test_killed_in_each_stage_the_run_ends_the_same(target_folder, whole, tmp_path):
    out, options = tmp_path / "out", values(target_folder, tmp_path / "out")
    kill_when(lambda: shards(out) >= 2, options)
    assert not (out / "work" / "state.safetensors").exists()
    kill_when(lambda: saved_step(out) >= 10, options)
    assert saved_step(out) < STEPS
    kill_when(lambda: measured(out) >= 2, options)
    assert measured(out) < PROMPTS
    result = run(TrainOptions(**options), quiet=True)

    expected_out, expected = whole
    assert result.stage == "done"
    assert conversations(out) == conversations(expected_out)
    found, wanted = (mx.load(str(folder / "model.safetensors")) for folder in (out, expected_out))
    assert found.keys() == wanted.keys()
    for name in found:
        assert mx.allclose(found[name], wanted[name], rtol=0.01, atol=1e-4).item(), name
    for key in ("steps", "data", "replay", "recipe"):
        assert result.facts[key] == expected[key], key
    for key in ("mean_acceptance_length", "prompts", "rounds"):
        assert result.facts["measured"][key] == expected["measured"][key]


@pytest.mark.slow
def test_what_a_kill_leaves_behind_is_not_mistaken_for_data(target_folder, whole, tmp_path):
    folder = tmp_path / "out" / "work" / "data"
    folder.mkdir(parents=True)
    # A shard of which only a part was written, before it was put in place.
    (folder / ".shard-000000.part.npz").write_bytes(b"PK\x03\x04 half")
    (folder.parent / ".state.part.safetensors").write_bytes(b"half")
    (folder.parent / ".measured.part.json").write_bytes(b"half")
    options = values(target_folder, tmp_path / "out", steps=3, measure=0)
    assert run(TrainOptions(**options), quiet=True).stage == "done"
    assert conversations(tmp_path / "out") == conversations(whole[0])
    assert not list((tmp_path / "out").rglob(".*.part.*"))


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["first", "last"])
def test_a_deleted_shard_is_written_again(target_folder, whole, tmp_path, lost):
    out = tmp_path / "out"
    options = values(target_folder, out, steps=3, measure=0)
    run(TrainOptions(**options), quiet=True)
    paths = sorted((out / "work" / "data").glob("shard-*.npz"))
    path = paths[0 if lost == "first" else -1]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="Delete it"):
        run(TrainOptions(**options), quiet=True)
    path.unlink()
    run(TrainOptions(**options), quiet=True)
    assert conversations(out) == conversations(whole[0])


@pytest.mark.slow
def test_stop_after_minutes_leaves_the_stage_to_the_next_run(target_folder, whole, tmp_path):
    out = tmp_path / "out"
    at_once = values(target_folder, out, stop_after_minutes=1e-9)
    assert run(TrainOptions(**at_once), quiet=True).stage == "data"
    assert not shards(out)
    run(TrainOptions(**at_once | {"stop_after_minutes": None, "steps": 1, "measure": 0}), quiet=True)
    assert run(TrainOptions(**at_once), quiet=True).stage == "training"
    assert saved_step(out) == 1
    run(TrainOptions(**at_once | {"stop_after_minutes": None, "measure": 0}), quiet=True)
    stopped = run(TrainOptions(**at_once), quiet=True)
    assert (stopped.stage, stopped.facts) == ("measuring", None)
    assert measured(out) == 0
    done = run(TrainOptions(**at_once | {"stop_after_minutes": None}), quiet=True)
    assert done.stage == "done"
    assert done.facts["measured"]["prompts"] == whole[1]["measured"]["prompts"]


def test_a_finished_run_is_not_measured_twice(target_folder, whole):
    out, facts = whole
    before = (out / "work" / "measured.json").stat().st_mtime_ns
    again = run(TrainOptions(**values(target_folder, out)), quiet=True)
    assert again.facts == facts
    assert (out / "work" / "measured.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_more_steps_continue_the_training(target_folder, whole, tmp_path):
    out = tmp_path / "out"
    run(TrainOptions(**values(target_folder, out, steps=5, measure=0)), quiet=True)
    more = run(TrainOptions(**values(target_folder, out, steps=9, measure=0)), quiet=True)
    assert more.facts["steps"] == 9


def test_other_options_are_refused_where_they_would_mix(target_folder, whole):
    out, _ = whole
    with pytest.raises(UsageError, match=r"data in .*greedy-share was 0.6 and is now 0.1"):
        run(TrainOptions(**values(target_folder, out, greedy_share=0.1)), quiet=True)
    with pytest.raises(UsageError, match=r"training in .*anchors was 8 and is now 9; block-size was 4 and is now 5"):
        run(TrainOptions(**values(target_folder, out, anchors=9, block_size=5)), quiet=True)


def test_the_drafters_shape_may_change_before_the_training_begins(target_folder, tmp_path):
    options = values(target_folder, tmp_path / "out", stop_after_minutes=1e-9)
    assert run(TrainOptions(**options), quiet=True).stage == "data"
    assert run(TrainOptions(**options | {"block_size": 5, "anchors": 9}), quiet=True).stage == "data"


def test_another_target_is_refused(target_folder, whole, tmp_path):
    from tiny_folder import write_target

    other = write_target(tmp_path / "other", family="qwen2")
    with pytest.raises(UsageError, match=r"target was .*llama.* and is now .*qwen2"):
        run(TrainOptions(**values(other, whole[0])), quiet=True)


def test_two_runs_in_one_folder_are_refused(target_folder, tmp_path):
    with locked(tmp_path / "work"), pytest.raises(DFlashError, match="another process is training"):
        run(TrainOptions(**values(target_folder, tmp_path)), quiet=True)


def test_a_damaged_state_is_named(target_folder, tmp_path):
    options = values(target_folder, tmp_path, steps=2, measure=0)
    run(TrainOptions(**options), quiet=True)
    state = tmp_path / "work" / "state.safetensors"
    state.write_bytes(state.read_bytes()[: np.random.default_rng(0).integers(20, 60)])
    with pytest.raises(CheckpointError, match=r"state\.safetensors is damaged"):
        run(TrainOptions(**options), quiet=True)


def test_only_a_finished_run_is_uploaded(target_folder, whole, tmp_path, monkeypatch):
    uploads = []
    monkeypatch.setattr(finish, "push", lambda folder, repo: uploads.append((folder, repo)) or "address")
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    (out / "work" / "measured.json").unlink()
    options = values(target_folder, out, push="me/drafter")
    assert run(TrainOptions(**options, stop_after_minutes=1e-9), quiet=True).stage == "measuring"
    assert uploads == []
    assert run(TrainOptions(**options), quiet=True).stage == "done"
    assert uploads == [(out, "me/drafter")]
