"""`dflash-mlx train` as it is typed."""

import inspect

import pytest

from dflash_mlx.cli.app import main
from dflash_mlx.cli.train import parse_taps, train_command
from dflash_mlx.errors import UsageError
from dflash_mlx.training import TrainOptions, pipeline

# Names of options that are not fields of TrainOptions, and fields that are not options.
NOT_FIELDS, NOT_OPTIONS = {"show"}, {"num_taps", "eval_conversations"}


@pytest.fixture
def received(monkeypatch):
    """The options that the command hands on."""
    calls = []

    def fake_run(options):
        calls.append(options)
        return pipeline.TrainResult("done", options.out)

    monkeypatch.setattr(pipeline, "run", fake_run)
    return calls


def test_every_option_reaches_the_training():
    parameters = set(inspect.signature(train_command).parameters)
    fields = set(TrainOptions.__dataclass_fields__)
    assert parameters - NOT_FIELDS == fields - NOT_OPTIONS


def test_the_defaults_are_the_trainings(received, tmp_path, capsys):
    assert main(["train", "--model", "a/b", "--out", str(tmp_path)]) == 0
    assert received == [TrainOptions(model="a/b", out=tmp_path)]
    assert capsys.readouterr().out.strip() == str(tmp_path)


@pytest.mark.parametrize("target", [["--model", "a/b"], ["--pair", "demo"]])
def test_the_command_to_try_it_names_the_target(received, tmp_path, capsys, target):
    assert main(["train", *target, "--out", str(tmp_path)]) == 0
    err = capsys.readouterr().err
    assert " ".join(["dflash-mlx", "chat", *target, "--draft-model", str(tmp_path)]) in " ".join(err.split())


def test_options_arrive_as_typed(received, tmp_path):
    file = tmp_path / "p.txt"
    file.write_text("x")
    words = "--data-tokens 5000 --greedy-share 0.5 --turns 2 --layers 3 --taps 1,5,9 --block-size 8 --minutes 2.5 "
    words += "--learning-rate 1e-3 --optimizer muon --weights decay --gamma 4 --measure 10 --quantize 4 --push me/it "
    words += "--draft-vocabulary 9000 --stop-after-minutes 9 --thinking off --seed 7 --license mit"
    command = ["train", "--pair", "demo", "--out", str(tmp_path), "--prompts", str(file), *words.split()]
    assert main(command) == 0
    [options] = received
    assert options == TrainOptions(
        pair="demo", out=tmp_path, prompts=file, data_tokens=5000, greedy_share=0.5, turns=2, layers=3, taps=(1, 5, 9),
        block_size=8, minutes=2.5, learning_rate=1e-3, optimizer="muon", weights="decay", gamma=4, measure=10,
        quantize=4, push="me/it", draft_vocabulary=9000, stop_after_minutes=9, thinking="off", seed=7, license="mit",
    )  # fmt: skip


def test_taps():
    assert parse_taps(None) == {}
    assert parse_taps("3") == {"num_taps": 3}
    assert parse_taps("1, 8,14") == {"taps": (1, 8, 14)}
    with pytest.raises(UsageError, match="layer numbers with commas"):
        parse_taps("1,x")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--out"),
        (["--out", "x"], "name the target"),
        (["--out", "x", "--model", "a/b", "--layers", "many"], "--layers"),
        (["--out", "x", "--model", "a/b", "--block-size", "1"], "block-size should be"),
    ],
)
def test_misuse_is_exit_code_2_and_one_line(received, capsys, words, message):
    assert main(["train", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_run_that_is_not_finished_prints_no_result(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pipeline, "run", lambda options: pipeline.TrainResult("training", options.out))
    assert main(["train", "--model", "a/b", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""


def test_show_prints_conversations(target_folder, tmp_path, capsys):
    words = ["train", "--model", str(target_folder), "--out", str(tmp_path), "--show", "3"]
    assert main(words) == 1
    assert "no conversations in" in capsys.readouterr().err
    options = TrainOptions(
        model=str(target_folder), out=tmp_path, data_tokens=400, data_batch=8, max_length=40, max_user_tokens=8,
        stop_after_minutes=1e-9, layers=1, taps=(1, 3),
    )  # fmt: skip
    pipeline.run(TrainOptions(**vars(options) | {"stop_after_minutes": None, "steps": 1, "measure": 0}), quiet=True)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.count("--- conversation") == 3
    assert out.count(">>>") == out.count("<<<") == 3
    assert "<|im_start|>user" in out


@pytest.mark.parametrize("others", [False, True])
def test_a_target_that_is_not_there_leaves_nothing_behind(others, tmp_path, capsys):
    out = tmp_path / "out"
    if others:
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    assert main(["train", "--model", str(tmp_path / "nofolder"), "--out", str(out)]) != 0
    assert "nofolder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == (["out", "notes.txt"] if others else [])
