"""The layout of speculators, and the kinds of drafters that are refused by name."""

import copy
import json

import mlx.core as mx
import pytest

from dflash_mlx.drafters.config import parse_draft_config
from dflash_mlx.errors import CheckpointError
from dflash_mlx.loading import load_pair

# As vLLM's speculators writes it: what equals Qwen3Config's own values is left out.
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "block_size": 8,
    "draft_vocab_size": 32000,
    "mask_token_id": 151669,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "target_hidden_size": None,
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 2048,
        "rope_theta": 1000000.0,
    },
    "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "Qwen/Qwen3-4B"}},
}
ZLAB = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3]},
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def speculators(**changes):
    return {**copy.deepcopy(SPECULATORS), **changes}


def zlab(nested=None, **changes):
    return {**copy.deepcopy(ZLAB), **changes, "dflash_config": {**ZLAB["dflash_config"], **(nested or {})}}


def test_speculators_counts_the_targets_layers_from_one():
    config = parse_draft_config(SPECULATORS)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)


def test_speculators_leaves_out_what_qwen3_has_anyway():
    config = parse_draft_config(SPECULATORS)
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (2560, 2, 8)
    assert (config.vocab_size, config.num_attention_heads, config.head_dim) == (151936, 32, 128)
    assert (config.block_size, config.mask_token_id, config.rope_theta) == (8, 151669, 1e6)


def test_causality_in_speculators():
    """Only sliding layers are ever causal there, and those unless the config says otherwise."""
    config = parse_draft_config(SPECULATORS)
    assert [config.layer_is_causal(i) for i in range(2)] == [True, False]
    config = parse_draft_config(speculators(sliding_window_non_causal=True))
    assert [config.layer_is_causal(i) for i in range(2)] == [False, False]


def test_dflash2_in_speculators():
    raw = speculators(speculators_model_type="dflash2", architectures=["DFlash2DraftModel"], draft_vocab_size=151936)
    del raw["sliding_window_non_causal"]
    config = parse_draft_config(raw)
    assert config.is_dflash2
    assert (config.conv_kernel_size, config.conv_group_size) == (2, 16)
    assert (config.selector_rank, config.selector_top_k) == (256, 16)
    assert config.is_causal is False
    assert not parse_draft_config(SPECULATORS).is_dflash2


REFUSED = [
    (zlab(architectures=["Qwen3DSparkModel"]), "a DSpark drafter (Qwen3DSparkModel)"),
    (zlab(architectures=["Gemma4DSparkModel"], markov_rank=256), "a DSpark drafter (markov_rank 256)"),
    (zlab({"projector_type": "dspark"}), "a DSpark drafter (projector_type 'dspark')"),
    (zlab({"projector_type": "domino"}), "a Domino drafter (projector_type 'domino')"),
    (speculators(speculators_model_type="dspark"), "a DSpark drafter (speculators_model_type 'dspark')"),
    (speculators(speculators_model_type="eagle3"), "an EAGLE-3 drafter (speculators_model_type 'eagle3')"),
    (speculators(speculators_model_type="peagle"), "a P-EAGLE drafter"),
    (speculators(speculators_model_type="mtp"), "a multi-token-prediction (MTP) head"),
    (speculators(speculators_model_type="xpress"), "an xPress drafter"),
    (speculators(speculators_model_type="novel"), "one of the kind novel"),
    ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "an EAGLE-3 drafter"),
    ({"architectures": ["EAGLE-3"]}, "an EAGLE-3 drafter (EAGLE-3)"),
    ({"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}, "(MTP) head (DeepSeekMTPModel)"),
    ({"model_type": "medusa"}, "a set of Medusa heads (medusa)"),
    ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, "an MLP speculator"),
    ({"architectures": ["LagunaDFlashForCausalLM"], "model_type": "laguna"}, "a Laguna drafter"),
    ({"model_type": "muse_glimmer_assistant"}, "Muse Glimmer's own assistant"),
    (zlab({"attention_sink_bias": True}), "attention sinks (attention_sink_bias)"),
    (zlab(hidden_act="gelu"), "hidden_act 'gelu'"),
    (speculators(sample_from_anchor=True), "sample_from_anchor"),
    (speculators(target_hidden_size=4096), "target_hidden_size 4096"),
    (zlab({"attention_modes": ["kda"]}), "attention_modes"),
]


@pytest.mark.parametrize(("raw", "found"), REFUSED, ids=[found for _, found in REFUSED])
def test_refused_by_name(raw, found):
    """What was found, what is supported, and what to do next, in one line."""
    with pytest.raises(CheckpointError) as refusal:
        parse_draft_config(raw)
    message = str(refusal.value)
    assert found in message
    assert "a DFlash or DFlash 2 drafter" in message
    assert message.endswith("or run with --no-draft.")
    assert "\n" not in message


def test_layers_that_speculators_cannot_mean():
    with pytest.raises(CheckpointError, match=r"reads the target's embedding .*\[0, 4\] hold 0"):
        parse_draft_config(speculators(aux_hidden_state_layer_ids=[0, 4]))
    with pytest.raises(CheckpointError, match="no 'aux_hidden_state_layer_ids'"):
        parse_draft_config(speculators(aux_hidden_state_layer_ids=None))


@pytest.mark.parametrize("target", ["gemma3_text", "qwen3_5_moe", "mimo_v2_flash", "deepseek_v3", "minimax"])
def test_models_are_not_mistaken_for_other_drafters(target):
    """A target given as a drafter is named as what it is: no drafter."""
    with pytest.raises(CheckpointError, match="not a DFlash drafter"):
        parse_draft_config({"model_type": target, "architectures": ["SomethingForCausalLM"], "hidden_size": 64})


def test_a_drafter_is_refused_before_its_target_is_loaded(tmp_path):
    """The target here could not even be loaded."""
    for name, config in (("target", {"model_type": "no such type"}), ("drafter", REFUSED[0][0])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        mx.save_safetensors(str(tmp_path / name / "model.safetensors"), {"x": mx.zeros(1)})
    with pytest.raises(CheckpointError, match="a DSpark drafter"):
        load_pair(model=str(tmp_path / "target"), draft_model=str(tmp_path / "drafter"))
