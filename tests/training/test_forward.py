"""Training and decode loop are the same drafter, and no block sees what it must not."""

import mlx.core as mx
import numpy as np
import pytest
from tiny import HIDDEN, SECOND, VOCAB, context_rows, tiny_drafter, tiny_target
from tiny_families import family_target

from dflash_mlx.training.checkpoint import fresh_state, load_state, save_state, weights
from dflash_mlx.training.forward import draft_hidden, feature_sizes, target_features
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.trainer import block_loss

LENGTH, BLOCK = 40, 6
KINDS = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 7},
    "narrow": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3, "is_causal": False},
    "scaled": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "input_embedding_scale": 2.0},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "second": SECOND,
    "second, narrow": {
        **SECOND,
        "conv_kernel_size": 3,
        "layer_types": ("sliding_attention",) * 2,
        "sliding_window": 3,
        "is_causal": False,
    },
}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def tokens():
    return mx.array(np.random.default_rng(3).integers(0, VOCAB, (2, LENGTH)))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_training_logits_equal_the_decode_loops(target, tokens, kind, whole):
    drafter = tiny_drafter(block_size=BLOCK, **KINDS[kind])
    anchors = mx.array([[2, 9, 30, 20], [38, 5, 6, 13]])
    sizes = None if whole else mx.array([[6, 2, 3, 5], [4, 6, 2, 3]])
    features = target_features(target, tokens, drafter.config.target_layer_ids)
    ids = mx.take_along_axis(tokens, anchors, axis=1)
    hidden = draft_hidden(drafter, target.embed, features, ids, anchors, sizes)
    for row in range(2):
        for a, anchor in enumerate(anchors[row].tolist()):
            size = BLOCK if sizes is None else int(sizes[row, a].item())
            cache = drafter.make_cache()
            # Two pieces, as the decode loop appends them.
            drafter.extend_context(features[row : row + 1, : anchor // 2], cache)
            drafter.extend_context(features[row : row + 1, anchor // 2 : anchor], cache)
            block = mx.array([[tokens[row, anchor].item()] + [drafter.config.mask_token_id] * (size - 1)])
            expected = drafter(target.embed(block), context_rows(drafter, cache, size))[0]
            found = hidden[row, a, :size]
            assert mx.abs(target.head(found) - target.head(expected)).max().item() < 2e-4
            # With rejected features still in the cache, as the decode loop leaves them, it must agree too.
            drafter.extend_context(features[row : row + 1, anchor : anchor + 2], cache)
            masked = drafter(target.embed(block), context_rows(drafter, cache, size, length=anchor))[0]
            assert mx.abs(masked - expected).max().item() < 2e-4


def loss_inputs(target, tokens, drafter):
    features = target_features(target, tokens, drafter.config.target_layer_ids)
    anchors = mx.array([[10, 25], [4, 30]])
    ends = mx.array([[34, 34], [12, 34]])
    return features, anchors, ends, mx.full(anchors.shape, BLOCK)


@pytest.mark.parametrize("kind", ["full", "sliding", "causal", "second"])
def test_features_at_or_behind_an_anchor_have_no_gradient(target, tokens, kind):
    drafter = tiny_drafter(block_size=BLOCK, **KINDS[kind])
    features, anchors, ends, sizes = loss_inputs(target, tokens, drafter)
    options = TrainOptions(model="unused/unused", out=".", block_size=BLOCK)
    parameters = drafter.parameters()

    for index in range(2):
        # Only one block of each row counts; the other is there and must not matter.
        chosen = mx.where(mx.arange(2)[None] == index, ends, 0)

        def loss(features, chosen=chosen):
            return block_loss(
                target, drafter, parameters, features, tokens, anchors, chosen, sizes, options=options, chunk=7
            )

        gradient = np.array(mx.abs(mx.grad(loss)(features)).sum(axis=-1))
        for row in range(2):
            anchor = anchors[row, index].item()
            assert (gradient[row, anchor:] == 0).all()
            assert gradient[row, anchor - 1] > 0
            if kind == "sliding":
                continue
            assert (gradient[row, :anchor] > 0).all()


@pytest.mark.parametrize("kind", ["full", "second"])
def test_blocks_do_not_see_each_others_tokens(target, tokens, kind):
    drafter = tiny_drafter(block_size=BLOCK, **KINDS[kind])
    features, anchors, *_ = loss_inputs(target, tokens, drafter)
    ids = mx.take_along_axis(tokens, anchors, axis=1)
    embedded = target.embed(mx.arange(VOCAB))
    choices = mx.stack([mx.arange(VOCAB) == i for i in ids.reshape(-1)]).astype(mx.float32)

    def first_block(one_hot):
        # The embeddings of the anchors come from `one_hot`, so that they can be differentiated.
        rows = (one_hot @ embedded).reshape(4, 1, HIDDEN)
        masks = mx.broadcast_to(embedded[3], (4, BLOCK - 1, HIDDEN))
        block = mx.concatenate([rows, masks], axis=1)
        hidden = draft_hidden(drafter, lambda _: block, features, ids, anchors)
        return (hidden[0, 0] ** 2).sum()

    gradient = np.array(mx.abs(mx.grad(first_block)(choices)).sum(axis=-1))
    assert gradient[0] > 0
    assert (gradient[1:] == 0).all()


@pytest.mark.parametrize("kind", ["full", "second"])
def test_later_tokens_only_matter_as_labels(target, tokens, kind):
    """Changing the text from an anchor's successor on leaves the block's hidden states bit for bit."""
    drafter = tiny_drafter(block_size=BLOCK, **KINDS[kind])
    anchors = mx.array([[12], [12]])
    changed = mx.concatenate([tokens[:, :13], (tokens[:, 13:] + 1) % VOCAB], axis=1)
    results = []
    for text in (tokens, changed):
        features = target_features(target, text, drafter.config.target_layer_ids)
        results.append(draft_hidden(drafter, target.embed, features, text[:, 12:13], anchors))
    assert mx.array_equal(*results).item()


def test_a_window_of_the_target_counts_in_training_as_in_decoding(tokens):
    """40 tokens are five windows."""
    target = family_target("gemma3")
    cache = target.make_cache()
    parts = [target.forward_tapped(tokens[:1, i : i + 1], cache, (0, 3))[1] for i in range(LENGTH)]
    found = target_features(target, tokens[:1], (0, 3))
    assert mx.allclose(found, mx.concatenate(parts, axis=1), rtol=1e-4, atol=1e-4).item()


def test_weights_for_divided_features_are_those_of_whole_features(target, tokens, tmp_path):
    """(x / sizes) W = x (W / sizes), and a state keeps its sizes."""
    drafter = tiny_drafter(block_size=BLOCK)
    taps = drafter.config.target_layer_ids
    sizes = feature_sizes(target, [tokens[:1], tokens[1:]], taps)
    features = target_features(target, tokens, taps)
    assert mx.allclose(mx.abs(features / sizes).mean(axis=(0, 1)), mx.ones(sizes.shape), rtol=1e-4).item()

    options = TrainOptions(model="x", out=tmp_path)
    save_state(tmp_path / "state.safetensors", fresh_state(drafter, options, feature_sizes=sizes))
    state = load_state(tmp_path / "state.safetensors")
    expected = drafter.fc(features / sizes)
    drafter.update(weights(state.parameters, state.feature_sizes, mx.float32))
    assert mx.allclose(drafter.fc(features), expected, rtol=1e-4, atol=1e-5).item()


def test_a_drafter_to_start_from_is_the_same_drafter_before_the_first_step(target, tokens, tmp_path):
    drafter = tiny_drafter(block_size=BLOCK)
    sizes = feature_sizes(target, [tokens], drafter.config.target_layer_ids)
    (tmp_path / "config.json").write_text("{}")
    options = TrainOptions(model="x", out=tmp_path / "out", init_from=tmp_path)
    state = fresh_state(drafter, options, feature_sizes=sizes)
    kept = weights(state.parameters, state.feature_sizes, mx.float32)["fc"]["weight"]
    assert mx.allclose(kept, drafter.fc.weight, rtol=1e-6).item()
