"""DFlashModel: a model that mlx-lm has loaded answers with drafts, and stays as it is."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from tiny import plain_tokens
from tiny_folder import write_drafter, write_target

from dflash_mlx import DFlashConfig, DFlashModel, SamplingParams
from dflash_mlx.errors import UsageError
from dflash_mlx.policy.trees_or_chains import PairCosts
from dflash_mlx.policy.width import RoundCosts
from dflash_mlx.targets.target import wrap_model

PROMPT, PARAMS = [5, 9, 2, 30], SamplingParams(max_tokens=20)


@pytest.fixture(autouse=True)
def known_costs(monkeypatch):
    """Rounds cost next to nothing, so that all places are drafted."""
    chains = RoundCosts({0: 1.0, 1: 1.0, 15: 1.01}, {1: 0.001, 15: 0.001}, steep=False)
    monkeypatch.setattr("dflash_mlx.pair.load_or_measure", lambda *_, **options: PairCosts(chains))


@pytest.fixture
def folders(tmp_path):
    return str(write_target(tmp_path / "target")), str(write_drafter(tmp_path / "drafter"))


def test_answers_are_the_models_own_whatever_the_config(folders):
    loaded, tokenizer = load(folders[0])
    before = [(name, type(module)) for name, module in loaded.named_modules()]
    model = DFlashModel(loaded, tokenizer, draft_model=folders[1], kernels=False)
    assert (model.pair.method, model.pair.target.model) == ("dflash+ngram", loaded)
    truth = plain_tokens(wrap_model(loaded, model.pair.target.config), PROMPT, 20, model.pair.eos_ids)
    for config, mode in (
        (None, "dflash+ngram"),
        (DFlashConfig(block_size=3), "dflash+ngram"),
        (DFlashConfig(diffusion_steps=2, noise_schedule="linear"), "dflash(2 linear steps)+ngram"),
    ):
        answer = model.generate(PROMPT, config, PARAMS)
        assert (answer.token_ids, answer.mode) == (truth, mode)
        pieces = list(model.stream_generate(PROMPT, config, PARAMS))
        assert [token for piece in pieces for token in piece.token_ids] == truth
        assert all(piece.depth in (None, *range(3 if config and config.block_size else 99)) for piece in pieces)
    assert [(name, type(module)) for name, module in loaded.named_modules()] == before


def test_what_is_measured_for_a_config_is_kept(folders):
    model = DFlashModel(*load(folders[0]), draft_model=folders[1])
    measured = []
    config = DFlashConfig(diffusion_steps=3)
    for _ in range(2):
        measured.append(model._pair_for(config).round_costs())
    assert measured[0] is measured[1]
    assert measured[0] is not model.pair.round_costs()


def test_without_a_drafter_the_text_is_drafted_from(folders):
    model = DFlashModel(*load(folders[0]))
    assert model.pair.method == "ngram"
    assert model.generate(PROMPT, params=PARAMS).token_ids == plain_tokens(
        model.pair.target, PROMPT, 20, model.pair.eos_ids
    )
    with pytest.raises(UsageError, match="this pair has ngram"):
        model.generate(PROMPT, DFlashConfig(diffusion_steps=2))


def test_what_cannot_be_used_is_refused(folders):
    model, tokenizer = load(folders[0])
    with pytest.raises(UsageError, match="drafts without a drafter"):
        DFlashModel(model, tokenizer, draft_model=folders[1], method="ngram")
    tokenizer._tokenizer.name_or_path = "somewhere/else"
    with pytest.raises(UsageError, match=r"found 'somewhere/else'\. Pass the two that mlx_lm.load returns"):
        DFlashModel(model, tokenizer)


def test_a_model_of_another_precision_is_drafted_for_in_its_own(folders):
    loaded, tokenizer = load(folders[0])
    loaded.set_dtype(mx.bfloat16)
    model = DFlashModel(loaded, tokenizer, draft_model=folders[1])
    assert model.pair.dtype == mx.bfloat16
    assert {array.dtype for _, array in tree_flatten(model.pair.drafter.networks[0].parameters())} == {mx.bfloat16}
    assert len(model.generate(PROMPT, params=PARAMS).token_ids) > 1
