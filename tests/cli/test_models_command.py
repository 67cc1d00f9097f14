"""`dflash-mlx models`: the table, one pair, JSON."""

import json
import re
from dataclasses import replace

import pytest
from test_own_head import folder_of

from dflash_mlx.cli.models import describe
from dflash_mlx.cli.models_table import table_lines
from dflash_mlx.hub.registry import ModelSource, PairSpec, find_pair, list_pairs


def test_the_table_names_every_pair(run):
    code, out, err = run("models", "--all")
    assert (code, err) == (0, "")
    for pair in list_pairs():
        assert re.search(rf"^{re.escape(pair.name)} ", out, re.MULTILINE)
    assert "\x1b" not in out
    assert "/" not in out  # ids are for wide terminals
    assert max(map(len, out.splitlines())) < 60


def test_without_a_filter_only_what_fits_is_shown_and_the_demo_is_first(run):
    fitting = {pair["name"] for pair in json.loads(run("models", "list", "--fits", "--json")[1])}
    code, out, err = run("models")
    _, first, *_ = lines = out.splitlines()
    assert code == 0
    assert first.startswith("smollm2-135m (demo) ")
    assert {line.split()[0] for line in lines[1:]} == fitting
    assert f"{len(list_pairs()) - len(fitting)} more pairs" in err
    assert "models list --all" in err


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_no_name_breaks_at_any_width(columns):
    pairs = [describe(spec) for spec in list_pairs()]
    lines = table_lines(pairs, columns=columns, show_fits=True)
    assert len(lines) == len(pairs) + 1
    assert all(len(line) <= columns for line in lines)
    assert all(line.startswith(pair["name"]) for line, pair in zip(lines[1:], pairs, strict=True))
    assert (columns == 200) == all(pair["drafter"] in line for line, pair in zip(lines[1:], pairs, strict=True))


def test_json_says_what_the_registry_says(run):
    code, out, _ = run("models", "--json")
    found = {pair["name"]: pair for pair in json.loads(out)}
    assert code == 0
    assert found.keys() == {pair.name for pair in list_pairs()}
    demo = found["smollm2-135m"]
    assert demo["aliases"] == ["demo"]
    assert demo["downloaded"] is False  # the cache folder of a test is empty
    assert demo["fits_memory"] is True


def test_show_by_alias(run):
    code, out, err = run("models", "show", "demo")
    assert (code, err) == (0, "")
    assert out.startswith("name:")
    assert "smollm2-135m" in out
    assert json.loads(run("models", "show", "DEMO", "--json")[1])["name"] == "smollm2-135m"


def test_a_filter_and_flags_narrow_the_list(run):
    names = [pair["name"] for pair in json.loads(run("models", "QWEN3.5", "--json")[1])]
    assert names
    assert all(name.startswith("qwen3.5-") for name in names)
    assert [p["name"] for p in json.loads(run("models", "list", "demo", "--fits", "--json")[1])] == ["smollm2-135m"]
    assert json.loads(run("models", "demo", "--downloaded", "--json")[1]) == []
    code, out, err = run("models", "no-such-thing")
    assert (code, err) == (0, "")
    assert "models list --all" in out


def test_show_by_a_target(run):
    out = run("models", "show", "mlx-community/Qwen3-8B-6bit", "--json")[1]
    pair = json.loads(out)
    assert (pair["name"], pair["drafter"]) == ("qwen3-8b", "z-lab/Qwen3-8B-DFlash-b16")
    assert pair["memory"]["estimated"] is True
    text = run("models", "show", "minimax-m2.7")[1]
    assert "gated" in text
    assert "no: it is listed" in text


def test_unknown_sizes_are_said_to_be_unknown(run, monkeypatch):
    hub = ModelSource(kind="hub", repo="a/b")
    spec = PairSpec(name="x", title="X", target=hub, drafter=hub, block_size=16, thinking="none", verified="listed")
    monkeypatch.setattr("dflash_mlx.hub.registry.list_pairs", lambda: [spec])
    assert describe(spec)["fits_memory"] is None
    assert "unknown" in run("models", "--all")[1]


@pytest.fixture
def fake(fake):
    fake.checks, fake.load_seconds, fake.warnings = ["drafts are finite"], 1.0, []
    return fake


def test_check_runs_the_load_checks(run, fake):
    code, out, _ = run("models", "check", "demo")
    assert code == 0
    assert "ok: drafts are finite" in out
    assert json.loads(run("models", "check", "demo", "--json")[1])["ok"] is True
    assert run("models", "check", "no-such-pair")[0] == 2


def test_a_fine_tune_is_announced(run, fake):
    fake.warnings = ["me/Poet is taken for a fine-tune"]
    code, out, err = run("models", "check", "demo", "--json")
    assert (code, "fine-tune" in out) == (0, False)
    assert "me/Poet is taken for a fine-tune" in err


def test_hints_name_only_what_the_command_has(run, monkeypatch, tmp_path):
    config = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28}
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    code, _, shown = run("models", "show", str(folder))
    assert (code, "--draft-model" in shown) == (2, False)
    code, _, asked = run("generate", "hi", "--model", str(folder), "--method", "dflash")
    assert (code, "--draft-model" in asked) == (2, True)


def test_the_ways_to_draft_of_a_pair(tmp_path, run):
    def described(folder):
        target = ModelSource(kind="folder", path=str(folder))
        return describe(replace(find_pair("qwen3.5-4b"), target=target))

    own = described(folder_of(tmp_path / "whole", "qwen3_5", ["mtp.fc.weight"]))
    assert (own["methods"], own["brings_head"]) == (["dflash", "dflash+ngram", "mtp", "mtp+ngram", "ngram"], True)
    without = described(folder_of(tmp_path / "converted", "qwen3_5", ["lm_head.weight"]))
    assert (without["methods"], without["brings_head"]) == (["dflash", "dflash+ngram", "ngram"], False)
    assert re.search(r"ways to draft: +dflash, dflash\+ngram, ngram\n", run("models", "show", "demo")[1])
    unknown = run("models", "show", "qwen3.5-4b")[1]
    assert re.search(r"ways to draft: +dflash, dflash\+ngram, ngram, mtp if its files have the head\n", unknown)
