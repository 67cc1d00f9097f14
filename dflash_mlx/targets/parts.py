"""Where mlx-lm's classes keep what a drafter shares with its target: embeddings, head, final norm."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

# Where mlx-lm's classes keep a language model inside another module, and what they call its parts.
_HOLDERS = ("language_model", "model", "backbone", "transformer")
EMBEDDINGS = (
    "embed_tokens",
    "word_embeddings",
    "embeddings",
    "embedding",
    "tok_embeddings",
    "token_embeddings",
    "wte",
    "embed_in",
    "embed",
)
HEADS = ("lm_head", "output", "embed_out")
FINAL_NORMS = ("norm", "final_layernorm", "norm_f", "ln_f", "embedding_norm", "final_norm")
# Model files that multiply their embeddings by the root of the hidden size in passing.
_ROOT_SCALED = ("gemma", "gemma2", "gemma3_text", "gemma3n", "recurrent_gemma")


def embedding_scale(inner: nn.Module) -> float | None:
    """What a model multiplies its embeddings by before the first layer, or None."""
    for name in ("embed_scale", "embedding_multiplier"):
        if isinstance(getattr(inner, name, None), float | int):
            return float(getattr(inner, name))
    settings: Any = getattr(inner, "args", getattr(inner, "config", inner))
    if hasattr(settings, "scale_emb"):
        return float(settings.scale_emb)
    if type(inner).__module__.rpartition(".")[2] in _ROOT_SCALED:
        return float(settings.hidden_size**0.5)
    return None


def head_rows(head: nn.Module, ids: mx.array) -> Callable[[mx.array], mx.array]:
    """Some rows of a vocabulary head (a linear layer or an embedding, quantized or not), copied."""
    weight = head.weight[ids]
    if "scales" not in head:
        mx.eval(weight)
        return lambda hidden: hidden @ weight.T
    scales = head.scales[ids]
    biases = head.biases[ids] if head.get("biases") is not None else None
    mx.eval(weight, scales, *([biases] if biases is not None else []))
    return lambda hidden: mx.quantized_matmul(
        hidden, weight, scales, biases, transpose=True, group_size=head.group_size, bits=head.bits, mode=head.mode
    )


def candidates(model: nn.Module) -> list[nn.Module]:
    """The model and the modules in it that may hold the language model, outermost first."""
    found = [model]
    for holder in found:  # grows while it is walked
        found += [child for name in _HOLDERS if isinstance(child := holder.get(name), nn.Module)]
    return found
