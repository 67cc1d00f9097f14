"""EAGLE-3 folders -> drafters: the authors' layout, SGLang's and that of vLLM's speculators."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.checkpoint import Weights, filled, read_weights, reduced_vocabulary
from dflash_mlx.drafters.config import parse_ropes
from dflash_mlx.drafters.eagle3 import PLACES, Eagle3Config, Eagle3Drafter, Eagle3Network
from dflash_mlx.errors import WRONG_VALUES, CheckpointError
from dflash_mlx.hub.folder import read_json
from dflash_mlx.targets.target import Target

# What the target has, too, or what can be computed.
_UNUSED = ("verifier_norm.", "verifier_lm_head.", "midlayer.self_attn.rotary_emb.")
# LlamaConfig's own values: speculators may write only what differs from them.
_LLAMA_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def is_eagle3(raw: dict[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 drafter, in any layout."""
    names = [raw.get("speculators_model_type"), *(raw.get("architectures") or ())]
    return any("eagle3" in str(name).lower().replace("-", "") for name in names)


def load_eagle3(folder: Path, target: Target, *, dtype: mx.Dtype, places: int = PLACES) -> Eagle3Drafter:
    """Read a folder with config.json and weights, safetensors or `pytorch_model.bin`, for a target.

    `dtype` is the target's; weights may be quantized by MLX (see `checkpoint.filled`). Raises CheckpointError.
    """
    raw = read_json(folder / "config.json")
    config = parse_eagle3_config(raw)
    weights = _weights(folder)
    size = raw.get("draft_vocab_size")
    ids = reduced_vocabulary(weights, size=None if size is None else int(size), of=config.vocab_size)
    config = replace(
        config,
        target_layer_ids=config.target_layer_ids or default_layers(len(target.layers)),
        draft_token_ids=ids,
        own_embedding="embed_tokens.weight" in weights,
    )
    try:
        network = Eagle3Network(config)
    except WRONG_VALUES as error:
        raise _not_described(error) from error
    network = filled(network, weights, folder, quantization=raw.get("quantization"), dtype=dtype)
    return Eagle3Drafter(config, network, places=places)


def _not_described(error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the drafter's config.json does not describe an EAGLE-3 drafter: {error}. Fetch the folder again."
    )


def default_layers(count: int) -> tuple[int, ...]:
    """The layers that a checkpoint means which names none, of so many: as in the authors' code, 0 being the first."""
    return 1, count // 2 - 1, count - 4


def parse_eagle3_config(raw: dict[str, Any]) -> Eagle3Config:
    """Read a config.json, in any layout; target_layer_ids is empty where it names none. Raises CheckpointError."""
    try:
        return _parse(raw)
    except WRONG_VALUES as error:
        raise _not_described(error) from error


def _parse(raw: dict[str, Any]) -> Eagle3Config:
    """The same. Raises what wrong types of values lead to, too."""
    fields = {**raw, **(raw.get("transformer_layer_config") or {})}
    if "transformer_layer_config" in raw and fields.get("model_type") in (None, "llama"):
        fields = {**_LLAMA_DEFAULTS, **fields}
    _refuse_unsupported(fields)

    def required(name: str) -> int:
        if fields.get(name) is None:
            raise CheckpointError(f"the drafter's config.json has no {name!r}; the checkpoint is incomplete.")
        return int(fields[name])

    size, heads = required("hidden_size"), required("num_attention_heads")
    rope, _ = parse_ropes(fields)
    return Eagle3Config(
        hidden_size=size,
        target_hidden_size=int(fields.get("target_hidden_size") or size),
        intermediate_size=required("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or size // heads),
        vocab_size=required("vocab_size"),
        target_layer_ids=_target_layer_ids(raw),
        rope=rope,
        rms_norm_eps=float(fields.get("rms_norm_eps") or 1e-6),
        max_position_embeddings=int(fields.get("max_position_embeddings") or 2048),
        attention_bias=bool(fields.get("attention_bias")),
        norm_before_residual=bool(fields.get("norm_before_residual")),
        norm_before_fc=bool(fields.get("norm_before_fc")),
    )


def _target_layer_ids(raw: dict[str, Any]) -> tuple[int, ...]:
    """The layers whose outputs are read. speculators names the layers that come after them, SGLang the layers."""
    before = raw.get("eagle_aux_hidden_state_layer_ids")
    own = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if before and 0 in before:
        raise CheckpointError(
            f"the drafter reads the target's embedding (eagle_aux_hidden_state_layer_ids {list(before)} hold 0); only "
            "layers' outputs, 1 and above, can be read here. Choose another drafter, or run with --no-draft."
        )
    if before:
        return tuple(int(i) - 1 for i in before)
    return tuple(int(i) for i in own or ())


def _refuse_unsupported(fields: dict[str, Any]) -> None:
    """Raise CheckpointError for parts for which there is no code, naming them."""
    nested = fields.get("eagle_config") or {}
    sliding = [kind for kind in fields.get("layer_types") or () if kind != "full_attention"]
    missing = [
        (fields.get("num_hidden_layers") not in (None, 1), f"{fields.get('num_hidden_layers')} layers"),
        (fields.get("hidden_act") not in (None, "silu", "swish"), f"hidden_act {fields.get('hidden_act')!r}"),
        (bool(fields.get("mlp_bias")), "biases in its MLP (mlp_bias)"),
        (bool(fields.get("norm_output")), "a norm between its drafts (norm_output)"),
        (bool(fields.get("fc_norm")), "a norm for each of the target's layers (fc_norm)"),
        (bool(fields.get("parallel_drafting")), "drafts made in parallel (parallel_drafting)"),
        (bool(sliding or fields.get("use_sliding_window")), "a sliding window"),
        (nested.get("use_aux_hidden_state") is False, "features of one layer only (use_aux_hidden_state false)"),
    ]
    parts = [part for there, part in missing if there]
    if parts:
        raise CheckpointError(
            f"the drafter has {' and '.join(parts)}, for which there is no code; this version runs EAGLE-3 drafters "
            "with one layer, in the authors' layout, SGLang's or that of speculators. Choose another drafter, or run "
            "with --no-draft."
        )


def _weights(folder: Path) -> Weights:
    """The folder's tensors, under the authors' names."""
    renamed = {name.replace("layers.0.", "midlayer.", 1): array for name, array in read_weights(folder).items()}
    return {name: array for name, array in renamed.items() if not name.startswith(_UNUSED)}
