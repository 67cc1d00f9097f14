"""`dflash-mlx launch` hands over to MLX's launcher."""

import os
import sys

import pytest

from dflash_mlx.cli.app import main

OWN = [sys.executable, "-m", "dflash_mlx.cli.app"]


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
    monkeypatch.setattr(os, "execv", lambda program, words: started.append((program, words)))
    assert main(["launch", *given, "--", "generate", "Hello", "--pair", "demo"]) == 0
    [(program, words)] = started
    assert program == words[0]
    assert program.endswith("mlx.launch")
    assert words[1:] == [*expected, "--", *OWN, "generate", "Hello", "--pair", "demo"]


def test_it_asks_for_machines(capsys):
    assert main(["launch", "--", "generate", "Hello"]) == 2
    assert "say on which machines" in capsys.readouterr().err
