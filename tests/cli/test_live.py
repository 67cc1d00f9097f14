"""Text and status line on one terminal, seen on a small terminal emulator."""

import os
import random
import re

import pytest
from screen import Screen

from dflash_mlx.cli import live
from dflash_mlx.cli.live import LiveText
from dflash_mlx.cli.streaming import begin

STATUS = "~status~ that is much longer than the terminal is wide, so it must be cut"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch):
    def make(columns: int, rows: int) -> Screen:
        screen = Screen(columns, rows)
        monkeypatch.setattr("sys.stdout", screen)
        monkeypatch.setattr("sys.stderr", screen)
        monkeypatch.setattr(live, "terminal_width", lambda: columns)
        monkeypatch.setattr(live, "_SECONDS_BETWEEN_DRAWINGS", 0)
        monkeypatch.setenv("TERM", "xterm")
        return screen

    return make


def plain(text: str, columns: int, rows: int) -> list[str]:
    screen = Screen(columns, rows)
    screen.write("\n".join(broken(line, columns) for line in text.split("\n")))
    return screen.text()


def broken(line: str, columns: int) -> str:
    """A line with breaks at spaces: the rule for a text that is there as a whole."""
    rows = [""]
    for part in re.findall(r" |[^ ]+", line):
        if part == " " and len(rows[-1]) == columns:
            rows.append("")
        elif part == " " or len(rows[-1]) + len(part) <= columns:
            rows[-1] += part
        else:
            rows = rows if rows[-1] else rows[:-1]
            rows += [part[i : i + columns] for i in range(0, len(part), columns)]
    return "\n".join(rows)


def test_what_is_waited_for_is_said(fake, monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(LiveText, "write", lambda self, text, status: shown.append(status))
    with LiveText() as text:
        begin(fake, text, draft=False)
        begin(fake, text, draft=True)
        begin(fake, text, draft=True)
    assert shown == ["reading the prompt", "measuring", "reading the prompt", "reading the prompt"]


def test_a_status_loses_whole_parts_where_it_does_not_fit():
    status = "  5.0 tok/s · acceptance length 2.00 · ▁█"
    assert [live.fitting(status, room) for room in (80, 41, 40, 13, 5)] == [
        status,
        status,
        "  5.0 tok/s · acceptance length 2.00",
        "  5.0 tok/s",
        "  5.0",
    ]


@pytest.mark.parametrize("seed", range(60))
def test_the_text_never_tears(terminal, seed):
    rng = random.Random(seed)
    columns, rows = rng.choice([5, 8, 20]), rng.choice([2, 3, 6])
    screen = terminal(columns, rows)
    screen.write("$ command\n" * rng.randrange(4))
    before = [line for line in screen.text() if line]
    written = "\n".join(before) + "\n" if before else ""
    with LiveText() as text:
        for _ in range(rng.randrange(1, 30)):
            piece = "".join(rng.choice("abc \n") for _ in range(rng.randrange(0, 9)))
            text.write(piece, STATUS)
            written += piece
            shown = screen.text()
            expected = plain(written, columns, rows)
            # What stands on the terminal is the text, and below it at most the status line.
            assert shown[: len(expected)] == expected
            assert [line for line in shown[len(expected) :] if line] in ([], [STATUS[: columns - 1].rstrip()])
    assert screen.text() == plain(written, columns, rows)


def test_the_status_line_is_there_while_streaming_and_gone_afterwards(terminal):
    screen = terminal(40, 5)
    with LiveText() as text:
        text.write("Hello", "12 tok/s")
        assert screen.text() == ["Hello", "12 tok/s"]
        text.write(" world", "13 tok/s")
        assert screen.text() == ["Hello world", "13 tok/s"]
    assert screen.text() == ["Hello world"]
    assert (screen.row, screen.column) == (1, 0)


def test_words_are_not_broken(terminal):
    screen = terminal(10, 6)
    with LiveText() as text:
        for piece in ("The ca", "pit", "al of Fra", "nce is", " Pa", "ris."):
            text.write(piece, "1 tok/s")
    assert screen.text() == ["The", "capital of", "France is", "Paris."]
    assert text.text == "The capital of France is Paris."


def test_wide_characters_fill_their_rows(terminal):
    sent: list[str] = []
    terminal(10, 6)
    with LiveText(status=False) as text:
        for character in "日本語の文章です":
            sent.append(text._wrapped(character))
    assert "".join(sent) == "日本語の文章です"  # each may begin a row, so the terminal breaks them itself


def test_a_model_cannot_steer_the_terminal(terminal):
    screen = terminal(40, 5)
    with LiveText(status=False) as text:
        text.write("a\x1b[2Jb\x07\x9bc\x7f", "")
    assert screen.text() == ["a[2Jbc"]
    assert text.text == "a\x1b[2Jb\x07\x9bc\x7f"  # what is kept is what the model said


def test_a_dumb_terminal_gets_no_live_line(terminal, monkeypatch):
    screen = terminal(40, 5)
    monkeypatch.setenv("TERM", "dumb")
    with LiveText() as text:
        text.write("Hello", "12 tok/s")
        assert screen.text() == ["Hello"]


@pytest.mark.parametrize("pipe", [False, True])
def test_a_pipe_has_the_terminal_to_itself(terminal, monkeypatch, tmp_path, pipe):
    """Its reader may write there; a file leaves room for the status line."""
    reader, writer = os.pipe() if pipe else (None, os.open(tmp_path / "answer", os.O_CREAT | os.O_RDWR))
    screen = terminal(40, 5)
    with os.fdopen(writer, "w") as file:
        monkeypatch.setattr("sys.stdout", file)
        with LiveText() as text:
            text.write("Hello", "12 tok/s")
            assert screen.text() == ([] if pipe else ["12 tok/s"])
    if reader is not None:
        os.close(reader)


def test_without_a_terminal_text_passes_through_unchanged(capsys):
    with LiveText() as text:
        text.write("a\x1b[1m\n", "12 tok/s")
        text.write("b", "13 tok/s")
    captured = capsys.readouterr()
    assert captured.out == "a\x1b[1m\nb"
    assert captured.err == ""
