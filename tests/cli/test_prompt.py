"""Prompt, attached files and piped text become one prompt; a stdin that says nothing changes nothing."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_pair import process

from dflash_mlx.cli import prompt as prompts
from dflash_mlx.cli.prompt import read_prompt
from dflash_mlx.errors import PromptError, UsageError


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], int]]:
    """A pipe on stdin with text in it; returns its other end, which stays open when the text is to go on."""
    opened = []

    def put(text: str, *, close: bool = True) -> int:
        read, write = os.pipe()
        os.write(write, text.encode())
        if close:
            os.close(write)
        else:
            opened.append(write)
        monkeypatch.setattr("sys.stdin", os.fdopen(read, encoding="utf-8"))
        return write

    yield put
    for descriptor in opened:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("Summarise", "Summarise\n\nDear Ada,\nhello"), (None, "Dear Ada,\nhello"), ("-", "Dear Ada,\nhello")],
)
def test_piped_text_follows_the_prompt(piped, prompt, expected):
    piped("Dear Ada,\nhello\n")
    assert read_prompt(prompt) == expected


def test_files_stand_between_prompt_and_piped_text(piped, tmp_path):
    (tmp_path / "a.txt").write_text("first\n")
    (tmp_path / "b.md").write_text("has ```` in it")
    piped("last")
    found = read_prompt("Compare", [tmp_path / "a.txt", tmp_path / "b.md"])
    assert found == "Compare\n\na.txt:\n```\nfirst\n```\n\nb.md:\n`````\nhas ```` in it\n`````\n\nlast"


def test_files_alone_are_a_prompt(piped, tmp_path):
    (tmp_path / "a.txt").write_text("first")
    piped("")
    assert read_prompt(None, [tmp_path / "a.txt"]) == "a.txt:\n```\nfirst\n```"


@pytest.mark.parametrize("text", ["", "\n", "  \n"])
def test_an_empty_pipe_changes_nothing(piped, text):
    piped(text)
    assert read_prompt("hi") == "hi"


def test_a_closed_stdin_and_devices_change_nothing(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert read_prompt("hi") == "hi"
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        assert read_prompt("hi") == "hi"


def test_an_open_pipe_without_a_writer_does_not_block(piped, monkeypatch, capsys):
    monkeypatch.setattr(prompts, "SECONDS_FOR_A_PIPE", 0.05)
    piped("", close=False)
    assert read_prompt("hi") == "hi"
    assert "nothing came in on stdin" in capsys.readouterr().err


def test_a_file_counts_from_its_start_only(monkeypatch, tmp_path):
    path = tmp_path / "questions.txt"
    path.write_text("one\ntwo\n")
    with path.open(encoding="utf-8") as file:
        monkeypatch.setattr("sys.stdin", file)
        assert read_prompt("hi") == "hi\n\none\ntwo"
    with path.open(encoding="utf-8") as file:
        os.lseek(file.fileno(), 4, os.SEEK_SET)  # as in `while read question; do ...; done < questions.txt`
        monkeypatch.setattr("sys.stdin", file)
        assert read_prompt("one") == "one"


def test_a_dash_waits_for_stdin(piped, monkeypatch):
    monkeypatch.setattr(prompts, "SECONDS_FOR_A_PIPE", 0)
    piped("late")
    assert read_prompt("hi", [Path("-")]) == "hi\n\nlate"
    piped("")
    with pytest.raises(PromptError, match="nothing came in"):
        read_prompt("hi", [Path("-")])


def test_what_cannot_be_attached_is_said(piped, tmp_path):
    piped("")
    with pytest.raises(UsageError, match=r"cannot read .*none\.txt: No such file"):
        read_prompt("hi", [tmp_path / "none.txt"])
    with pytest.raises(UsageError, match="Is a directory"):
        read_prompt("hi", [tmp_path])
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(PromptError, match="not UTF-8"):
        read_prompt("hi", [tmp_path / "picture.png"])
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(PromptError, match="is empty"):
        read_prompt("hi", [tmp_path / "empty"])


@pytest.mark.slow
def test_the_command_with_every_kind_of_stdin(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    alone = len("user:hi\n")

    def prompt_tokens(*more: str, **options: object) -> int:
        arguments = ("generate", "hi", *more, "--pair", "fake", "--json")
        running = process(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
        out, err = running.communicate(timeout=60)
        assert running.returncode == 0, err
        return int(out.decode().partition('"prompt_tokens": ')[2].partition(",")[0])

    assert prompt_tokens(stdin=subprocess.DEVNULL) == alone
    assert prompt_tokens(preexec_fn=lambda: os.close(0)) == alone
    with (tmp_path / "a.txt").open() as file:
        assert prompt_tokens(stdin=file) == alone + len("\n\nabc")
    assert prompt_tokens("-f", str(tmp_path / "a.txt"), stdin=subprocess.DEVNULL) == alone + len(
        "\n\na.txt:\n```\nabc\n```"
    )


def test_an_idle_pipe_delays_the_command_by_seconds_only():
    read, write = os.pipe()
    started = time.monotonic()
    running = process("generate", "hi", "--pair", "fake", stdin=read, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = running.communicate(timeout=60)
    os.close(read)
    os.close(write)
    assert (running.returncode, out) == (0, b"one two three four five six \n")
    assert b"nothing came in on stdin" in err
    assert time.monotonic() - started >= prompts.SECONDS_FOR_A_PIPE
