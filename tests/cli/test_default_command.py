"""The pair that is used when none is named."""

from pathlib import Path

import pytest

from dflash_mlx.cli import default
from dflash_mlx.cli.default import best_pair, read_default, settings_path, write_default


def pair(name: str, mb: int | None, *, downloaded: bool = True, fits: bool | None = True, alias: str = "") -> dict:
    return {
        "name": name,
        "aliases": [alias] if alias else [],
        "downloaded": downloaded,
        "fits_memory": fits,
        "memory": {"total_mb": mb},
    }


DEMO = pair("tiny", 100, alias="demo")


@pytest.mark.parametrize(
    ("pairs", "name"),
    [
        ([DEMO], "demo"),
        ([], "demo"),
        ([DEMO, pair("a", 500), pair("b", 900)], "b"),
        ([DEMO, pair("a", 500), pair("b", 900, downloaded=False), pair("c", 950, fits=False)], "a"),
        ([DEMO, pair("c", None, fits=None)], "demo"),
    ],
)
def test_the_largest_usable_pair_is_the_best(pairs, name):
    assert best_pair(pairs)[0] == name


def test_nothing_named_is_said_in_one_line(run, fake):
    code, out, err = run("generate", "hi", "--no-stats")
    assert (code, out) == (0, "one two three four five six \n")
    assert err.count("using the pair demo") == 1
    assert "choose another with --pair" in err


def test_a_default_is_remembered_and_forgotten(run, fake, home: Path):
    assert run("default", "Qwen3-4B") == (0, "qwen3-4b is the default now\n", "")
    assert settings_path() == home / "settings.json"
    assert [path.name for path in home.iterdir()] == ["settings.json"]
    assert run("default")[1] == "qwen3-4b (your default)\n"
    assert "using the pair qwen3-4b (your default)" in run("generate", "hi")[2]
    assert "using" not in run("generate", "hi", "--pair", "fake")[2]
    assert run("default", "--clear")[0] == 0
    assert read_default() is None
    assert run("default", "--clear")[0] == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"pair": 7}', "\xff"])
def test_a_damaged_file_is_no_default(home: Path, text):
    home.mkdir()
    settings_path().write_text(text, encoding="latin-1")
    assert read_default() is None
    write_default("qwen3-4b")
    assert read_default() == "qwen3-4b"


def test_a_default_that_is_not_known_any_more(run, monkeypatch):
    write_default("gone")
    monkeypatch.setattr(default, "best_pair", lambda pairs: ("demo", "a test"))
    code, out, err = run("default")
    assert (code, out) == (0, "demo (a test)\n")
    assert "your default cannot be used: no pair is called 'gone'" in err


def test_misuse(run, home: Path):
    assert run("default", "nope")[0] == 2
    assert run("default", "demo", "--clear")[0] == 2
    assert not home.exists()


def test_the_settings_file_of_a_user_without_a_home_of_ours(monkeypatch, tmp_path):
    monkeypatch.delenv("DFLASH_MLX_HOME")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert settings_path() == tmp_path / "dflash-mlx" / "settings.json"
