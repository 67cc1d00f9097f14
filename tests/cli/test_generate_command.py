"""`dflash-mlx generate`: what reaches stdout, what reaches stderr, what is refused."""

import io
import json
import signal
import subprocess
import time

import pytest
from fake_pair import process

from dflash_mlx.drafters.denoising import DFlashConfig
from dflash_mlx.hub.registry import shipped_folder


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch):
    """Text on standard input."""

    def put(data: bytes) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return put


def test_text_on_stdout_and_statistics_on_stderr(run, fake):
    code, out, err = run("generate", "hi", "--pair", "fake")
    assert code == 0
    assert out == "one two three four five six \n"
    assert "6 tokens at 20.0 tok/s" in err
    assert "2 rounds, acceptance length 3.00, 50% of drafts kept" in err
    assert "drafting paused: a test" in err
    assert "\x1b" not in err  # no terminal, so neither colours nor cursor movements


def test_each_step_of_loading_is_told_once_without_a_terminal(run, fake):
    _, _, err = run("generate", "hi", "--pair", "fake", "--no-stats")
    assert [line for line in err.splitlines() if "fetching" in line] == ["fetching 1 of 2 MB"]


def test_json_is_the_only_thing_on_stdout(run, fake):
    code, out, err = run("generate", "hi", "--pair", "fake", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["text"] == "one two three four five six "
    assert found["token_ids"] == [0, 1, 2, 3, 4, 5]
    assert (found["mode"], found["finish_reason"], found["generation_tokens"]) == ("dflash", "stop", 6)
    assert found["acceptance"]["rounds"] == 2
    assert "tok/s" not in err


def test_no_draft_is_plain(run, fake):
    code, out, err = run("generate", "hi", "--pair", "fake", "--no-draft", "--json", "--stats")
    assert code == 0
    assert json.loads(out)["acceptance"] is None
    assert fake.asked[0]["draft"] is False
    assert "plain decoding" in err


def test_only_chosen_widths_need_measurements(run, fake):
    for arguments, measured in ((["--no-draft"], False), (["--width", "3"], False), ([], True)):
        assert run("generate", "hi", "--pair", "fake", *arguments)[0] == 0
        assert fake.measured is measured


def test_options_reach_the_sampling_parameters(run, fake):
    options = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --seed 3 --stop a --stop b"
    code, _, _ = run("generate", "hi", "--pair", "fake", *options.split())
    params = fake.asked[0]["params"]
    assert code == 0
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 0.5, 0.9, 4)
    assert (params.min_p, params.seed, params.stop) == (0.1, 3, ("a", "b"))


def test_system_comes_first_and_raw_leaves_the_template_out(run, fake):
    run("generate", "hi", "--pair", "fake", "--system", "Be brief.")
    run("generate", "hi", "--pair", "fake", "--raw")
    roles = [message["role"] for message in fake.asked[0]["prompt"]]
    assert roles == ["system", "user"]
    assert fake.asked[1]["prompt"] == [ord("h"), ord("i")]


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_the_prompt_can_come_from_stdin(run, fake, stdin, arguments):
    stdin("Grüße\nzwei\n".encode())
    code, _, _ = run("generate", *arguments, "--pair", "fake")
    assert code == 0
    assert fake.asked[0]["prompt"][-1]["content"] == "Grüße\nzwei"


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--max-tokens", "0", "at least 1"),
        ("--max-tokens", "-5", "at least 1"),
        ("--max-tokens", "many", "at least 1"),
        ("--temperature", "-0.1", "at least 0"),
        ("--temperature", "nan", "at least 0"),
        ("--top-p", "0", "above 0 and at most 1"),
        ("--top-p", "1.01", "above 0 and at most 1"),
        ("--top-k", "-1", "0 (off) or a positive whole number"),
        ("--min-p", "2", "from 0 to 1"),
        ("--seed", "-1", "from 0 to 4294967295"),
        ("--block-size", "1", "from 2"),
        ("--stop", "", "not empty"),
    ],
)
def test_absurd_values_are_refused_before_anything_loads(run, option, value, expected):
    # No fake here: were a model loaded, the pair's name would be the error.
    code, out, err = run("generate", "hi", "--pair", "no-such-pair", option, value)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith(f"error: {option} is {value}")
    assert expected in err


@pytest.mark.parametrize(
    ("data", "arguments", "code", "words"),
    [
        (b"", [], 1, "empty"),
        (b"   \n", ["-"], 1, "empty"),
        (b"\xff\xfe", [], 1, "UTF-8"),
        (b"", [""], 1, "empty"),
        (b"", ["\udcff"], 1, "UTF-8"),
        (b"", ["x" * 6000], 1, "6006 tokens"),
        (b"", ["hi", "--raw", "--system", "x"], 2, "--raw"),
    ],
)
def test_prompts_that_cannot_be_answered(run, fake, stdin, data, arguments, code, words):
    stdin(data)
    found, out, err = run("generate", *arguments, "--pair", "fake", "--no-stats")
    assert (found, out) == (code, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert words in err.splitlines()[-1]


def test_without_a_prompt_and_without_a_pipe(run, fake, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    code, out, err = run("generate", "--pair", "fake")
    assert (code, out) == (2, "")
    assert "no prompt" in err


def test_ctrl_c_ends_with_130_and_a_clean_line():
    running = process(
        "generate", "hi", "--pair", "fake", env={"FAKE_ROUNDS": "500", "FAKE_DELAY": "0.05"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert running.stdout is not None
    running.stdout.read(3)
    time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err.decode().splitlines()[-1] == "stopped."


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("demo_pair")
def test_the_demo_pair_answers_with_and_without_drafts(monkeypatch, demo_home, run):
    monkeypatch.setenv("DFLASH_MLX_HOME", str(demo_home))
    answers = []
    for arguments in ([], ["--no-draft"]):
        code, out, _ = run(
            "generate", "Why is the sky blue?", "--pair", "demo", "--max-tokens", "24", "--dtype", "float32", "--json",
            *arguments,
        )  # fmt: skip
        assert code == 0
        answers.append(json.loads(out))
    drafted, plain = answers
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["text"] == plain["text"] != ""
    assert (drafted["mode"], plain["mode"], plain["acceptance"]) == ("dflash+ngram", "plain", None)


def test_a_drafter_in_the_targets_place_is_named(run):
    code, out, err = run("generate", "hi", "--model", str(shipped_folder("smollm2-135m-dflash")), "--no-draft")
    assert (code, out) == (1, "")
    assert "holds a drafter" in err
    assert len(err) < 400


def test_kernels_can_be_left_out(run, fake):
    for given, used in ((), True), (("--no-kernels",), False):
        assert run("generate", "hi", "--pair", "fake", *given)[0] == 0
        assert fake.kernels == used


def test_exact_is_asked_for(run, fake):
    for given, wanted in ((), False), (("--exact",), True):
        assert run("generate", "hi", "--pair", "fake", *given)[0] == 0
        assert fake.exact == wanted


def test_denoising_steps_are_asked_for(run, fake):
    for given, wanted in ((), None), (("--steps", "3"), DFlashConfig(diffusion_steps=3)):
        assert run("generate", "hi", "--pair", "fake", *given)[0] == 0
        assert fake.config == wanted
    assert run("generate", "hi", "--pair", "fake", "--steps", "0")[0] == 2
