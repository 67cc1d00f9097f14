"""A DFlash 2 drafter from the whole command on a tiny target: it and its selector learn, and it is used at once."""

import json
import shutil
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from tiny import plain_tokens
from tiny_folder import short_run

from dflash_mlx.drafters.checkpoint import load_drafter
from dflash_mlx.drafters.dflash2 import DFlash2Drafter
from dflash_mlx.errors import UsageError
from dflash_mlx.generation import generate
from dflash_mlx.loading import load_pair
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.training import run
from dflash_mlx.training.batches import Blocks, make_batch
from dflash_mlx.training.config import make_drafter
from dflash_mlx.training.evaluate import greedy_only, replay
from dflash_mlx.training.forward import draft_hidden, target_features
from dflash_mlx.training.loading import load
from dflash_mlx.training.loss import labels_of
from dflash_mlx.training.selector import previous_tokens
from dflash_mlx.training.store import ConversationStore
from dflash_mlx.training.trainer import Trainer

# DFlash 2's heads have quick tests in test_heads.py, and a whole training of a drafter has them in test_end_to_end.py.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(orderly_folder, tmp_path_factory):
    """(options, result) of a finished run."""
    out = tmp_path_factory.mktemp("trained") / "drafter"
    options = short_run(orderly_folder, out, heads="dflash2", steps=60, micro_batch=4, measure=4, measure_tokens=24)
    return options, run(options, quiet=True)


def held_out(options):
    _, held = ConversationStore(options.out / "work" / "data").split(options.holdout)
    return greedy_only(held, 64, options.max_length)


def test_the_trained_drafter_beats_its_initial_state(trained):
    options, result = trained
    loaded = load(options, quiet=True)
    mx.random.seed(options.seed)
    initial = make_drafter(loaded.target, loaded.tokenizer, loaded.frame, options)
    before = replay(loaded.target, initial, held_out(options), longest=options.max_length, chunk=64)
    assert result.facts["replay"]["mean_acceptance_length"] > 1.6 * before.mean_acceptance_length


def test_the_selector_beats_the_head_behind_the_right_token(trained):
    """Among the candidates on held-out answers: the selector's best given the true previous token, and the head's."""
    options, _ = trained
    target, drafter = load(options, quiet=True).target, load_drafter(options.out, dtype=mx.float32)
    assert isinstance(drafter, DFlash2Drafter)
    selector, block = drafter.candidate_selector, drafter.config.block_size
    batch = make_batch(held_out(options), Blocks(12, block), np.random.default_rng(0), longest=options.max_length)
    tokens, anchors, ends, _ = batch.arrays()
    anchor_tokens = mx.take_along_axis(tokens, anchors, axis=1)
    labels, valid = labels_of(tokens, anchors, ends, block)
    features = target_features(target, tokens, drafter.config.target_layer_ids)
    hidden = draft_hidden(drafter, target.embed, features, anchor_tokens, anchors)[:, :, 1:]
    rows, wanted = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    logits = target.head(rows)
    columns = selector.candidates(logits)
    unary = mx.take_along_axis(logits, columns, axis=-1)
    previous = previous_tokens(anchor_tokens, labels).reshape(-1)
    scores = selector.scores(unary, selector.links(rows, columns), previous)
    chosen = mx.take_along_axis(columns, mx.argmax(scores, axis=-1, keepdims=True), axis=-1)[:, 0]

    def share_right(choice):
        return ((choice == wanted) * valid.reshape(-1)).sum().item() / valid.sum().item()

    assert share_right(chosen) > share_right(mx.argmax(logits, axis=-1)) + 0.05


def test_replay_agrees_with_the_decode_loop_and_no_answer_changes(trained, orderly_folder):
    options, result = trained
    measured = result.facts["measured"]["mean_acceptance_length"]
    target, drafter = load(options, quiet=True).target, load_drafter(options.out, dtype=mx.float32)
    replayed = replay(target, drafter, held_out(options)[:4], longest=options.max_length, chunk=64)
    assert abs(replayed.mean_acceptance_length - measured) < 0.25 * measured
    pair = load_pair(model=str(orderly_folder), draft_model=str(options.out))
    prompt = pair.encode_chat([{"role": "user", "content": "hello 42"}])
    answer = generate(pair, prompt, SamplingParams(max_tokens=40), width=5)
    assert answer.token_ids == plain_tokens(pair.target, prompt, 40, pair.eos_ids)
    assert answer.acceptance.mean_acceptance_length > 1.5


def test_what_the_folder_says(trained):
    options, result = trained
    raw = json.loads((options.out / "config.json").read_text())
    assert raw["architectures"] == ["DFlash2DraftModel"]
    assert raw["is_causal"] is False
    assert raw["dflash_config"].items() >= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_top_k": 16}.items()
    recipe = result.facts["recipe"]
    assert (recipe["heads"], recipe["selector_rank"]) == ("dflash2", raw["dflash_config"]["selector_rank"])
    card = (options.out / "README.md").read_text()
    assert "# A DFlash 2 drafter for" in card
    assert "best 16 tokens by the draft before it" in card


def test_a_killed_training_ends_as_if_nothing_had_happened(trained, tmp_path, monkeypatch):
    options, _ = trained
    again = replace(options, out=tmp_path / "again", checkpoint_seconds=0.01)
    (again.out / "work").mkdir(parents=True)
    shutil.copytree(options.out / "work" / "data", again.out / "work" / "data")
    shutil.copy(options.out / "work" / "data.json", again.out / "work")
    save, saved = Trainer.save, []

    def save_and_die(trainer):
        save(trainer)
        saved.append(trainer.state.step)
        if len(saved) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        run(again, quiet=True)
    assert 0 < saved[-1] < options.steps
    run(again, quiet=True)
    found, wanted = (mx.load(str(folder / "model.safetensors")) for folder in (again.out, options.out))
    assert found.keys() == wanted.keys()
    for name in found:
        assert mx.allclose(found[name], wanted[name], rtol=0.01, atol=1e-3).item(), name


def test_fewer_tokens_to_draft_and_fewer_bits(trained, tmp_path):
    """Exported again from the kept state: the selector chooses among the tokens that may be drafted."""
    options, before = trained
    shutil.copytree(options.out, tmp_path / "again")
    again = run(replace(options, out=tmp_path / "again", draft_vocabulary=20, quantize=8), quiet=True)
    assert again.facts["steps"] == before.facts["steps"]
    read = load_drafter(tmp_path / "again", dtype=mx.float32)
    assert len(read.config.draft_token_ids) in (20, 21)
    assert again.facts["measured"]["mean_acceptance_length"] > 1.5


def test_training_goes_on_from_a_dflash2_drafter(trained, tmp_path):
    """Without a step it is the same drafter, in its own layout."""
    options, before = trained
    again = replace(options, out=tmp_path / "again", init_from=options.out, heads="dflash", steps=1, learning_rate=1e-9)
    result = run(replace(again, data_tokens=500, layers=5, block_size=16, taps=None), quiet=True)
    assert result.facts["recipe"]["heads"] == "dflash2"
    assert result.facts["replay"]["mean_acceptance_length"] > 0.6 * before.facts["replay"]["mean_acceptance_length"]
    assert load_drafter(again.out, dtype=mx.float32).config == load_drafter(options.out, dtype=mx.float32).config


def test_a_killed_run_is_not_continued_with_other_heads(trained):
    options, _ = trained
    with pytest.raises(UsageError, match="heads was 'dflash2' and is now 'dflash'"):
        run(replace(options, heads="dflash"), quiet=True)
