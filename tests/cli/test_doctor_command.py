"""`dflash-mlx doctor`: it reports what it finds, and what is broken makes the exit code 1."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest

from dflash_mlx import runtime
from dflash_mlx.cli import doctor


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
