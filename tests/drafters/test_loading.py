"""From a method and a folder to a drafter: pairs of every kind, loaded as users load them, and what does not fit."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
import test_eagle3
import test_medusa
import test_mtp
from mlx.utils import tree_flatten
from test_dialects import SPECULATORS, ZLAB
from test_generation import make_pair
from tiny import plain_tokens, tiny_target
from tiny_families import family_target, unavailable

from dflash_mlx import loading
from dflash_mlx.drafters.loading import check
from dflash_mlx.drafters.methods import Method
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.generation import generate
from dflash_mlx.loading import load_pair
from dflash_mlx.sampling import SamplingParams

NONE = Path("none")


@pytest.fixture(autouse=True)
def letters(monkeypatch):
    monkeypatch.setattr(loading, "_load_tokenizer", lambda folder: make_pair().tokenizer)


def write_target(folder, target):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(target.config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(target.model.parameters())))
    return str(folder)


def config_of(folder, raw):
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def is_plain(pair, target, width):
    """Whether a pair's answer is the target's own."""
    prompt, params = [3, 1, 4, 1, 5], SamplingParams(max_tokens=15)
    return generate(pair, prompt, params, width=width).token_ids == plain_tokens(target, prompt, 15, pair.eos_ids)


def test_a_draft_model(tmp_path):
    target = tiny_target("llama")
    folders = write_target(tmp_path / "target", target), write_target(tmp_path / "draft", tiny_target("qwen3", seed=1))
    pair = load_pair(model=folders[0], draft_model=folders[1], dtype="float32")
    assert (pair.method, pair.block_size) == ("draft_model", 5)
    assert is_plain(pair, target, 4)
    assert load_pair(model=folders[0], draft_model=folders[1], block_size=9, check=False).drafter.places == 8
    both = load_pair(
        model=folders[0], draft_model=folders[1], method="draft_model+ngram", block_size=4, dtype="float32"
    )
    assert (both.method, both.block_size) == ("draft_model+ngram", 4)
    assert is_plain(both, target, 3)


def test_an_eagle3_drafter(tmp_path):
    target = tiny_target("llama")
    folder = write_target(tmp_path / "target", target)
    (tmp_path / "drafter").mkdir()
    test_eagle3.write(tmp_path / "drafter", "authors")
    pair = load_pair(model=folder, draft_model=str(tmp_path / "drafter"), dtype="float32")
    assert (pair.method, pair.block_size) == ("eagle3", 8)
    assert is_plain(pair, target, 7)


def test_medusa_heads(tmp_path):
    target = tiny_target("llama")
    folder = write_target(tmp_path / "target", target)
    (tmp_path / "heads").mkdir()
    heads = str(test_medusa.write(tmp_path / "heads", test_medusa.heads_of()))
    pair = load_pair(model=folder, draft_model=heads, dtype="float32")
    assert (pair.method, pair.block_size) == ("medusa", 1 + test_medusa.HEADS)
    assert is_plain(pair, target, test_medusa.HEADS)
    with pytest.raises(UsageError, match="block size should be from 2 to 6"):
        load_pair(model=folder, draft_model=heads, block_size=8)


def test_the_targets_own_head(tmp_path):
    if reason := unavailable("qwen3_5"):
        pytest.skip(reason)
    target = family_target("qwen3_5")
    folder = write_target(tmp_path / "target", target)
    (tmp_path / "head").mkdir()
    test_mtp.write(tmp_path / "head", test_mtp.head_of(target))
    pair = load_pair(model=folder, draft_model=str(tmp_path / "head"), method="mtp", dtype="float32")
    assert (pair.method, pair.block_size) == ("mtp", 4)
    assert is_plain(pair, target, 3)
    with pytest.raises(CheckpointError, match="have no tensors of such a head"):
        load_pair(model=folder, method="mtp")
    (tmp_path / "head" / "model.safetensors").rename(tmp_path / "target" / "mtp.safetensors")
    assert load_pair(model=folder, method="mtp", dtype="float32", block_size=3).drafter.places == 2
    # Without a drafter by name it is the head that is taken.
    assert load_pair(model=folder, dtype="float32").method == "mtp"


@pytest.mark.parametrize(
    ("raw", "method"),
    [
        (ZLAB, Method.dflash),
        (SPECULATORS, Method.dflash),
        (test_eagle3.AUTHORS, Method.eagle3),
        (test_eagle3.SPECULATORS, Method.eagle3),
        (test_medusa.CONFIG, Method.medusa),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, Method.draft_model),
    ],
)
def test_a_folder_says_how_to_draft_with_it(raw, method, tmp_path):
    folder = config_of(tmp_path, raw)
    taken = Method.dflash_ngram if method is Method.dflash else method
    assert check(folder, Method.auto, target_folder=NONE, block_size=None) is taken
    assert check(folder, method, target_folder=NONE, block_size=3) is method
    assert check(folder, Method.mtp, target_folder=NONE, block_size=3) is Method.mtp
    both = Method(f"{method.value}+ngram")
    assert (both.alone, both.has_drafter) == (method, True)
    assert check(folder, both, target_folder=NONE, block_size=3) is both
    other = Method.dflash if method is not Method.dflash else Method.eagle3
    with pytest.raises(UsageError, match=f"--method {other.value} was asked for, and .* is one for {method.value}"):
        check(folder, other, target_folder=NONE, block_size=None)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"model_type": "hydra"},
            r"Hydra heads \(hydra\); this version drafts with .* or run with --no-draft",
        ),
        ({"speculators_model_type": "peagle"}, "a P-EAGLE drafter"),
        ({"architectures": 5}, "a value of another kind than expected"),
        ({**test_eagle3.AUTHORS, "hidden_size": None}, "has no 'hidden_size'"),
        ({**ZLAB, "hidden_size": None}, "has no 'hidden_size'"),
    ],
)
def test_what_cannot_be_used_is_refused_before_the_target_is_loaded(raw, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        check(config_of(tmp_path, raw), Method.auto, target_folder=NONE, block_size=None)


@pytest.mark.parametrize(
    ("raw", "method", "block_size"),
    [
        (test_eagle3.AUTHORS, Method.auto, 17),
        ({"model_type": "llama"}, Method.auto, 1),
        ({}, Method.mtp, 17),
    ],
)
def test_block_sizes(raw, method, block_size, tmp_path):
    folder = config_of(tmp_path, raw)
    with pytest.raises(UsageError, match=f"block size should be from 2 to 16 for .*; got {block_size}"):
        check(folder, method, target_folder=NONE, block_size=block_size)
    assert check(folder, method, target_folder=NONE, block_size=16)
