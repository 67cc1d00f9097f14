"""`dflash-mlx convert`: exit codes, what goes to stdout and what to stderr."""

import json

import pytest
from cases import CASES, write_folder


@pytest.fixture
def source(tmp_path):
    return write_folder(tmp_path / "source", CASES["full"])


def test_converts(run, source, tmp_path):
    code, out, err = run("convert", str(source), str(tmp_path / "out"), "--to", "speculators", "--model", "org/model")
    assert (code, out) == (0, f"{tmp_path / 'out'}\n")
    assert "vLLM" not in err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"


def test_the_targets_folder_says_how_many_layers_it_has(run, source, tmp_path):
    run("convert", str(source), str(tmp_path / "there"), "--to", "speculators")
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"text_config": {"num_hidden_layers": 12}}))
    code, _, _ = run("convert", str(tmp_path / "there"), str(tmp_path / "back"), "--to", "zlab", "--model", str(target))
    assert code == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_target_layers"] == 12


def test_notes_go_to_stderr(run, source, tmp_path):
    _, out, err = run("convert", str(source), str(tmp_path / "out"), "--to", "speculators")
    assert out == f"{tmp_path / 'out'}\n"
    assert "names no target" in err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--to", "zlab"), 2, "is in the layout of z-lab already"),
        (("--to", "gguf"), 2, "gguf"),
        ((), 2, "--to"),
    ],
)
def test_misuse(run, source, tmp_path, words, code, message):
    found, out, err = run("convert", str(source), str(tmp_path / "out"), *words)
    assert (found, out) == (code, "")
    assert message in err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_none(run, tmp_path):
    code, _, err = run("convert", str(tmp_path / "nowhere"), str(tmp_path / "out"), "--to", "zlab")
    assert code != 0
    assert "nowhere" in err
