"""Words and pictures about an answer."""

import io

import pytest

from dflash_mlx.cli import output
from dflash_mlx.cli.output import picture, printable, styled


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [([], ""), ([(4, 0), (4, 4)], "▁█"), ([(7, n) for n in range(8)], "▁▂▃▄▅▆▇█"), ([(0, 0)], "▁")],
)
def test_each_round_is_a_bar(rounds, expected):
    assert picture(rounds) == expected


def test_only_the_last_rounds_are_shown():
    assert picture([(1, 0)] * 5 + [(1, 1)] * 3, count=4) == "▁███"


def test_bars_become_digits_where_there_are_no_block_characters():
    assert picture([(4, 0), (4, 4)], unicode=False) == "07"
    assert not output.can_draw(io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))


def test_printable_keeps_letters_newlines_and_tabs():
    assert printable("a\tb\nç日🙂\x1b[31m\x00\r") == "a\tb\nç日🙂[31m"


def test_narrow_terminals_break_lines_between_words_but_not_in_commands(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output, "terminal_width", lambda: 31)
    text = "name:   a word and another-one that is long: `dflash-mlx models list --all` lists\nmore"
    assert output.wrapped(text, io.StringIO()) == text
    lines = output.wrapped(text, Terminal()).split("\n")
    assert "".join(lines).replace(" ", "") == text.replace(" ", "").replace("\n", "")
    assert max(len(line) for line in lines if "`" not in line) <= 30
    assert "        `dflash-mlx models list --all`" in lines
    assert lines[-1] == "more"


def test_parts_with_dots_between_them_stay_whole_where_they_fit(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output, "terminal_width", lambda: 31)
    lines = output.wrapped("30 tokens at 3.0 tok/s · peak memory 0.7 GB · a b", Terminal()).split("\n")
    assert lines == ["30 tokens at 3.0 tok/s ·", "peak memory 0.7 GB · a b"]
    long = output.wrapped("a part that is much longer than a whole row · end", Terminal()).split("\n")
    assert long == ["a part that is much longer", "than a whole row · end"]


def test_a_sentence_of_a_result_is_broken_on_terminals_only(monkeypatch, capsys):
    monkeypatch.setattr(output, "terminal_width", lambda: 21)
    output.say("a sentence of a result that is long")
    assert capsys.readouterr().out == "a sentence of a result that is long\n"
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    output.say("a sentence of a result that is long")
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 20


def test_what_can_be_copied_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    monkeypatch.setattr(output, "terminal_width", lambda: 30)
    command = "try it: curl http://127.0.0.1:8080/v1/models -H 'Content-Type: application/json'"
    output.note(command, copyable=True)
    assert command in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_only_on_a_terminal_that_wants_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert styled("x", "red", Terminal()) == "\x1b[31mx\x1b[0m"
    assert styled("x", "red", io.StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("x", "red", Terminal()) == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert styled("x", "red", Terminal()) == "x"
