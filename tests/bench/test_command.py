"""`dflash-mlx bench` from the outside."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from bench.fake import FakePair, fake_stream

from dflash_mlx.bench import runner
from dflash_mlx.bench.runner import PromptResult, Run
from dflash_mlx.cli import options
from dflash_mlx.cli.app import main
from dflash_mlx.pair import ModelPair


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, demo_pair: ModelPair) -> None:
    """The command finds the demo pair already loaded."""
    monkeypatch.setattr(options.ModelChoice, "open", lambda self: demo_pair)


@pytest.mark.model
@pytest.mark.usefixtures("loaded")
def test_json_holds_figures_runs_and_what_made_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["bench", "--pair", "demo", "--category", "math", "--max-tokens", "12", "--json"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/dflash-mlx", *arguments])
    assert main(arguments) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["command"] == "dflash-mlx bench --pair demo --category math --max-tokens 12 --json"
    assert document["finished"] is True
    assert (document["pair"], document["dtype"], document["params"]["max_tokens"]) == ("smollm2-135m", "float32", 12)
    assert {"kind", "chip", "mlx_version", "mlx_lm_version", "os", "python"} <= document["machine"].keys()
    assert [summary["group"] for summary in document["summary"]] == ["math", "all"]
    assert [prompt["name"] for prompt in document["prompts"]] == ["math-1", "math-2", "math-3", "math-4"]
    for prompt in document["prompts"]:
        # The promise: in float32 at temperature 0 drafting changes no token.
        assert prompt["identical"] is True
        assert sorted(run["mode"] for run in prompt["runs"]) == ["drafted", "plain"]
        assert all(1 <= len(run["token_ids"]) <= 12 for run in prompt["runs"])
    # Progress went to stderr, a line a run, and the first runs did not count.
    assert "warming up" in captured.err
    assert "[8/8]" in captured.err


def test_a_table_in_a_pipe_is_aligned_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakePair(lambda prompt, mode: [*range(6)])
    monkeypatch.setattr(options.ModelChoice, "open", lambda self: fake)
    monkeypatch.setattr(runner, "run_bench", partial(runner.run_bench, stream=fake_stream, clock=fake.clock))
    monkeypatch.setattr(runner, "warm_up", lambda *arguments, **options: None)
    assert main(["bench", "--pair", "demo", "--category", "chat", "--max-tokens", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "prompt"
    assert [line.split()[0] for line in lines[1:7]] == ["chat-1", "chat-2", "chat-3", "chat-4", "chat", "all"]
    assert all(line.endswith("yes") for line in lines[1:5])
    assert lines[7].startswith("speedup, median of the prompts' ratios:")


def test_ctrl_c_prints_what_is_finished(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def two_runs(pair: object, results: list[PromptResult], params: object, **options: Any) -> Iterator[Any]:
        for mode, seconds in (("plain", 3.0), ("drafted", 2.0)):
            run = Run(
                mode=mode,  # type: ignore[arg-type]
                token_ids=[1, 2, 3],
                finish_reason="length",
                prompt_tokens=4,
                first_s=1.0,
                wall_s=seconds,
                decode_tokens=2,
                peak_memory_gb=0.1,
                acceptance=None,
                notices=[],
            )
            results[0].runs.append(run)
            yield results[0], run
        raise KeyboardInterrupt

    monkeypatch.setattr(options.ModelChoice, "open", lambda self: FakePair(lambda prompt, mode: [1]))
    monkeypatch.setattr(runner, "run_bench", two_runs)
    monkeypatch.setattr(runner, "warm_up", lambda *arguments, **options: None)
    assert main(["bench", "--pair", "demo"]) == 130
    captured = capsys.readouterr()
    assert "stopped after 2 of 24 runs" in captured.err
    lines = captured.out.splitlines()
    assert lines[1].split() == ["chat-1", "1.0", "2.0", "2.00x", "-", "-", "yes"]
    assert "2.00x decoding, 1.50x with prompt processing" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--category", "poetry"], "no prompt has the category 'poetry'; there are: chat, code, math"),
        (["--prompts", "/nowhere/at/all.jsonl"], "cannot read the prompts in /nowhere/at/all.jsonl"),
        (["--repeat", "0"], "--repeat"),
        (["--max-tokens", "-3"], "--max-tokens is -3"),
    ],
)
def test_misuse_is_told_before_any_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(self: options.ModelChoice) -> ModelPair:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(options.ModelChoice, "open", no_model)
    assert main(["bench", "--pair", "demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
