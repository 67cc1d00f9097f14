"""Turns from lines, and the history file."""

import io
import os
import stat

import pytest

from dflash_mlx.cli import line_input
from dflash_mlx.cli.line_input import LineInput, read_history, write_history
from dflash_mlx.hub.leftovers import write_atomically


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        ("a\nb\n", ["a", "b"]),
        ("a", ["a"]),
        ("", []),
        ("\n", [""]),
        ("a\\\nb\\\nc\nd\n", ["a\nb\nc", "d"]),
        ("a\\", ["a\n"]),
        ('"""a\nb"""\nc\n', ["a\nb", "c"]),
        ('"""\na\n\nb\n"""\n', ["\na\n\nb\n"]),
        ('"""a"""\n', ["a"]),
        ('"""a\nb', ["a\nb"]),
        ("a\r\nb\r\n", ["a", "b"]),
    ],
)
def test_lines_become_turns(monkeypatch, tmp_path, text, turns):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    lines = LineInput(tmp_path / "history")
    found = []
    while (turn := lines.read()) is not None:
        found.append(turn)
    assert found == turns
    assert not (tmp_path / "history").exists()  # a pipe's lines are nobody's history


def test_history_survives_and_is_private(tmp_path):
    path = tmp_path / "new" / "history.jsonl"
    write_history(path, ["one", "two\nlines", "Grüße 🙂"])
    assert read_history(path) == ["one", "two\nlines", "Grüße 🙂"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text('"good"\n{"bad": 1}\nnot json\n"also good"\n')
    assert read_history(path) == ["good", "also good"]
    write_history(path, [str(n) for n in range(2000)])
    assert read_history(path) == [str(n) for n in range(1000, 2000)]
    path.write_bytes(b"\xff\xff")
    assert read_history(path) == []
    assert read_history(tmp_path / "none") == []


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")

    def fails(source: str, target: str) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="no"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_pasted_lines_stay_together_without_readline_s_help(monkeypatch, tmp_path):
    """libedit, which some Pythons have instead of GNU readline, gives each pasted line on its own."""
    waiting = ["one", "two", "three"]
    monkeypatch.setattr("builtins.input", lambda prompt="": waiting.pop(0))
    monkeypatch.setattr(line_input, "at_keyboard", lambda: True)
    monkeypatch.setattr(line_input, "readline", None)
    monkeypatch.setattr(line_input, "_more_was_pasted", lambda: bool(waiting))
    assert LineInput(tmp_path / "history").read() == "one\ntwo\nthree"
