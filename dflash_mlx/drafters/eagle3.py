"""The EAGLE-3 drafter (arXiv 2503.01840, section 3): one layer over the target's features and the tokens after them.

It reads three layers of the target, mixed into one feature of a position, together with the embedding of the next
token. While it drafts, what it computed at a place stands for that place's feature. Trees are grown (`growing.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from dflash_mlx.drafters.config import Rope
from dflash_mlx.drafters.contract import DraftVocabulary
from dflash_mlx.drafters.dflash import DraftMLP
from dflash_mlx.drafters.rope import make_rope
from dflash_mlx.drafters.stepwise import StepwiseDrafter
from dflash_mlx.targets.target import Target

# The published ones draft 5 to 8 places.
PLACES, MOST_PLACES = 7, 15


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """The shape of an EAGLE-3 drafter.

    target_layer_ids: 0-based decoder layers of the target whose *outputs* are its features. draft_token_ids: the tokens
    that it drafts, () for all of the target's. norm_before_residual: the features are normalized before the residual
    stream begins with them; norm_before_fc: and before they are mixed.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    rope: Rope
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    own_embedding: bool = False
    draft_token_ids: tuple[int, ...] = ()


class Eagle3Attention(nn.Module):
    """Causal attention whose input is a token's embedding beside a feature, (B, L, 2 * D)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scale = head_dim**-0.5
        self.q_proj = nn.Linear(2 * size, self.num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(2 * size, self.num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(2 * size, self.num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * head_dim, size, bias=bias)
        self._rope = make_rope(config.rope, head_dim, config.max_position_embeddings)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        batch, length, _ = x.shape
        queries, keys, values = (
            projected.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)
            for projected, heads in (
                (self.q_proj(x), self.num_heads),
                (self.k_proj(x), self.num_kv_heads),
                (self.v_proj(x), self.num_kv_heads),
            )
        )
        queries = self._rope(queries, offset=cache.offset)
        keys, values = cache.update_and_fetch(self._rope(keys, offset=cache.offset), values)
        out = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class Eagle3Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self.mlp = DraftMLP(size, config.intermediate_size)

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """Embeddings of tokens and the features before them, both (B, L, D) -> (B, L, D)."""
        normed = self.hidden_norm(hidden)
        x = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        residual = normed if self.norm_before_residual else hidden
        h = residual + self.self_attn(x, create_attention_mask(x, cache), cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class Eagle3Network(nn.Module):
    """The weights, under the names of the authors' checkpoints."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        features = len(config.target_layer_ids) * config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(features, eps=eps)
        self.fc = nn.Linear(features, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = nn.RMSNorm(size, eps=eps)
        self.lm_head = nn.Linear(size, len(config.draft_token_ids) or config.vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)


class Eagle3Drafter(StepwiseDrafter):
    """See `StepwiseDrafter`. What is said of a position is the layer's output, not normalized."""

    method = "eagle3"
    supports_trees = True

    def __init__(self, config: Eagle3Config, network: Eagle3Network, *, places: int = PLACES) -> None:
        super().__init__(network, places=places)
        self.config, self.network = config, network

    @property
    def dtype(self) -> mx.Dtype:
        """What it computes in; features and embeddings of another type are cast."""
        return self.network.norm.weight.dtype

    @property
    def taps(self) -> Sequence[int]:
        return self.config.target_layer_ids

    def misfits(self, target: Target) -> list[str]:
        config, layers, found = self.config, len(target.layers), []
        if config.target_hidden_size != target.hidden_size:
            found.append(
                f"it reads features of the size {config.target_hidden_size}, the target's have {target.hidden_size}"
            )
        if config.hidden_size != target.hidden_size and not config.own_embedding:
            found.append(
                f"it has no embedding and a hidden size of {config.hidden_size}, the target's is {target.hidden_size}"
            )
        if config.vocab_size != target.vocab_size:
            found.append(f"it was made for a vocabulary of {config.vocab_size}, the target has {target.vocab_size}")
        outside = [i for i in config.target_layer_ids if not 0 <= i < layers]
        if outside:
            found.append(f"it reads target layers {outside}, the target has layers 0 to {layers - 1}")
        return found

    def vocabulary(self, target: Target) -> DraftVocabulary | None:
        return DraftVocabulary.of(self.config.draft_token_ids, target.vocab_size)

    def make_layer_caches(self) -> list[Any]:
        return [KVCache()]

    def project(self, features: mx.array) -> mx.array:
        features = features.astype(self.dtype)
        if self.config.norm_before_fc:
            features = self.network.input_norm(features)
        return self.network.fc(features)

    def feed(self, target: Target, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        embed = self.network.embed_tokens if self.config.own_embedding else target.embed
        return self.network.midlayer(embed(tokens).astype(self.dtype), hidden, caches[0])

    def logits(self, target: Target, hidden: mx.array) -> mx.array:
        return self.network.lm_head(self.network.norm(hidden))
