"""The edge: exit codes, one line for each error, what start-up imports, pipes that close."""

import os
import subprocess
import sys

import pytest
from fake_pair import process

from dflash_mlx import __version__
from dflash_mlx.cli import app
from dflash_mlx.errors import DownloadError, UsageError


def test_help_is_quick_to_import():
    heavy = "mlx.core, mlx_lm, transformers, huggingface_hub, numpy, rich.live"
    code = (
        "import sys\n"
        "from dflash_mlx.cli.app import main\n"
        "assert main(['--help']) == 0 and main(['generate', '--help']) == 0\n"
        f"print([m for m in '{heavy}'.split(', ') if m in sys.modules], file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "generate" in found.stdout
    assert found.stderr.strip() == "[]"


@pytest.mark.parametrize(
    "command", ["generate", "chat", "bench", "serve", "models", "train", "doctor", "cache", "default", "pull"]
)
def test_every_command_has_help_with_an_example(run, command):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert "Example" in out
    assert f"dflash-mlx {command}" in out


def test_no_command_shows_the_help(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "generate" in out


def test_version(run):
    assert run("--version") == (0, f"dflash-mlx {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "'nonsense'"),
        (["generat"], "Did you mean 'generate'? See: dflash-mlx --help"),
        (["generate", "hi", "--model", "demo"], "load it with --pair demo"),
        (["pull", "dmeo"], "Did you mean smollm2-135m (demo)?"),
        (["generate", "hi", "--nonsense"], "--nonsense"),
        (["generate", "a", "b"], "(b)"),
        (["generate", "hi", "--dtype", "int8"], "'int8'"),
        (["models", "show", "nonsense"], "'nonsense'"),
    ],
)
def test_misuse_is_one_line_and_code_2(run, arguments, words):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UsageError("no such pair"), 2, "no such pair"),
        (DownloadError("no network"), 1, "no network"),
        (OSError(28, "No space left on device", "/full"), 1, "No space left on device: /full"),
        (RuntimeError("[metal::malloc] too much"), 1, "not enough memory"),
        (ImportError("libcuda.so.1: cannot open shared object file"), 1, "this machine lacks their driver"),
        (ImportError("x"), 1, "this is a bug"),
        (KeyError("x"), 1, "this is a bug"),
    ],
)
def test_each_kind_of_error_has_its_words(error, code, words):
    message, found = app.explain(error)
    assert found == code
    assert words in message


def test_a_bug_is_one_line_and_debug_shows_the_traceback(run, fake):
    code, out, err = run("generate", "hi", "--pair", "crash")
    assert (code, out) == (1, "")
    assert err.startswith("error: KeyError:")
    assert err.count("\n") == 1
    code, out, err = run("generate", "hi", "--pair", "crash", "--debug")
    assert (code, out) == (1, "")
    assert "Traceback" in err


def test_debug_behind_two_dashes_is_a_prompt(run, fake):
    code, _, _ = run("generate", "--pair", "fake", "--", "--debug")
    assert code == 0
    assert fake.asked[0]["prompt"] == [{"role": "user", "content": "--debug"}]


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    running = process(
        "generate", "hi", "--pair", "fake", env={"FAKE_ROUNDS": "50", "FAKE_DELAY": "0.02"},
        stdout=write, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(write)
    os.read(read, 3)
    os.close(read)
    _, err = running.communicate(timeout=60)
    assert running.returncode == app.READER_GONE
    assert b"Traceback" not in err
    assert b"Error" not in err
    assert b"Exception" not in err


def test_completion_script():
    found = subprocess.run(
        [sys.executable, "-c", "from dflash_mlx.cli.app import main; main([])"],
        env={**os.environ, "_DFLASH_MLX_COMPLETE": "complete_bash", "COMP_WORDS": "dflash-mlx gen", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
    )
    assert found.stdout.split() == ["generate"]


def test_ctrl_c_while_options_are_read_is_one_line(run, monkeypatch):
    def interrupted(self, ctx, args):
        raise KeyboardInterrupt

    monkeypatch.setattr(app.TyperGroup, "parse_args", interrupted)
    code, out, err = run("models")
    assert (code, out) == (app.INTERRUPTED, "")
    assert err.strip() == "stopped."
