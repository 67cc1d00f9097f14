"""The hyperparameters of a llama GGUF file -> config.json as Hugging Face writes it.

Every `llama.*` key is either read here or refused by name: an unknown one may change what the model computes.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.gguf_file import GGUFFile
from dflash_mlx.hub.gguf_tensors import Dense, Packed

_REQUIRED = {
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "context_length",
}
_OPTIONAL = {
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "vocab_size",
}
# Keys that are fine at the one value that changes nothing.
_ONLY_AT = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
}
# The largest sizes worth believing: far above any real model, low enough that arithmetic stays small.
_LIMITS = {
    "embedding_length": 2**20,
    "block_count": 10_000,
    "feed_forward_length": 2**24,
    "attention.head_count": 2**16,
}


@dataclass(frozen=True)
class LlamaShape:
    """The sizes that decide which tensors a llama model has."""

    layers: int
    hidden: int
    inner: int  # width of the feed-forward part
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool  # the output uses the embedding's matrix
    attention_bias: bool
    mlp_bias: bool

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor, in Hugging Face's names."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = {
            "self_attn.q_proj": (wide, self.hidden),
            "self_attn.k_proj": (narrow, self.hidden),
            "self_attn.v_proj": (narrow, self.hidden),
            "self_attn.o_proj": (self.hidden, wide),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden)}
        for layer in range(self.layers):
            stem = f"model.layers.{layer}"
            shapes[f"{stem}.input_layernorm.weight"] = (self.hidden,)
            shapes[f"{stem}.post_attention_layernorm.weight"] = (self.hidden,)
            for name, shape in matrices.items():
                shapes[f"{stem}.{name}.weight"] = shape
                if self.mlp_bias if name.startswith("mlp") else self.attention_bias:
                    shapes[f"{stem}.{name}.bias"] = shape[:1]
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden)
        return shapes

    def split_rotary_halves(self, name: str, tensor: Dense | Packed) -> Dense | Packed:
        """Put the rows of q and k into Hugging Face's order; other tensors are returned as they are.

        llama.cpp rotates neighbouring rows of a head (0 with 1, 2 with 3, ...), Hugging Face and MLX with
        `rope_traditional: false` rotate row i with row i + head_dim / 2. A row moves as a whole, so packed codes,
        scales and biases move the same way.
        """
        heads = {"q_proj": self.heads, "k_proj": self.kv_heads}.get(name.split(".")[-2])
        if heads is None:
            return tensor
        order = np.arange(heads * self.head_dim).reshape(heads, self.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
        if isinstance(tensor, Packed):
            return tensor.take_rows(order)
        return Dense(tensor.values[order], tensor.dtype)


def llama_config(file: GGUFFile) -> tuple[dict[str, Any], LlamaShape]:
    """config.json's content (without token ids and quantization) and the model's sizes.

    Raises CheckpointError for another architecture, and for a setting that is missing, impossible or not supported.
    """
    settings = _settings(file)
    shape = _shape(file, settings)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.inner,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(file, settings, "attention.layer_norm_rms_epsilon"),
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": settings["context_length"],
        "rope_theta": _decimal(file, settings, "rope.freq_base", 10000.0),
        "rope_traditional": False,
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
    }
    scaling = _rope_scaling(file, settings, config)
    if scaling:
        config["rope_scaling"] = scaling
    return config, shape


def _settings(file: GGUFFile) -> dict[str, Any]:
    """The `llama.*` metadata without its prefix, known keys only, plain values only."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture != "llama":
        raise CheckpointError(
            f"{file.path} holds a model of architecture {architecture!r}; GGUF files are read for 'llama' only. "
            "Use the model's safetensors checkpoint instead."
        )
    settings: dict[str, Any] = {}
    for key, value in file.metadata.items():
        name = key.removeprefix("llama.")
        if name == key:
            continue
        value = _one_value(file, key, value)
        if name in _ONLY_AT:
            if value != _ONLY_AT[name]:
                raise CheckpointError(
                    f"{file.path}: {key} is {value!r}, which is not supported; only {_ONLY_AT[name]!r} is."
                )
        elif name in _REQUIRED | _OPTIONAL:
            settings[name] = value
        else:
            raise CheckpointError(
                f"{file.path}: the setting {key} is not known here and may change what the model computes. "
                "Use the model's safetensors checkpoint instead."
            )
    missing = sorted(_REQUIRED - settings.keys())
    if missing:
        raise CheckpointError(f"{file.path}: the setting llama.{missing[0]} is missing.")
    return settings


def _one_value(file: GGUFFile, key: str, value: Any) -> Any:
    """A setting given for each layer is accepted where all layers agree."""
    if not isinstance(value, np.ndarray | list):
        return value
    if len(value) == 0 or any(item != value[0] for item in value):
        raise CheckpointError(f"{file.path}: {key} differs from layer to layer, which is not supported.")
    return value[0].item() if isinstance(value, np.ndarray) else value[0]


def _shape(file: GGUFFile, settings: dict[str, Any]) -> LlamaShape:
    def size(name: str, default: int | None = None) -> int:
        value = settings.get(name, default)
        if type(value) is not int or not 0 < value <= _LIMITS.get(name, 2**31):
            raise CheckpointError(f"{file.path}: llama.{name} is {value!r}; expected a positive whole number.")
        return value

    hidden, heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden // heads or None)
    for name in ("attention.value_length", "rope.dimension_count"):
        if size(name, head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: llama.{name} is {settings[name]}; only the head's {head_dim} is supported."
            )
    kv_heads = size("attention.head_count_kv", heads)
    if head_dim % 2 or heads % kv_heads:
        raise CheckpointError(f"{file.path}: {heads} heads of {head_dim} columns and {kv_heads} key heads do not fit.")
    size("context_length")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: the tensor 'token_embd.weight' is missing.")
    biased = {name.split(".")[-2].split("_")[0] for name in file.tensors if name.endswith(".bias")}
    return LlamaShape(
        layers=size("block_count"),
        hidden=hidden,
        inner=size("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        tied="output.weight" not in file.tensors,
        attention_bias="attn" in biased,
        mlp_bias="ffn" in biased,
    )


def _rope_scaling(file: GGUFFile, settings: dict[str, Any], config: dict[str, Any]) -> dict[str, Any] | None:
    factors = file.tensors.get("rope_freqs.weight")
    kind = settings.get("rope.scaling.type", "linear" if "rope.scale_linear" in settings else "none")
    factor = _decimal(file, settings, "rope.scaling.factor", _decimal(file, settings, "rope.scale_linear", 1.0))
    if factors is not None:
        if kind != "none":
            raise CheckpointError(f"{file.path}: rope factors together with {kind} rope scaling are not supported.")
        if factors.type.name != "F32" or factors.shape != (config["head_dim"] // 2,):
            raise CheckpointError(
                f"{file.path}: rope_freqs.weight is {factors.type.name} {factors.shape}; "
                f"expected F32 ({config['head_dim'] // 2},)."
            )
        return rope_from_factors(file.data(factors).reshape(-1).view("<f4"), config)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "type": "linear", "factor": factor}
    if kind == "yarn":
        length = settings.get("rope.scaling.original_context_length", config["max_position_embeddings"])
        if type(length) is not int or length < 1:
            raise CheckpointError(f"{file.path}: llama.rope.scaling.original_context_length is {length!r}.")
        return {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": length,
            "beta_fast": _decimal(file, settings, "rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": _decimal(file, settings, "rope.scaling.yarn_beta_slow", 1.0),
        }
    raise CheckpointError(f"{file.path}: rope scaling of type {kind!r} is not supported.")


def rope_from_factors(factors: np.ndarray, config: dict[str, Any]) -> dict[str, Any]:
    """Rope settings that divide the frequency of pair i by factors[i] (float32, head_dim / 2).

    Llama 3's rule is recognised and written as such. Other factors are written as the list of a `longrope` whose
    context is not stretched, so that its own attention scale is 1.
    """
    largest = float(factors.max())
    llama3 = {
        "rope_type": "llama3",
        "type": "llama3",
        "factor": _shortest(largest),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if np.allclose(factors, _llama3_factors(config, largest), rtol=1e-5, atol=0):
        return llama3
    if not (np.isfinite(factors).all() and factors.min() > 0):
        raise CheckpointError("rope_freqs.weight holds factors that are not positive numbers.")
    values = [float(value) for value in factors]
    return {
        "rope_type": "longrope",
        "type": "longrope",
        "factor": 1.0,
        "short_factor": values,
        "long_factor": values,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _llama3_factors(config: dict[str, Any], factor: float) -> np.ndarray:
    """Factor of each rotary pair: 1 for short waves, `factor` for long ones, a blend between (Llama 3.1)."""
    half = config["head_dim"] // 2
    waves = 2 * math.pi * config["rope_theta"] ** (np.arange(half) / half)
    blend = np.clip((8192 / waves - 1.0) / (4.0 - 1.0), 0, 1)
    return 1 / ((1 - blend) / factor + blend)


def _decimal(file: GGUFFile, settings: dict[str, Any], name: str, default: float | None = None) -> float:
    """A positive number of the settings."""
    value = settings.get(name, default)
    if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"{file.path}: llama.{name} is {value!r}; expected a positive number.")
    return _shortest(value)


def _shortest(value: float) -> float:
    """A float32 as the decimal it was written from: 9.99999974e-06 -> 1e-05."""
    return float(str(np.float32(value)))
