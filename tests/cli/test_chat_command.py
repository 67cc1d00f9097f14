"""`dflash-mlx chat` as a process: turns from a pipe, and a person at a terminal."""

import contextlib
import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from fake_pair import process

from dflash_mlx.cli.line_input import read_history


def piped(text: str, *arguments: str) -> tuple[int, str, str]:
    running = process(
        "chat", "--pair", "fake", *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = running.communicate(text.encode(), timeout=60)
    return running.returncode, out.decode(), err.decode()


def test_each_line_of_a_pipe_is_a_turn():
    code, out, err = piped("first\n\nsecond\n/stats\n/exit\nnever\n", "--max-tokens", "3")
    assert (code, out) == (0, "one two three \none two three \n")
    assert "2 answers, 6 tokens" in err
    assert "\x1b" not in out + err
    assert "> " not in out + err


def test_statistics_can_be_left_out():
    assert "tok/s" not in piped("first\n", "--no-stats")[2]


def test_an_error_in_a_pipe_ends_the_run():
    code, out, err = piped("first\n" + "x" * 6000 + "\nnever\n")
    assert (code, out.count("\n")) == (1, 1)
    assert err.splitlines()[-1].startswith("error: the prompt has")


class Person:
    """Someone at a terminal, who types and waits for words."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.master, slave = pty.openpty()
        env = {"TERM": "xterm", "NO_COLOR": "1", "INPUTRC": "/dev/null", **(env or {})}
        # A terminal of its own: Ctrl-C must reach this process and no other.
        self.process = process(
            *arguments, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C at the prompt. Python misses one that comes in the moment between the prompt and the wait for keys."""
        time.sleep(0.1)
        while not self.sleeps():
            time.sleep(0.01)
        self.type("\x03")

    def sleeps(self) -> bool:
        """Whether the process waits for something; True where that cannot be told."""
        facts = Path(f"/proc/{self.process.pid}/stat")
        return not facts.exists() or facts.read_text().rpartition(")")[2].split()[0] == "S"

    def wait_for(self, words: str, seconds: float = 60) -> str:
        """What came up to and with `words`, since the last wait."""
        deadline = time.monotonic() + seconds
        while words not in self.seen:
            assert time.monotonic() < deadline, f"no {words!r} in {self.seen!r}"
            if select.select([self.master], [], [], 0.1)[0]:
                # Linux ends a closed terminal with an error instead of an end of file.
                with contextlib.suppress(OSError):
                    self.seen += os.read(self.master, 4096).decode()
        found, _, self.seen = self.seen.partition(words)
        return found + words

    def leaves(self) -> int:
        code = self.process.wait(timeout=60)
        os.close(self.master)
        return code


@pytest.fixture
def person():
    people = []

    def enter(*arguments: str, **options: dict[str, str]) -> Person:
        people.append(Person(*arguments, **options))
        return people[-1]

    yield enter
    for one in people:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(person):
    someone = person("chat", "--pair", "fake", env={"FAKE_ROUNDS": "200", "FAKE_DELAY": "0.05"})
    someone.wait_for("> ")
    someone.type("first\r")
    live = someone.wait_for("four")
    assert "20.0 tok/s" in live
    someone.type("\x03")
    stopped = someone.wait_for("> ")
    assert "stopped; what was said stays in the conversation" in stopped
    assert "Traceback" not in stopped
    someone.type("/stats\r")
    assert "1 answer, " in someone.wait_for("last rounds")
    someone.type("/exit\r")
    assert someone.leaves() == 0


def test_ctrl_c_twice_at_the_prompt_leaves(person):
    someone = person("chat", "--pair", "fake")
    someone.wait_for("> ")
    someone.type("half a line")
    someone.wait_for("half a line")
    someone.interrupt()
    someone.wait_for("once more leaves")
    someone.wait_for("> ")
    someone.interrupt()
    assert someone.leaves() == 0


def test_ctrl_d_leaves_and_typed_turns_are_history(person, home: Path):
    someone = person("chat", "--pair", "fake")
    someone.wait_for("> ")
    someone.type("first \\\r")
    someone.wait_for(". ")
    someone.type("turn\r")
    someone.wait_for("six")
    someone.wait_for("> ")
    someone.type("/nonsense\r")
    someone.wait_for("error: there is no command /nonsense")
    someone.wait_for("> ")
    someone.type("\x04")
    assert someone.leaves() == 0
    assert read_history(home / "chat-history.jsonl") == ["first \nturn", "/nonsense"]


def test_keys_typed_during_an_answer_wait_for_the_prompt(person):
    someone = person("chat", "--pair", "fake", "--no-stats", env={"FAKE_DELAY": "0.3"})
    someone.wait_for("> ")
    someone.type("first\r")
    someone.wait_for("three")
    someone.type("secret")
    assert "secret" not in someone.wait_for("six")
    someone.wait_for("> secret")
    someone.interrupt()
    someone.wait_for("> ")
    someone.type("\x04")
    assert someone.leaves() == 0


def test_no_colour_on_a_terminal_that_does_not_want_it(person):
    someone = person("generate", "hi", "--pair", "fake")
    shown = someone.wait_for("drafts kept")
    assert someone.leaves() == 0
    assert "\x1b[2m" not in shown
    someone = person("generate", "hi", "--pair", "fake", env={"NO_COLOR": ""})
    shown = someone.wait_for("tokens at")
    assert "\x1b[2m" in shown


def test_pasted_lines_are_one_turn(person, home: Path):
    someone = person("chat", "--pair", "fake")
    someone.wait_for("> ")
    someone.type("\x1b[200~first\rsecond\rthird\x1b[201~")
    someone.wait_for("third")
    someone.type("\r")
    someone.wait_for("tokens at")
    someone.wait_for("> ")
    someone.type("\x04")
    assert someone.leaves() == 0
    assert read_history(home / "chat-history.jsonl") == ["first\nsecond\nthird"]


def test_tab_completes_a_command_and_retry_answers_again(person):
    someone = person("chat", "--pair", "fake", "--no-stats")
    someone.wait_for("> ")
    someone.type("first\r")
    someone.wait_for("six")
    someone.wait_for("> ")
    someone.type("/ret\t")
    someone.wait_for("/retry ")
    someone.type("\r")
    someone.wait_for("six")
    someone.wait_for("> ")
    someone.type("/und\t\r")
    someone.wait_for("Taken back: first")
    someone.wait_for("> ")
    someone.type("\x04")
    assert someone.leaves() == 0


def test_a_file_goes_with_the_next_turn(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    first, second = (piped(text)[2] for text in ("hi\n", f"/file {tmp_path}/a.txt\nhi\n"))
    tokens = [int(re.findall(r"prompt (\d+) tokens", text)[0]) for text in (first, second)]
    assert tokens[1] - tokens[0] == len("\n\na.txt:\n```\nabc\n```")


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("demo_pair")
def test_the_demo_pair_remembers_the_conversation(monkeypatch, demo_home):
    monkeypatch.setenv("DFLASH_MLX_HOME", str(demo_home))
    running = subprocess.run(
        [sys.executable, "-m", "dflash_mlx.cli.app", "chat", "--pair", "demo", "--max-tokens", "12"],
        input="My name is Ada.\nWhat is my name?\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert running.returncode == 0
    assert running.stdout.count("\n") >= 2
    assert "already in memory" in running.stderr
