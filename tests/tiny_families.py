"""Tiny configs of target families, for their real mlx-lm classes: windows of 8, a few experts, four layers.

Each exercises what is special about its family: sliding windows, recurrent layers, shared keys, nested configs.
Sizes must fit `tiny.tiny_drafter` (hidden size, vocabulary, number of layers).
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_map_with_path
from tiny import HIDDEN, LAYERS, VOCAB

from dflash_mlx.targets.target import Target, wrap_model

WINDOW = 8
S, F = "sliding_attention", "full_attention"

_BASE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 16,
}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"type": "default", "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
}
_INDEX = {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 12}
_MAMBA2: dict[str, Any] = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_proj_bias": False,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "n_groups": 2,
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
}
_GEMMA4: dict[str, Any] = {
    **_BASE,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": [S, F, S, F],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
_GEMMA3N: dict[str, Any] = {
    **_BASE,
    "intermediate_size": [48] * LAYERS,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "sliding_window": WINDOW,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "layer_types": [S, F, S, F],
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
    "model_type": "gemma3n_text",
}

# name -> (mlx-lm's model file, config)
FAMILY_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _BASE),
    "llama, sliding": ("llama", {**_BASE, "sliding_window": WINDOW, "layer_types": [S, F, S, S]}),
    "qwen3": ("qwen3", _BASE),
    "qwen3_moe": ("qwen3_moe", {**_BASE, **_MOE}),
    "qwen3_next": ("qwen3_next", {**_BASE, **_MOE, **_DELTA, "partial_rotary_factor": 0.5}),
    "qwen3_5": ("qwen3_5", {**_BASE, **_DELTA, "rope_parameters": _ROPE}),
    "qwen3_5_moe": ("qwen3_5_moe", {"text_config": {**_BASE, **_MOE, **_DELTA, "rope_parameters": _ROPE}}),
    "gemma4": ("gemma4", {"text_config": _GEMMA4, "vocab_size": VOCAB}),
    "gemma4, shared keys": (
        "gemma4",
        {"text_config": {**_GEMMA4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}, "vocab_size": VOCAB},
    ),
    "gemma4, experts": (
        "gemma4",
        {
            "text_config": {
                **_GEMMA4,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 16,
            },
            "vocab_size": VOCAB,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_BASE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": [S, F] * 2,
        },
    ),
    "kimi_k25": ("kimi_k25", {"text_config": {**_BASE, **_LATENT, "model_type": "kimi_k2"}}),
    "minimax": (
        "minimax",
        {**_BASE, **_LOCAL_EXPERTS, "shared_intermediate_size": 16, "rotary_dim": 4},
    ),
    "glm_moe_dsa": ("glm_moe_dsa", {**_BASE, **_LATENT, **_INDEX, "rope_parameters": _ROPE}),
    "muse_glimmer": ("muse_glimmer", {**_BASE, "sliding_window": WINDOW}),
    "gemma3": (
        "gemma3",
        {
            "text_config": {
                **_BASE,
                "model_type": "gemma3_text",
                "sliding_window": WINDOW,
                "sliding_window_pattern": 2,
                "query_pre_attn_scalar": 8,
            },
            "vocab_size": VOCAB,
        },
    ),
    "gemma3n": ("gemma3n", {"text_config": _GEMMA3N}),
    "ministral3": (
        "ministral3",
        {
            **_BASE,
            "sliding_window": WINDOW,
            "layer_types": [S, F, S, S],
            "rope_parameters": {**_ROPE, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16},
        },
    ),
    "phi3": ("phi3", _BASE),
    "lfm2": (
        "lfm2",
        {
            **_BASE,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": HIDDEN,
            "block_ff_dim": 48,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "full_attn_idxs": [1, 3],
        },
    ),
    "nemotron_h": ("nemotron_h", {**_BASE, **_MAMBA2, "hybrid_override_pattern": ["M", "*", "M", "-"]}),
    "mamba2": (
        "mamba2",
        {
            **_BASE,
            **_MAMBA2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "time_step_limit": [0.0, 100.0],
            "time_step_rank": "auto",
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_BASE,
            "mamba_d_conv": 4,
            "mamba_d_head": 8,
            "mamba_d_ssm": 32,
            "mamba_d_state": 8,
            "mamba_n_heads": 4,
            "mamba_n_groups": 1,
        },
    ),
    "kimi_linear": (
        "kimi_linear",
        {
            **_BASE,
            "linear_attn_config": {"num_heads": 4, "head_dim": 8, "kda_layers": [1, 3], "full_attn_layers": [2, 4]},
            "model_max_length": 8192,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "first_k_dense_replace": 1,
        },
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {
            **_BASE,
            **_LATENT,
            "num_key_value_heads": 4,
            "partial_rotary_factor": 0.5,
            "num_experts": 4,
            "num_shared_experts": 1,
            "layer_group_size": 2,
            "group_norm_size": 2,
        },
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            **_BASE,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": WINDOW,
            "num_key_value_heads": 1,
            "block_types": ["recurrent", "attention"],
        },
    ),
    "rwkv7": (
        "rwkv7",
        {
            **_BASE,
            "norm_eps": 1e-5,
            "a_low_rank_dim": 4,
            "v_low_rank_dim": 4,
            "gate_low_rank_dim": 4,
            "decay_low_rank_dim": 4,
        },
    ),
    "llama4": (
        "llama4",
        {
            "text_config": {
                **_BASE,
                "attention_chunk_size": WINDOW,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 48,
                "num_experts_per_tok": 1,
                "num_local_experts": 4,
                "rope_scaling": None,
                "use_qk_norm": True,
                "model_type": "llama4_text",
            }
        },
    ),
}

# Model files that do more to their embeddings than to scale them.
OWN_EMBEDDINGS = ("muse_glimmer", "gemma3n", "rwkv7")
# Seeds other than 0, for models that would repeat one token.
_SEEDS = {"gemma3n": 7, "nemotron_h": 2, "rwkv7": 3}


# What older versions of mlx-lm compute wrongly by themselves.
_WRONG_BEFORE_0_32 = {
    "gemma3n": "its shared keys got other positions in a block than in single steps (check_pair refuses it)",
    "llama4": "its chunked cache lost its keys while they were fewer than its buffer held",
}


def unavailable(name: str) -> str | None:
    """Why the installed mlx-lm cannot run a family, or None if it can."""
    file = FAMILY_CONFIGS[name][0]
    if find_spec(f"mlx_lm.models.{file}") is None:
        return f"mlx-lm {mlx_lm.__version__} has no model file {file}.py"
    if file in _WRONG_BEFORE_0_32 and tuple(map(int, mlx_lm.__version__.split(".")[:2])) < (0, 32):
        return f"mlx-lm {mlx_lm.__version__}, {file}: {_WRONG_BEFORE_0_32[file]}"
    return None


def family_target(name: str) -> Target:
    """A random float32 model of a family."""
    file, config = FAMILY_CONFIGS[name]
    module = import_module(f"mlx_lm.models.{file}")
    config = {"model_type": file, **config}
    model = module.Model(module.ModelArgs.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(_SEEDS.get(name, 0)), 1000))

    def draw(path: str, array: mx.array) -> mx.array:
        noise = mx.random.normal(array.shape, key=next(keys))
        if path.endswith(("A_log", "dt_bias")):
            return -1.5 + 0.3 * noise  # a memory of many tokens
        if array.ndim == 1:
            return 1.0 + 0.1 * noise
        if "embed" in path:
            return noise * (0.3 / array.shape[-1] ** 0.5)  # small, so that the layers decide, not the last token
        return noise * (1.4 / array.shape[-1] ** 0.5)

    model.update(tree_map_with_path(draw, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return wrap_model(model, config)
