"""`dflash-mlx doctor`: it reports what it finds, and what is broken makes the exit code 1."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest

from dflash_mlx import runtime
from dflash_mlx.cli import doctor, launch
from dflash_mlx.kernels.quantized_rows import layers
from dflash_mlx.kernels.race import Verdict
from dflash_mlx.kernels.rows_attention import layers as rows_attention
from dflash_mlx.policy.trees_or_chains import PairCosts
from dflash_mlx.policy.width import RoundCosts


def test_a_healthy_machine(run, home):
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    for word in ("backend:", "chip:", "memory:", "mlx:", "speed:", str(home)):
        assert word in out
    assert "broken" not in out
    assert not home.exists()  # looking changes nothing


def test_json(run):
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert (code, found["problems"]) == (0, [])
    assert found["mlx_version"].startswith("0.")
    assert found["matmul_gflops"] > 0
    assert found["demo_pair_on_disk"] is False
    assert found["terminal"]["stdout"] is False


def test_a_cache_folder_that_is_a_file_is_broken(run, home):
    home.write_text("not a folder")
    code, out, _ = run("doctor")
    assert code == 1
    assert "broken: cache folder" in out
    assert "DFLASH_MLX_HOME" in out
    assert json.loads(run("doctor", "--json")[1])["problems"] != []


def test_wrong_products_are_broken(run, monkeypatch):
    monkeypatch.setattr(mx, "ones", lambda shape, dtype: mx.full(shape, 2, dtype=dtype))
    code, out, _ = run("doctor")
    assert code == 1
    assert "broken: computing: a matrix product came out wrong" in out


def test_a_missing_library_is_broken_and_the_rest_is_still_told(run, monkeypatch):
    def missing() -> dict:
        raise ImportError("No module named 'mlx'")

    monkeypatch.setitem(doctor._NAMES, missing, "MLX")
    monkeypatch.setattr(doctor, "_backend", missing)
    code, out, _ = run("doctor")
    assert code == 1
    assert "broken: MLX: No module named 'mlx'" in out
    assert "models in:" in out


@pytest.mark.parametrize("advice", [(), ("install OpenBLAS",)])
def test_advice_is_not_a_problem(run, monkeypatch, advice):
    monkeypatch.setattr(doctor, "_backend", lambda: {"advice": advice})
    monkeypatch.setitem(doctor._NAMES, doctor._backend, "MLX")
    code, out, _ = run("doctor")
    assert code == 0
    assert ("faster: install OpenBLAS" in out) == bool(advice)
    assert ("Everything is in order." in out) == (not advice)


@pytest.mark.parametrize(("tf32", "said"), [("0", "full precision"), ("1", "answers may differ")])
def test_on_a_gpu_it_says_how_mlx_is_set_up(run, monkeypatch, tf32, said):
    gpu = replace(runtime.backend(), kind="cuda")
    monkeypatch.setattr(runtime, "backend", lambda: gpu)
    monkeypatch.setenv("MLX_ENABLE_TF32", tf32)
    code, out, _ = run("doctor")
    assert code == 0
    assert said in out
    assert f"MLX_ENABLE_TF32={tf32}" in out


def test_kernels_on_a_cpu(run):
    """There are none; the rest of the report stays."""
    code, out, _ = run("doctor", "--kernels")
    assert code == 0
    assert "kernels:       none for a CPU" in out
    assert json.loads(run("doctor", "--kernels", "--json")[1])["kernels"] == []


def test_kernels_are_a_table_for_an_issue(run, monkeypatch):
    machine = replace(runtime.backend(), kind="metal")
    verdict = Verdict({2: (0.002, 0.004), 4: (0.003, 0.002), 6: (0.003, 0.0015)}, "8 rows differ")
    monkeypatch.setattr(runtime, "backend", lambda: machine)
    monkeypatch.setattr(layers, "race_matrix", lambda matrix, weights: verdict)
    monkeypatch.setattr(layers, "_TYPICAL", ((24, 64),))
    monkeypatch.setattr(rows_attention, "race_rival", lambda attention, heads, length, lanes: verdict)
    monkeypatch.setattr(rows_attention, "_TYPICAL", ((4, 2, 64),))
    _, out, _ = run("doctor", "--kernels")
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert lines[0] == "| race | 2 | 4 | 6 | 8 | 12 | 16 | 24 | 32 |"
    assert lines[2] == "| 24x64 4-bit, groups of 64, bfloat16 | 0.50 | 1.50* | 2.00* | - | - | - | - | - |"
    assert lines[6].startswith(
        "| attention, 4 heads on 2 of size 64, bfloat16, over 256 positions in calls of a few rows |"
    )
    assert len(lines) == 2 + 4 + 2 * len(rows_attention.LENGTHS)
    assert "24x64 8-bit, groups of 64, float16: 8 rows differ" in out
    found = json.loads(run("doctor", "--kernels", "--json")[1])["kernels"]
    assert found[0]["milliseconds"] == {"2": 4.0, "4": 2.0, "6": 1.5}
    assert found[0]["used_for"] == [4, 6]


def test_several_machines_are_examined_through_the_launcher(run, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "run_launcher", started.append)
    assert run("doctor", "--hosts", "10.0.0.1,10.0.0.2", "--pair", "demo", "--json")[0] == 0
    [words] = started
    assert words[1:3] == ["--hosts", "10.0.0.1,10.0.0.2"]
    assert words[-4:] == ["doctor", "--pair", "demo", "--json"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--kernels", "-n", "2"], "--kernels is about one machine"),
        (["--draft-model", "x", "-n", "2"], "--draft-model is about one machine"),
    ],
)
def test_what_does_not_go_together(given, said, run):
    code, _, err = run("doctor", *given)
    assert code == 2
    assert said in err


STEEP = RoundCosts(
    {0: 0.05, 1: 0.06, 7: 0.08},
    {1: 0.01, 7: 0.01},
    steep=True,
    deeper={512: {0: 0.06, 1: 0.075, 7: 0.12}, 2048: {0: 0.07, 1: 0.09, 7: 0.2}},
)
FLAT = RoundCosts({0: 0.005, 1: 0.008, 7: 0.009}, {1: 0.001, 7: 0.001}, steep=False)


@pytest.mark.parametrize("model", [["--pair", "demo"], ["--model", "a", "--draft-model", "b"]])
def test_rounds_of_a_pair(model, run, fake, monkeypatch):
    monkeypatch.setattr(fake, "method", "dflash", raising=False)
    monkeypatch.setattr(fake, "round_costs", lambda report: PairCosts(STEEP, spread=0.03), raising=False)
    code, out, _ = run("doctor", *model)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "no drafts 50.0 ms - 60.0 ms 70.0 ms" in lines
    assert "chain of 7 80.0 ms 1.60 tokens 120.0 ms 200.0 ms" in lines
    assert "two least times differ by 3% (median)." in " ".join(lines)
    # 1.8 tokens of a chain of one, in 1.2 times the time; seven places gain 4.16 tokens in 1.6 times the time.
    assert "80% chain of 7 4.16 2.60" in lines
    drafting = json.loads(run("doctor", *model, "--json")[1])["drafting"]
    assert drafting["waits_for_drafts"] is True
    assert drafting["rounds"][2]["pays_from"] == 1.6
    assert drafting["context"] == [64, 512, 2048]
    assert drafting["rounds"][2]["milliseconds_after"] == [120.0, 200.0]
    assert drafting["choices"][3]["speedup"] == pytest.approx(2.6, abs=0.01)


def test_rounds_of_chains_and_of_trees(run, fake, monkeypatch):
    monkeypatch.setattr(fake, "method", "dflash", raising=False)
    trees = RoundCosts({0: 0.005, 7: 0.0092, 15: 0.0095}, FLAT.draft_seconds, steep=False, places=7)
    monkeypatch.setattr(fake, "round_costs", lambda report: PairCosts(FLAT, trees), raising=False)
    lines = [" ".join(line.split()) for line in run("doctor", "--pair", "demo")[1].splitlines()]
    assert "chain of 7 9.0 ms 1.80 tokens - -" in lines
    assert "tree of 15 9.5 ms 1.90 tokens - -" in lines
    assert sum(line.startswith("no drafts") for line in lines) == 1
    assert any(line.startswith("60% tree of 15") for line in lines)
