"""Tiny drafter checkpoints, one for each option of the public layouts, with the same random weights and inputs for all.

NumPy only: the official implementations and this package read the same folders. The numbers come from NumPy's
RandomState, whose stream never changes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Config = dict[str, Any]
VOCAB, HIDDEN, BLOCK, HEAD_DIM = 40, 32, 6, 16
ROUNDS = ((23, 5), (3, 31))  # new feature rows, and the anchor after them

_BASE: Config = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "num_target_layers": 9,
    "attention_bias": False,
    "rope_theta": 10_000.0,
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": 39, "target_layer_ids": [1, 4, 6]},
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 8}
_ALL_SLIDING = {**_SLIDING, "layer_types": ["sliding_attention"] * 3}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}


def _case(*, nested: Config | None = None, without: tuple[str, ...] = (), **changes: Any) -> Config:
    """The plain case with `changes`, with those in `dflash_config` (None takes a field out), `without` some fields."""
    inner = {**_BASE["dflash_config"], **(nested or {})}
    config = {**_BASE, **changes, "dflash_config": {name: value for name, value in inner.items() if value is not None}}
    return {name: value for name, value in config.items() if name not in without}


CASES: dict[str, Config] = {
    "full": _case(),
    "newer fields": _case(
        nested={"block_size": BLOCK},
        without=("block_size", "rope_theta"),
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
    ),
    "both block sizes": _case(nested={"block_size": 4}),
    "neither block size nor layers": _case(nested={"target_layer_ids": None}, without=("block_size",)),
    "sliding and full": _case(**_SLIDING, layer_types=["sliding_attention", "sliding_attention", "full_attention"]),
    "all sliding": _case(**_ALL_SLIDING),
    "sliding, bidirectional": _case(**_ALL_SLIDING, is_causal=False),
    "causal": _case(is_causal=True),
    "biases": _case(attention_bias=True),
    "soft cap and scales": _case(
        nested={"final_logit_softcapping": 2.5, "output_multiplier": 0.4, "input_embedding_scale": 5.5}
    ),
    "soft cap of Gemma": _case(final_logit_softcapping=3.0),
    "yarn": _case(rope_scaling=_YARN),
    "yarn in rope_parameters": _case(without=("rope_theta",), rope_parameters={**_YARN, "rope_theta": 150_000.0}),
    "yarn of gpt-oss": _case(
        rope_theta=150_000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn with its factor": _case(rope_scaling={**_YARN, "attention_factor": 1.25}),
    "yarn of Kimi": _case(rope_scaling={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 2.0}),
    "llama3 rope": _case(
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    ),
    "second": _case(**_ALL_SLIDING, architectures=["DFlash2DraftModel"], is_causal=False, nested=_SECOND),
    "second, three taps, soft cap": _case(
        architectures=["DFlash2DraftModel"],
        nested={**_SECOND, "conv_kernel_size": 3, "conv_group_size": 4, "final_logit_softcapping": 2.0},
    ),
}
# What the official MLX code cannot read, or reads otherwise than the official PyTorch code.
NOT_IN_MLX = ("neither block size nor layers", "biases", "yarn of gpt-oss", "yarn with its factor")
LAYER_IDS = (1, 4, 6)  # also what a checkpoint with three layers means that names none


@dataclass
class Inputs:
    """What a drafter is run on: embedding and head (V, D), and for each round features (1, L, taps * D)."""

    embedding: np.ndarray
    head: np.ndarray
    features: list[np.ndarray]


def make_inputs() -> Inputs:
    random = np.random.RandomState(11)
    size = len(LAYER_IDS) * HIDDEN
    return Inputs(
        embedding=_normal(random, VOCAB, HIDDEN),
        head=_normal(random, VOCAB, HIDDEN) * 0.5,
        features=[_normal(random, 1, rows, size) for rows, _ in ROUNDS],
    )


def make_weights(config: Config) -> dict[str, np.ndarray]:
    """Random weights under the public names. Every kind of tensor matters in the result."""
    random = np.random.RandomState(7)
    heads, kv_heads = config["num_attention_heads"] * HEAD_DIM, config["num_key_value_heads"] * HEAD_DIM
    weights = {
        "fc.weight": _matrix(random, HIDDEN, len(LAYER_IDS) * HIDDEN),
        "hidden_norm.weight": _gain(random, HIDDEN),
        "norm.weight": _gain(random, HIDDEN),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        for name, rows, columns in (
            ("q", heads, HIDDEN),
            ("k", kv_heads, HIDDEN),
            ("v", kv_heads, HIDDEN),
            ("o", HIDDEN, heads),
        ):
            weights[f"{layer}.self_attn.{name}_proj.weight"] = _matrix(random, rows, columns)
            if config["attention_bias"]:
                weights[f"{layer}.self_attn.{name}_proj.bias"] = _normal(random, rows)
        for name in ("q_norm", "k_norm"):
            weights[f"{layer}.self_attn.{name}.weight"] = _gain(random, HEAD_DIM)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = _gain(random, HIDDEN)
        inner = config["intermediate_size"]
        for name, rows, columns in (("gate", inner, HIDDEN), ("up", inner, HIDDEN), ("down", HIDDEN, inner)):
            weights[f"{layer}.mlp.{name}_proj.weight"] = _matrix(random, rows, columns)
    if is_second(config):
        weights |= _second_weights(config, random)
    return weights


def _second_weights(config: Config, random: np.random.RandomState) -> dict[str, np.ndarray]:
    nested = config["dflash_config"]
    taps, rank = nested["conv_kernel_size"], nested["selector_rank"]
    kernels = 2 * taps * HIDDEN // nested["conv_group_size"]
    weights = {}
    for i in range(config["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            weights[f"layers.{i}.{name}.base_kernel"] = _normal(random, 2, taps, HIDDEN) * 0.6
            weights[f"layers.{i}.{name}.kernel_projection.weight"] = _matrix(random, kernels, HIDDEN) * 0.5
    for name in ("predecessor_codebook", "successor_codebook"):
        weights[f"candidate_selector.{name}"] = _normal(random, VOCAB, rank)
    weights["candidate_selector.hidden_projection.weight"] = _matrix(random, rank, HIDDEN)
    return weights


def is_second(config: Config) -> bool:
    return "DFlash2DraftModel" in config["architectures"]


def write_folder(folder: Path, config: Config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(make_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _normal(random: np.random.RandomState, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def _matrix(random: np.random.RandomState, rows: int, columns: int) -> np.ndarray:
    return (_normal(random, rows, columns) * 1.5 / columns**0.5).astype(np.float32)


def _gain(random: np.random.RandomState, size: int) -> np.ndarray:
    return (1 + 0.2 * _normal(random, size)).astype(np.float32)
