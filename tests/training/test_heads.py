"""DFlash 2 heads: their loss against closed forms, their shape, and where they start from."""

import itertools
import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from cases import CASES, write_folder
from tiny import SECOND, VOCAB, context_rows, tiny_drafter, tiny_target

from dflash_mlx.decoding.accept import DraftVocabulary, Greedy
from dflash_mlx.drafters.checkpoint import load_drafter, make_drafter
from dflash_mlx.drafters.dflash2 import DFlash2Drafter
from dflash_mlx.drafters.path import propose_path
from dflash_mlx.errors import UsageError
from dflash_mlx.training import TrainOptions
from dflash_mlx.training.config import make_config, with_dflash2_parts
from dflash_mlx.training.config import make_drafter as start_drafter
from dflash_mlx.training.evaluate import greedy_drafts
from dflash_mlx.training.export import export_drafter
from dflash_mlx.training.loading import load
from dflash_mlx.training.loss import candidate_losses, token_losses
from dflash_mlx.training.selector import previous_tokens, selector_losses
from dflash_mlx.training.trees import count_parameters

WIDTH = 5


def options(**changes):
    return TrainOptions(**{"model": "some/model", "out": "out", **changes})


@pytest.fixture(scope="module")
def blocks():
    """A target, a random DFlash 2 drafter, and hidden states (4, WIDTH, D) after anchor tokens (4,)."""
    hidden = mx.random.normal((4, WIDTH, 32), key=mx.random.key(0))
    return tiny_target("llama"), tiny_drafter(block_size=WIDTH + 1, **SECOND), hidden, mx.array([1, 7, 30, 47])


def test_the_token_before_each_place():
    found = previous_tokens(mx.array([[5, 6]]), mx.array([[[1, 2, 3], [7, 8, 9]]]))
    assert found.tolist() == [[[5, 1, 2], [6, 7, 8]]]


@pytest.mark.parametrize("chunk", [3, 100])
def test_selector_losses_equal_the_closed_form(blocks, chunk):
    """Log-softmax over the candidates of logit + sum of A[previous] W h B[candidate]; nothing for other labels."""
    target, drafter, hidden, _ = blocks
    selector, rows = drafter.candidate_selector, hidden.reshape(-1, 32)
    logits = np.array(target.head(rows), np.float64)
    columns = np.argsort(-logits, axis=-1)[:, :3]
    labels, previous = columns[:, 1].copy(), np.arange(20) % VOCAB
    labels[::4] = np.argsort(-logits, axis=-1)[::4, 3]
    unary = np.take_along_axis(logits, columns, axis=-1)

    def run(rows):
        return selector_losses(selector, rows, *(mx.array(x) for x in (columns, unary, previous, labels)), chunk=chunk)

    before, after, project = (
        np.array(part.weight, np.float64)
        for part in (selector.predecessor_codebook, selector.successor_codebook, selector.hidden_projection)
    )
    codes = before[previous] * (np.array(rows, np.float64) @ project.T)
    scores = unary + np.einsum("nr,nkr->nk", codes, after[columns])
    expected = np.log(np.exp(scores).sum(axis=-1)) - scores[:, 1]
    expected[::4] = 0
    np.testing.assert_allclose(np.array(run(rows)), expected, rtol=1e-4, atol=1e-4)
    assert np.ptp(scores - unary) > 0.1

    gradient = np.array(mx.grad(lambda rows: run(rows).sum())(rows))
    # d loss / d h = W' (A * (sum over candidates of (softmax - right) B)).
    probs = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    wrong = probs - (columns == labels[:, None])
    wrong[::4] = 0
    wanted = (before[previous] * np.einsum("nk,nkr->nr", wrong, after[columns])) @ project
    np.testing.assert_allclose(gradient, wanted, rtol=1e-3, atol=1e-4)


def test_candidates_come_with_the_losses_and_teach_the_head_nothing(blocks):
    target, drafter, hidden, _ = blocks
    rows, labels = hidden.reshape(-1, 32), mx.arange(20)

    def both(rows):
        return candidate_losses(target.head, drafter.candidate_selector.candidates, rows, labels, chunk=6)

    losses, columns, unary = both(rows)
    logits = target.head(rows)
    ranked = mx.sort(unary, axis=-1)
    # Products of other shapes round differently, by far less than two candidates of a row differ.
    assert (ranked[:, 1:] - ranked[:, :-1]).min().item() > 1e-3
    assert mx.allclose(losses, token_losses(target.head, rows, labels, chunk=7), atol=1e-4).item()
    assert mx.allclose(ranked, mx.sort(logits, axis=-1)[:, -3:], atol=1e-4).item()
    assert mx.allclose(mx.take_along_axis(logits, columns, axis=-1), unary, atol=1e-4).item()

    with_them = mx.grad(lambda rows: both(rows)[0].sum() + both(rows)[2].sum())(rows)
    alone = mx.grad(lambda rows: token_losses(target.head, rows, labels, chunk=6).sum())(rows)
    assert mx.allclose(with_them, alone, atol=1e-5).item()


def test_replay_drafts_what_the_decode_loop_drafts(blocks):
    target, drafter, hidden, anchors = blocks
    found = greedy_drafts(target, drafter, hidden, anchors, chunk=6)
    for i in range(4):
        expected = propose_path(
            drafter.candidate_selector,
            Greedy(),
            hidden=hidden[i],
            logits=target.head(hidden[i]),
            anchor=anchors[i : i + 1],
            position=0,
            vocabulary=DraftVocabulary(mx.arange(VOCAB), VOCAB),
        )
        assert found[i].tolist() == expected.tokens.tolist()
    # The paths are not the head's best tokens, or nothing was compared.
    assert (found != mx.argmax(target.head(hidden), axis=-1)).any().item()


def drafted(target, drafter, tokens):
    """Hidden states and greedy drafts of a block after all but the last of `tokens` (1, T)."""
    features = target.forward_tapped(tokens[:, :-1], target.make_cache(), drafter.config.target_layer_ids)[1]
    cache = drafter.make_cache()
    drafter.extend_context(features, cache)
    masks = mx.full((1, WIDTH), drafter.config.mask_token_id)
    block = mx.concatenate([tokens[:, -1:], masks], axis=-1)
    hidden = drafter(target.embed(block), context_rows(drafter, cache, WIDTH + 1))[:, 1:]
    return hidden, greedy_drafts(target, drafter, hidden, tokens[:, -1], chunk=64)


def test_a_drafter_given_new_parts_drafts_as_before(blocks, target_folder, tmp_path):
    target = blocks[0]
    plain = tiny_drafter(block_size=WIDTH + 1)
    export_drafter(plain, tmp_path, quantize=None)
    plain = load_drafter(tmp_path, dtype=mx.float32)
    loaded = load(options(model=str(target_folder)), quiet=True)
    asked = options(init_from=tmp_path, heads="dflash2", selector_top_k=9)
    grown = start_drafter(loaded.target, loaded.tokenizer, loaded.frame, asked)
    assert isinstance(grown, DFlash2Drafter)
    assert grown.config.selector_top_k == 9
    tokens = mx.array([[3, 9, 27, 11, 40, 2]])
    for expected, found in zip(drafted(target, plain, tokens), drafted(target, grown, tokens), strict=True):
        assert mx.allclose(found, expected, atol=1e-6).item()


def test_a_new_drafter_starts_as_a_dflash_drafter(blocks):
    second = make_drafter(blocks[1].config)
    plain = tiny_drafter(block_size=WIDTH + 1)
    second.update(plain.parameters())
    tokens = mx.array([[3, 9, 27, 11, 40, 2]])
    for expected, found in zip(drafted(blocks[0], plain, tokens), drafted(blocks[0], second, tokens), strict=True):
        assert mx.allclose(found, expected, atol=1e-6).item()


def test_tensors_and_fields_are_named_as_in_the_public_checkpoints(tmp_path):
    public = write_folder(tmp_path / "public", CASES["second"])
    drafter = load_drafter(public, dtype=mx.float32)
    export_drafter(drafter, tmp_path / "ours", quantize=None)
    ours, theirs = (mx.load(str(folder / "model.safetensors")) for folder in (tmp_path / "ours", public))
    assert {name: x.shape for name, x in ours.items()} == {name: x.shape for name, x in theirs.items()}
    assert load_drafter(tmp_path / "ours", dtype=mx.float32).config == drafter.config
    raw = json.loads((tmp_path / "ours" / "config.json").read_text())
    for name in ("architectures", "is_causal", "layer_types", "sliding_window"):
        assert raw[name] == CASES["second"][name]
    assert raw["dflash_config"].items() >= CASES["second"]["dflash_config"].items()


@pytest.mark.parametrize("bits", [None, 8])
def test_what_is_exported_is_in_the_public_layout(tmp_path, bits):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "is_causal": False}
    drafter = tiny_drafter(**{**SECOND, **sizes})
    export_drafter(drafter, tmp_path, quantize=bits)
    tensors = mx.load(str(tmp_path / "model.safetensors"))
    assert tensors["candidate_selector.predecessor_codebook"].shape == (VOCAB, 4)
    assert tensors["layers.0.attention_conv.base_kernel"].shape == (2, 2, 64)
    read = load_drafter(tmp_path, dtype=mx.float32, keep_quantized=False)
    assert isinstance(read, DFlash2Drafter)
    assert read.config == drafter.config
    codes = drafter.candidate_selector.successor_codebook.weight.astype(mx.bfloat16)
    assert mx.array_equal(read.candidate_selector.successor_codebook.weight, codes.astype(mx.float32)).item()


@pytest.mark.parametrize(
    ("hidden", "vocab", "layers", "rank"), [(5120, 248_320, 5, 256), (1024, 151_936, 8, 64), (576, 49_152, 1, 32)]
)
def test_the_codes_suit_the_size_of_the_drafter(hidden, vocab, layers, rank):
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "head_dim": hidden // 4,
        "layer_types": ("full_attention",) * layers,
        "vocab_size": vocab,
    }
    plain = replace(tiny_drafter().config, **shape)
    config = with_dflash2_parts(plain, options(heads="dflash2"))
    assert (config.selector_rank, config.selector_top_k) == (rank, 16)
    assert (config.conv_kernel_size, config.conv_group_size) == (2, 16)
    others = count_parameters(make_drafter(plain).parameters())
    assert rank == 32 or 2 * vocab * rank <= others / 4
    assert rank == 256 or 2 * vocab * 2 * rank > others / 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": "eagle"}, "heads should be dflash or dflash2"),
        ({"selector_rank": 8, "conv_kernel_size": 3}, "--conv-kernel-size and --selector-rank can only be chosen with"),
        ({"heads": "dflash2", "selector_top_k": 0}, "selector-top-k should be above 0"),
    ],
)
def test_options_that_contradict_each_other(changes, message):
    with pytest.raises(UsageError, match=message):
        options(**changes)


def test_sizes_that_do_not_fit(target_folder, tmp_path):
    loaded = load(options(model=str(target_folder)), quiet=True)
    parts = loaded.target, loaded.tokenizer, loaded.frame
    config = make_config(*parts, options(heads="dflash2", sliding_window=9))
    # Blocks see both ways, as in the public checkpoints.
    assert (config.selector_rank, config.selector_top_k, config.is_causal) == (64, 16, False)
    with pytest.raises(UsageError, match="conv-group-size should divide the hidden size 32; got 5"):
        make_config(*parts, options(heads="dflash2", conv_group_size=5))
    with pytest.raises(UsageError, match="at most the 48 tokens there are; got 49"):
        make_config(*parts, options(heads="dflash2", selector_top_k=49))
    with pytest.raises(UsageError, match="at least the 16 tokens that the selector chooses among; got 15"):
        start_drafter(*parts, options(heads="dflash2", draft_vocabulary=15))
    export_drafter(tiny_drafter(**SECOND), tmp_path, quantize=None)
    # Its shape counts, whether it is named or not.
    for asked in ({}, {"heads": "dflash2", "selector_rank": 4}):
        assert isinstance(start_drafter(*parts, options(init_from=tmp_path, **asked)), DFlash2Drafter)
    with pytest.raises(UsageError, match="--selector-rank 8 where it has 4"):
        start_drafter(*parts, options(init_from=tmp_path, heads="dflash2", selector_rank=8))


def test_heads_decide_what_a_run_can_continue():
    kinds = [options(), options(heads="dflash2"), options(heads="dflash2", selector_rank=64)]
    identities = [kind.training_identity() for kind in kinds]
    assert all(a != b for a, b in itertools.combinations(identities, 2))
