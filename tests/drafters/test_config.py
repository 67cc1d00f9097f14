"""Checkpoint dialects into one DraftConfig."""

import copy

import pytest

from dflash_mlx.drafters.config import Rope, default_target_layer_ids, parse_draft_config
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


def test_what_a_checkpoint_leaves_out_is_what_the_official_loader_assumes():
    raw = changed(block_size=None, dflash_config={"mask_token_id": 7}, num_target_layers=36, num_hidden_layers=5)
    config = parse_draft_config(raw)
    assert config.block_size == 16
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert config.rms_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("layers", "count", "published"),
    [
        (32, 8, [1, 5, 9, 13, 17, 21, 25, 29]),
        (64, 5, [1, 16, 31, 46, 61]),
        (60, 6, [1, 12, 23, 35, 46, 57]),
        (61, 6, [1, 12, 24, 35, 47, 58]),
        (24, 1, [12]),
    ],
)
def test_default_target_layers_are_those_of_published_drafters(layers, count, published):
    assert default_target_layer_ids(layers, count) == published


def test_nested_fields_win_and_soft_caps_may_be_off():
    nested = {**OLD["dflash_config"], "final_logit_softcapping": 20.0, "causal": True}
    config = parse_draft_config(changed(final_logit_softcapping=30.0, dflash_config=nested))
    assert config.final_logit_softcapping == 20.0
    assert config.is_causal is True
    assert parse_draft_config(changed(final_logit_softcapping=30.0)).final_logit_softcapping == 30.0
    assert parse_draft_config(changed(final_logit_softcapping=0.0)).final_logit_softcapping is None


def test_rope_scaling_goes_before_rope_parameters_and_layer_types_may_have_their_own():
    yarn = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    both = parse_draft_config(changed(rope_scaling=yarn, rope_parameters={"rope_theta": 7.0, "rope_type": "default"}))
    assert both.rope_of("full_attention") == Rope(500000.0, yarn)
    own = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, **yarn},
    }
    kinds = ["sliding_attention", "full_attention"]
    config = parse_draft_config(changed(rope_parameters=own, layer_types=kinds, sliding_window=8))
    assert config.rope_of("full_attention") == Rope(1e6)
    assert config.rope_of("sliding_attention") == Rope(1e4, yarn)


def test_far_too_many_layers_are_refused_before_anything_is_made_for_each():
    raw = changed(dflash_config={"mask_token_id": 7}, num_target_layers=36, num_hidden_layers=1e300)
    with pytest.raises(CheckpointError, match=r"num_hidden_layers.*expected 1 to 1000"):
        parse_draft_config(raw)


def test_layers_slide_as_old_configs_say():
    raw = changed(use_sliding_window=True, sliding_window=64, max_window_layers=1)
    assert parse_draft_config(raw).layer_types == ("full_attention", "sliding_attention")
    assert parse_draft_config(changed(sliding_window=64)).layer_types == ("full_attention",) * 2
    nested = {**OLD["dflash_config"], "use_swa": True, "swa_window_size": 32}
    config = parse_draft_config(changed(dflash_config=nested))
    assert config.layer_types == ("sliding_attention",) * 2
    assert config.sliding_window == 32


def second(**nested):
    fields = {**OLD["dflash_config"], "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8}
    fields |= {"selector_top_k": 16, **nested}
    return changed(architectures=["DFlash2DraftModel"], dflash_config=fields, is_causal=False)


def test_dflash_2():
    config = parse_draft_config(second())
    assert config.is_dflash2
    assert (config.conv_kernel_size, config.conv_group_size, config.selector_rank, config.selector_top_k) == (
        (2, 16, 8, 16)
    )
    assert not parse_draft_config(OLD).is_dflash2
    # As many candidates as there are tokens, and no more.
    assert parse_draft_config(second(selector_top_k=100)).selector_top_k == 100


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "llama", "hidden_size": 64}, "not a DFlash drafter"),
        (changed(architectures=["DFlash2DraftModel"]), "a DFlash 2 drafter needs conv_kernel_size"),
        (changed(architectures=["Qwen3DSparkModel"]), "DSpark"),
        (changed(head_dim=None, num_attention_heads=None), "num_attention_heads"),
        (changed(block_size=1), "block_size is 1"),
        (second(selector_rank=0), "needs selector_rank"),
        (second(conv_group_size=24), "conv_group_size 24 does not divide hidden_size 64"),
        (second(selector_top_k=101), "selector_top_k 101 is more than the 100 tokens"),
        (changed(rope_scaling={"rope_type": "longrope", "factor": 2.0}), "'longrope'; this version has default"),
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
