"""`dflash-mlx bench` from the outside."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.fake import Fake, fakes, ratios

from dflash_mlx import runtime
from dflash_mlx.bench import load, measured
from dflash_mlx.bench.analyse import analyse
from dflash_mlx.cli import bench, options
from dflash_mlx.cli.app import main
from dflash_mlx.cli.bench_options import comparable, parse_sweeps, servers_of, settings_of, variants
from dflash_mlx.cli.bench_progress import about
from dflash_mlx.cli.bench_report import write
from dflash_mlx.cli.options import DType, ModelChoice
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.pair import ModelPair
from dflash_mlx.sampling import SamplingParams


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, demo_pair: ModelPair) -> None:
    """The command finds the demo pair already loaded."""
    monkeypatch.setattr(options.ModelChoice, "open", lambda self: demo_pair)
    monkeypatch.setattr(measured, "memory_bandwidth", lambda: 1e10)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Fake]], None]:
    """The command runs these contestants on a pair without models."""

    def put(contestants: dict[str, Fake]) -> None:
        pair = SimpleNamespace(
            name="a-pair",
            dtype="mlx.core.float32",
            block_size=8,
            exact=False,
            encode_chat=lambda messages: [1] * 9,
            target=SimpleNamespace(machines=1),
        )
        monkeypatch.setattr(options.ModelChoice, "open", lambda self: pair)
        monkeypatch.setattr(bench, "_contestants", lambda *arguments, **options: contestants)
        monkeypatch.setattr(measured, "look_closer", lambda *arguments: {})

    return put


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.usefixtures("loaded")
def test_every_contestant_in_this_process_gives_the_same_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(load, "FEWEST_REQUESTS", 2)
    arguments = ["bench", "--pair", "demo", "--category", "math", "--limit", "1", "--max-tokens", "8", "--width", "3"]
    arguments += ["--turns", "3", "--also", "tree=7", "--against-mlx-lm", "--concurrency", "2"]
    arguments += ["--out", str(tmp_path), "--json"]
    monkeypatch.setattr(sys, "argv", ["/somewhere/dflash-mlx", *arguments])
    assert main(arguments) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["command"].startswith("dflash-mlx bench --pair demo --category math")
    assert (document["finished"], document["turns"]) == (True, 3)
    assert (document["pair"], document["dtype"], document["params"]["max_tokens"]) == ("smollm2-135m", "float32", 8)
    assert {"kind", "chip", "mlx_version", "mlx_lm_version", "os", "python"} <= document["machine"].keys()
    assert list(document["contestants"]) == ["plain", "drafted", "tree=7", "mlx-lm"]
    # The promise: in float32 at temperature 0 drafting changes no token, and mlx-lm's are the same.
    assert [(s["contestant"], s["identical"]) for s in document["summary"] if s["group"] == "all"] == [
        ("plain", None),
        ("drafted", 1),
        ("tree=7", 1),
        ("mlx-lm", 1),
    ]
    widths = {(run["contestant"], r[1]) for p in document["prompts"] for run in p["runs"] for r in run["rounds"]}
    assert {width for name, width in widths if name == "drafted"} <= {0, 1, 2, 3}
    assert {width for name, width in widths if name == "tree=7"} <= set(range(8))
    assert [(run["streams"], run["requests"]) for run in document["load"]] == [(2, 2)] * 4
    assert all(0 < run["tokens"] <= 16 for run in document["load"])
    assert document["measured"]["bandwidth_gb_s"] == 10.0
    assert document["measured"]["splits"]["drafted"]["verify_ms"] > 0
    assert "warming up" in captured.err
    assert "[4/4]" in captured.err
    assert json.loads((tmp_path / "results.json").read_text()) == document
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.html", "report.md"}


def test_the_verdict_comes_first_and_tables_in_a_pipe_are_aligned_text(
    capsys: pytest.CaptureFixture[str], faked: Callable[[dict[str, Fake]], None]
) -> None:
    both = fakes(lambda prompt, name: [*range(7)])
    faked(both)
    assert main(["bench", "--pair", "demo", "--category", "chat", "--max-tokens", "7"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith("On this machine demo answers ")
    assert "All 4 answers are identical to plain decoding's." in lines
    table = lines[lines.index("") + 1 :]
    assert table[0].split()[0] == "prompt"
    assert [line.split()[0] for line in table[1:5]] == ["chat-1", "chat-2", "chat-3", "chat-4"]
    assert all(line.endswith("yes") for line in table[1:5])
    assert "8 runs, about " in captured.err
    assert "so far " in captured.err
    assert "left" in captured.err


@pytest.mark.parametrize(("kind", "tokens"), [("cpu", 16), ("metal", 40), ("cuda", 40)])
def test_a_gpu_is_warmed_up_with_a_whole_answer(
    kind: Any, tokens: int, faked: Callable[[dict[str, Fake]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles for rounds of each size, which a few tokens do not meet."""
    machine = replace(runtime.backend(), kind=kind)
    monkeypatch.setattr(runtime, "backend", lambda: machine)
    wanted: list[int] = []
    both = fakes(lambda prompt, name: [*range(4)])
    for contestant in both.values():
        answer = contestant.answer
        monkeypatch.setattr(
            contestant, "answer", lambda prompt, params, a=answer: wanted.append(params.max_tokens) or a(prompt, params)
        )
    faked(both)
    assert main(["bench", "--pair", "demo", "--category", "chat", "--limit", "1", "--max-tokens", "40"]) == 0
    assert wanted == [4, tokens] * 2 + [40, 40]


def test_ctrl_c_keeps_what_is_finished(
    capsys: pytest.CaptureFixture[str], faked: Callable[[dict[str, Fake]], None], tmp_path: Path
) -> None:
    def tokens(prompt: str, name: str) -> list[int]:
        if "cat" in prompt:
            raise KeyboardInterrupt
        return [1, 2, 3]

    faked(fakes(tokens))
    assert main(["bench", "--pair", "demo", "--out", str(tmp_path)]) == 130
    captured = capsys.readouterr()
    assert "stopped after 2 of 24 runs" in captured.err
    assert captured.out.startswith("On this machine demo answers ")
    assert "; only one prompt was measured." in captured.out
    assert "The answer is identical to plain decoding's." in captured.out
    kept = json.loads((tmp_path / "results.json").read_text())
    assert (kept["finished"], [len(p["runs"]) for p in kept["prompts"]][:2]) == (False, [2, 0])
    assert "Stopped early" in (tmp_path / "report.html").read_text()


def test_ctrl_c_before_the_first_answer_leaves_an_earlier_report_as_it_is(
    capsys: pytest.CaptureFixture[str], faked: Callable[[dict[str, Fake]], None], tmp_path: Path
) -> None:
    def tokens(prompt: str, name: str) -> list[int]:
        raise KeyboardInterrupt

    results = ratios([1.5] * 6)
    write(results, analyse(results), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    faked(fakes(tokens))
    assert main(["bench", "--pair", "demo", "--out", str(tmp_path)]) == 130
    captured = capsys.readouterr()
    assert "stopped after 0 of 24 runs; nothing is written." in captured.err
    assert captured.out == "Nothing was finished.\n"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("error", "told"),
    [(DFlashError("the server stopped"), "the server stopped"), (RuntimeError("no such GPU"), "no such GPU - this is")],
)
def test_an_error_in_the_middle_keeps_what_is_finished(
    capsys: pytest.CaptureFixture[str],
    faked: Callable[[dict[str, Fake]], None],
    tmp_path: Path,
    error: Exception,
    told: str,
) -> None:
    def tokens(prompt: str, name: str) -> list[int]:
        if "cat" in prompt:
            raise error
        return [1, 2, 3]

    faked(fakes(tokens))
    assert main(["bench", "--pair", "demo", "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("On this machine demo answers ")
    assert told in captured.err.splitlines()[-1]
    kept = json.loads((tmp_path / "results.json").read_text())
    assert (kept["finished"], [len(p["runs"]) for p in kept["prompts"]][:2]) == (False, [2, 0])


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def loads(self: ModelChoice) -> ModelPair:
        raise AssertionError("nothing should be loaded")

    monkeypatch.setattr(options.ModelChoice, "open", loads)
    file = tmp_path / "file"
    file.write_text("mine")
    assert main(["bench", "--pair", "demo", "--out", str(file / "report")]) == 2
    assert f"cannot write to {file / 'report'}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--category", "poetry"], "no prompt has the category 'poetry'; there are: chat, code, math"),
        (["--prompts", "/nowhere/at/all.jsonl"], "cannot read the prompts in /nowhere/at/all.jsonl"),
        (["--repeat", "0"], "--repeat"),
        (["--turns", "0"], "--turns"),
        (["--max-tokens", "-3"], "--max-tokens is -3"),
        (["--suite", "gsm9k"], "Did you mean gsm8k?"),
        (["--suite-file", "x"], "--suite-file needs --suite NAME"),
        (["--suite", "mbpp", "--prompts", "x"], "give one of them"),
        (["--concurrency", "1,0"], "--concurrency is 0"),
        (["--sweep", "wdith=1"], "--sweep wdith=1: expected NAME=VALUE"),
        (["--sweep", "temperature=hot"], "--temperature is hot"),
        (["--sweep", "width=3", "--no-draft"], "--no-draft leaves out"),
        (["--also", "widht=3"], "Did you mean width?"),
        (["--also", "dtype=int8"], "dtype should be one of"),
        (["--also", "width=3", "--also", "width=3"], "two contestants are called 'width=3'"),
        (["--against-model", "x"], "give its address with --against URL"),
        (
            ["--against", "a", "--against", "b", "--against", "c", "--against-model", "x", "--against-model", "y"],
            "--against-model is given 2 times for 3 servers",
        ),
        (["--tree"], "--tree needs --width N"),
        (["compare", "/nowhere/a", "/nowhere/b"], "/nowhere/a: No such file or directory. Give the folder"),
    ],
)
def test_misuse_is_told_before_any_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_model(self: options.ModelChoice) -> ModelPair:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(options.ModelChoice, "open", no_model)
    pair = [] if arguments[0] == "compare" else ["--pair", "demo"]
    assert main(["bench", *pair, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_compare_reads_files_and_folders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 1.5)):
        results = ratios([factor * x for x in (1.2, 1.4, 1.5, 1.6, 1.8, 2.0)])
        write(results, analyse(results), tmp_path / name)
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b" / "results.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("B answers 1.5 times as fast as A: more than noise.\n")
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "a"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"].startswith("No change beyond noise")
    assert document["changes"][0]["real"] is False


def test_sweeps_make_contestants_and_settings() -> None:
    drafting, answers = parse_sweeps(["width=1,7", "tree=15", "context=512,4096", "temperature=0,0.7"])
    found = variants(ModelChoice(pair="demo"), width=None, tree=False, also=["dtype=bfloat16"], sweep=drafting)
    assert [(v.name, v.width, v.tree) for v in found] == [
        ("plain", None, False),
        ("width 1", 1, False),
        ("width 7", 7, False),
        ("tree 15", 15, True),
        ("dtype=bfloat16", None, False),
    ]
    # Another precision rounds differently, and other programs draw other random numbers.
    assert comparable(found, ["server"], 0.0) == ["width 1", "width 7", "tree 15", "server"]
    assert comparable(found, ["server"], 0.7) == ["width 1", "width 7", "tree 15"]
    settings = settings_of(SamplingParams(max_tokens=9), answers)
    assert [s.name for s in settings] == [f"context={c} temperature={t}" for c in (512, 4096) for t in (0, 0.7)]
    assert [(s.context, s.params.temperature, s.params.seed) for s in settings][1:3] == [
        (512, 0.7, 0),
        (4096, 0.0, None),
    ]
    assert settings_of(SamplingParams(), {})[0].name == ""


def test_a_model_is_named_for_all_servers_or_for_each() -> None:
    assert servers_of(["a", "b"], []) == [("a", None), ("b", None)]
    assert servers_of(["a", "b"], ["x"]) == [("a", "x"), ("b", "x")]
    assert servers_of(["a", "b"], ["x", "y"]) == [("a", "x"), ("b", "y")]
    assert servers_of([], []) == []


def test_more_contestants_in_words() -> None:
    choice = ModelChoice(model="./target", draft_model="./one")
    also = ["draft-model=./two,width=3", "plain,dtype=float16", "tree=9,block-size=8", "steps=2"]
    *_, two, plain, tree, in_steps = variants(choice, width=None, tree=False, also=also, sweep=[])
    assert (two.choice.draft_model, two.width, two.draft) == ("./two", 3, True)
    assert (plain.choice.dtype, plain.draft) == (DType.float16, False)
    assert (tree.width, tree.tree, tree.choice.block_size) == (9, True, 8)
    assert (in_steps.choice.steps, choice.steps) == (2, 1)
    with pytest.raises(UsageError, match="block-size"):
        variants(choice, width=None, tree=False, also=["block-size=0"], sweep=[])


def test_a_time_in_words() -> None:
    words: list[Any] = [about(seconds) for seconds in (None, 2, 44, 61, 150, 6000)]
    assert words == ["some time", "about 5 seconds", "about 45 seconds", "about 1 minute", "about 2 minutes",
                     "about 1.7 hours"]  # fmt: skip
