"""`dflash-mlx parity`: its lines, its JSON and its exit code."""

import json

import pytest

from dflash_mlx import parity
from dflash_mlx.errors import PairError
from dflash_mlx.parity import GreedyResult, SampledResult

SAME = GreedyResult("chat-1", 64, None, None, None, None, 0.01)
APART = GreedyResult("code-1", 64, 12, 5, 6, 3.5, 0.01)
SAMPLES = SampledResult("with seeds", 10, 0.02, 0.03, 4.0, 5, 0.5)


@pytest.fixture
def found(monkeypatch, fake):
    fake.dtype = "mlx.core.float32"
    results = [SAME]
    monkeypatch.setattr(parity, "check_greedy", lambda pair, prompts, **options: results)
    monkeypatch.setattr(parity, "check_sampled", lambda pair, prompt, **options: SAMPLES)
    return results


def test_a_lossless_pair(run, found):
    code, out, _ = run("parity", "--pair", "demo")
    assert code == 0
    assert out.splitlines()[-1].startswith("lossless here: all 1 greedy answers are identical, and samples")
    report = json.loads(run("parity", "--pair", "demo", "--samples", "0", "--json")[1])
    assert (report["lossless"], report["identical"], report["sampled"]) == (True, 1, [])


def test_a_pair_that_is_not(run, found):
    found.append(APART)
    code, out, _ = run("parity", "--pair", "demo")
    assert code == 1
    assert "parts at token 12" in out
    assert out.splitlines()[-1].startswith("NOT lossless here: code-1")


def test_misuse(run):
    code, _, err = run("parity")
    assert code == 2
    assert "say what to load" in err


def test_no_option_is_advised_that_there_is_not(run, fake, monkeypatch):
    def refuse(*arguments, **options):
        raise PairError("they do not fit. Give one with --draft-model, or run plainly with --no-draft.")

    monkeypatch.setattr("dflash_mlx.load_pair", refuse)
    assert run("parity", "--pair", "demo")[2].strip().endswith("Give one with --draft-model.")
    assert "--no-draft" in run("generate", "hi", "--pair", "demo")[2]
