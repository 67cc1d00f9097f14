"""Checkpoint dialects into one DraftConfig."""

import copy

import pytest

from dflash_mlx.drafters.config import parse_draft_config
from dflash_mlx.errors import CheckpointError

OLD = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3]},
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
    "rope_theta": 500000.0,
    "num_target_layers": 6,
}


def changed(**changes):
    return {**copy.deepcopy(OLD), **changes}


def test_first_layout():
    config = parse_draft_config(OLD)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, 7, (1, 3))
    assert config.rope_theta == 500000.0
    assert config.feature_size == 128
    assert config.layer_types == ("full_attention", "full_attention")


def test_newer_layout_wins_over_top_level_fields():
    nested = {"mask_token_id": 9, "target_layer_ids": [0, 2], "block_size": 8}
    raw = changed(
        dflash_config=nested,
        rope_parameters={"rope_theta": 1e7, "rope_type": "default"},
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=64,
    )
    config = parse_draft_config(raw)
    assert (config.block_size, config.mask_token_id, config.rope_theta) == (8, 9, 1e7)
    assert config.rope_scaling is None
    assert [config.layer_is_causal(i) for i in range(2)] == [True, False]


def test_causality_may_be_said_outright():
    assert parse_draft_config(changed(is_causal=True)).layer_is_causal(0)
    raw = changed(is_causal=False, layer_types=["sliding_attention"] * 2, sliding_window=8)
    assert not parse_draft_config(raw).layer_is_causal(0)


def test_rope_scaling_from_either_place():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert parse_draft_config(changed(rope_scaling=yarn)).rope_scaling == yarn
    nested = changed(rope_parameters={**yarn, "rope_theta": 1e6})
    assert parse_draft_config(nested).rope_scaling == yarn


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "llama", "hidden_size": 64}, "not a DFlash drafter"),
        (changed(architectures=["DFlash2DraftModel"]), "a DFlash 2 drafter needs conv_kernel_size"),
        (changed(architectures=["Qwen3DSparkModel"]), "DSpark"),
        (changed(head_dim=None, num_attention_heads=None), "num_attention_heads"),
        (changed(block_size=1), "block_size is 1"),
        (changed(layer_types=["full_attention"]), "layer_types has 1"),
        (changed(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        (changed(layer_types=["sliding_attention"] * 2), "sliding_window"),
        (changed(dflash_config={"mask_token_id": 100, "target_layer_ids": [1]}), "mask_token_id 100"),
        (changed(dflash_config={"mask_token_id": 1, "target_layer_ids": []}), "target_layer_ids"),
    ],
)
def test_refused_with_the_reason(raw, message):
    with pytest.raises(CheckpointError, match=message):
        parse_draft_config(raw)
