"""A small language model as drafter: loading it, what is refused, and drafts of one that knows the answer."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import LAYERS, VOCAB, plain_tokens, tiny_target
from tiny_families import family_target

from dflash_mlx.decoding.accept import Coupled, Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.draft_model import DraftModel, check_tokens, load_draft_model
from dflash_mlx.errors import CheckpointError, PairError
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def write_model(folder, target):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(target.config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(target.model.parameters())))
    return folder


def write_tokens(folder, model):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
    return folder


@pytest.mark.parametrize("strategy", [Greedy(), Coupled(SamplingParams(temperature=1.0), seed=3)])
@pytest.mark.parametrize("width", [1, 4])
def test_drafts_of_the_target_itself_are_all_kept(target, strategy, width):
    session = Session(target, DraftModel(target))
    rounds = decode(session, [3, 1, 4], strategy=strategy, policy=FixedWidth(width), max_tokens=41, eos_ids=set())
    steps = list(rounds)
    assert [step.num_accepted for step in steps] == [0, *[width] * (40 // (width + 1))]


def test_it_is_loaded_like_a_target(target, tmp_path):
    folder = write_model(tmp_path / "model", target)
    loaded = load_draft_model(folder, target, folder, dtype=mx.float32)
    assert (loaded.method, loaded.places, list(loaded.networks)) == ("draft_model", 4, [loaded.model.model])
    tokens = mx.array([[5, 9, 2]])
    expected = target.forward(tokens, target.make_cache())
    assert mx.abs(loaded.model.forward(tokens, loaded.model.make_cache()) - expected).max().item() < 1e-6
    other = write_model(tmp_path / "other", tiny_target("llama", vocab_size=VOCAB - 1))
    with pytest.raises(PairError, match="a vocabulary of 47 and one of 48, and a folder without"):
        load_draft_model(other, target, folder, dtype=mx.float32)


@pytest.mark.parametrize("size", [VOCAB - 8, VOCAB + 8])
def test_a_vocabulary_may_be_padded_in_another_way(target, size):
    """The target's answers hold tokens that the smaller model does not know, and the larger one would write others."""
    session = Session(target, DraftModel(tiny_target("llama", seed=4, vocab_size=size)))
    prompt = [VOCAB - 1, 3, VOCAB - 2]
    steps = decode(session, prompt, strategy=Greedy(), policy=FixedWidth(4), max_tokens=30, eos_ids=set())
    assert [token for step in steps for token in step.tokens] == plain_tokens(target, prompt, 30)


def test_models_without_full_attention_are_refused(target):
    for family, caches in (("gemma3", "RotatingKVCache"), ("qwen3_next", "ArraysCache")):
        with pytest.raises(CheckpointError, match=f"full attention in all layers; found .* {caches}. Choose another"):
            DraftModel(family_target(family))
    slow = tiny_target("llama", num_hidden_layers=LAYERS)
    slow._rows = False
    with pytest.raises(CheckpointError, match="several answers in one batch"):
        DraftModel(slow)


SAME = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}}


@pytest.mark.parametrize(
    ("own", "wanted", "message"),
    [
        (SAME, SAME, None),
        (SAME, {"vocab": [["a", -1.0], ["b", -2.5], ["c", -3.0]]}, None),
        (SAME, {"vocab": {"a": 0, "b": 2, "c": 1}}, "found 3 and 3 tokens, of which 1 are the same. Choose a smaller"),
        (SAME, {"vocab": {"a": 0}}, "found 3 and 1 tokens"),
        (SAME, None, "a vocabulary of 3 and one of 4, and a folder without tokenizer.json"),
    ],
)
def test_tokens_are_compared(own, wanted, message, tmp_path):
    folders = [tmp_path / "draft", tmp_path / "target"]
    for folder, model in zip(folders, (own, wanted), strict=True):
        if model is not None:
            write_tokens(folder, model)
    if message is None:
        check_tokens(folders[0], 3, folders[1], 4)
        return
    with pytest.raises(PairError, match=message):
        check_tokens(folders[0], 3, folders[1], 4)


def test_a_tokenizer_without_tokens_is_refused(tmp_path):
    folder = write_tokens(tmp_path / "draft", {"type": "BPE"})
    with pytest.raises(CheckpointError, match="should have the tokens in"):
        check_tokens(folder, 3, folder, 3)
