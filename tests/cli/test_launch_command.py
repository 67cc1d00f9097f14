"""`dflash-mlx launch` hands over to MLX's launcher, and passes its input on to rank 0."""

import os
import signal
import subprocess
import sys

import pytest

from dflash_mlx.cli import launch, launched
from dflash_mlx.cli.app import main

OWN = [sys.executable, "-m", "dflash_mlx.cli.launched"]
# In the place of MLX's launcher: prints what it reads, and ends after ctrl-D.
ECHO = """
import os
while not (data := os.read(0, 100)).endswith(b"\\x04"):
    print(data, flush=True)
print(data, flush=True)
"""
LAUNCH = "import sys; from dflash_mlx.cli.launch import run_launcher; run_launcher(sys.argv[1:])"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["-n", "3"], ["-n", "3"]),
        (["--hosts", "10.0.0.1,10.0.0.2", "--backend", "ring"], ["--hosts", "10.0.0.1,10.0.0.2", "--backend", "ring"]),
        (["--hostfile", "hosts.json"], ["--hostfile", "hosts.json"]),
    ],
)
def test_the_rest_goes_to_the_launcher(given, expected, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "run_launcher", started.append)
    assert main(["launch", *given, "--", "generate", "Hello", "--pair", "demo"]) == 0
    [words] = started
    assert words[0].endswith("mlx.launch")
    assert words[1:] == [*expected, "--", *OWN, "generate", "Hello", "--pair", "demo"]


def test_it_asks_for_machines(capsys):
    assert main(["launch", "--", "generate", "Hello"]) == 2
    assert "say on which machines" in capsys.readouterr().err


@pytest.fixture
def launching():
    words = [sys.executable, "-c", LAUNCH, sys.executable, "-c", ECHO]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_input_its_end_and_ctrl_c_go_to_the_launcher(launching):
    launching.stdin.write(b"hello\n")
    launching.stdin.flush()
    assert launching.stdout.readline() == b"b'hello\\n'\n"
    launching.send_signal(signal.SIGINT)
    assert launching.stdout.readline() == b"b'\\x03'\n"
    launching.stdin.close()
    assert launching.stdout.readline() == b"b'\\x04'\n"
    assert launching.wait() == 0


def test_a_launch_that_is_ended_ends_the_launcher(launching):
    launching.stdin.write(b"hello\n")
    launching.stdin.flush()
    assert launching.stdout.readline()
    launching.terminate()
    assert launching.wait() == 0
    assert launching.stdout.read() == b""  # nobody holds it open any longer


def test_rank_0_takes_the_input_and_notices_the_end_of_the_launcher(monkeypatch):
    signals = []
    monkeypatch.setattr(os, "kill", lambda process, number: signals.append((process, number)))
    (given, launcher), (stdin, writing) = os.pipe(), os.pipe()
    os.write(launcher, b"hello\x03 again\n\x04 too late")
    os.close(launcher)
    launched._pass_on(given, writing)
    assert signals == [(os.getpid(), signal.SIGINT), (os.getpid(), signal.SIGTERM)]
    with os.fdopen(stdin, "rb") as lines:
        assert lines.read() == b"hello again\n"
    os.close(given)
