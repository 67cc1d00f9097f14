"""A drafter's forward equals that of the official implementations (`dflash` 0.1.0, PyTorch and MLX), for each option.

Their results are in golden.npz (see make_golden.py); where the official package is installed they are computed afresh.
"""

import importlib.util

import mlx.core as mx
import numpy as np
import pytest
from cases import BLOCK, CASES, NOT_IN_MLX, ROUNDS, VOCAB, is_second, make_inputs, write_folder
from make_golden import GOLDEN, TEMPERATURE, run_mlx
from tiny import context_rows

from dflash_mlx.decoding.accept import DraftVocabulary, Greedy, Rejection
from dflash_mlx.drafters.checkpoint import load_drafter
from dflash_mlx.drafters.dflash2 import DFlash2Drafter
from dflash_mlx.drafters.path import propose_path
from dflash_mlx.sampling import SamplingParams

OFFICIAL = dict(np.load(GOLDEN))
ROUNDING = 1e-4  # the largest difference found is 2.4e-5, with logits of the order of 1


@pytest.fixture(scope="module")
def inputs():
    return make_inputs()


def run(drafter, inputs):
    """Each round's hidden states (W, D) and logits (W, V) of the drafts, and its anchor."""
    embedding, head = mx.array(inputs.embedding), mx.array(inputs.head)
    cache = drafter.make_cache()
    for features, (_, anchor) in zip(inputs.features, ROUNDS, strict=True):
        drafter.extend_context(mx.array(features), cache)
        block = mx.array([[anchor] + [drafter.config.mask_token_id] * (BLOCK - 1)])
        embedded = drafter.embed_block(block, lambda tokens: embedding[tokens])
        hidden = drafter(embedded, context_rows(drafter, cache, BLOCK))[0, 1:]
        yield hidden, drafter.adjust_logits(hidden @ head.T), mx.array([anchor])


def check_close(found, expected):
    np.testing.assert_allclose(np.array(found), expected, rtol=ROUNDING, atol=ROUNDING)


def check(drafter, inputs, expected):
    assert [drafter.config.block_size, *drafter.config.target_layer_ids] == expected["read"].tolist()
    for i, (hidden, logits, anchor) in enumerate(run(drafter, inputs)):
        check_close(logits, expected[f"{i}"])
        assert mx.std(logits).item() > 0.2, "logits that hardly differ compare nothing"
        if isinstance(drafter, DFlash2Drafter):
            round_ = {name: expected[f"{i}/{name}"] for name in ("path", "drawn", "probs")}
            check_path(drafter.candidate_selector, hidden, logits, anchor, round_)


def check_path(selector, hidden, logits, anchor, expected):
    run = {"hidden": hidden, "logits": logits, "anchor": anchor, "position": 0}
    run["vocabulary"] = DraftVocabulary(mx.arange(VOCAB), VOCAB)
    assert propose_path(selector, Greedy(), **run).tokens.tolist() == expected["path"].tolist()
    drawn = expected["drawn"].tolist()
    proposal = propose_path(selector, Replay(drawn), **run)
    assert proposal.tokens.tolist() == drawn
    check_close(proposal.probs, expected["probs"])


class Replay(Rejection):
    """Sampling whose draws are given: the distributions then are those of the run that made them."""

    def __init__(self, drawn):
        super().__init__(SamplingParams(temperature=TEMPERATURE), seed=0)
        self.drawn = iter(drawn)

    def propose(self, logits, position, vocabulary=None):
        proposal = super().propose(logits, position, vocabulary)
        proposal.tokens = mx.array([next(self.drawn)])
        return proposal


def golden(name, which):
    prefix = f"{name}/{which}/"
    found = {key.removeprefix(prefix): values for key, values in OFFICIAL.items() if key.startswith(prefix)}
    assert len(found) == 1 + len(ROUNDS) * (4 if is_second(CASES[name]) else 1)
    return found


@pytest.mark.parametrize("name", CASES)
def test_equals_the_official_pytorch_drafter(name, inputs, tmp_path):
    check(load_drafter(write_folder(tmp_path, CASES[name]), dtype=mx.float32), inputs, golden(name, "torch"))


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_IN_MLX])
def test_equals_the_official_mlx_drafter(name, inputs, tmp_path):
    check(load_drafter(write_folder(tmp_path, CASES[name]), dtype=mx.float32), inputs, golden(name, "mlx"))


@pytest.mark.skipif(importlib.util.find_spec("dflash") is None, reason="the official package, dflash, is not installed")
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_IN_MLX])
def test_equals_the_installed_official_mlx_drafter(name, inputs, tmp_path):
    folder = write_folder(tmp_path, CASES[name])
    check(load_drafter(folder, dtype=mx.float32), inputs, run_mlx(folder, CASES[name], inputs))


def test_each_option_changes_the_result():
    """Otherwise an option that is ignored would pass."""
    plain = golden("full", "torch")["1"]
    same = {"full", "newer fields", "both block sizes", "neither block size nor layers"}
    for name in set(CASES) - same:
        assert np.abs(golden(name, "torch")["1"] - plain).max() > 100 * ROUNDING, name
