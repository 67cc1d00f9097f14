"""The DFlash drafter (arXiv 2602.06036, section 3): one forward drafts a whole block.

The block is the anchor (newest token) followed by mask tokens. Its queries see the target's features of every
earlier position as extra keys and values, and each other. Only the features' keys and values are kept between
rounds: a block's own are written after them, for as long as it is drafted, and the next features take their place.
"""

from collections.abc import Callable, Sequence
from copy import copy
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from dflash_mlx.caches.row_layers import RowKVCache
from dflash_mlx.caches.rows import Rows
from dflash_mlx.drafters.attention_mask import BlockMask, block_mask
from dflash_mlx.drafters.config import DraftConfig
from dflash_mlx.drafters.contract import Drafted, DraftVocabulary, Writer, draft_each_place
from dflash_mlx.drafters.denoising import DFlashConfig
from dflash_mlx.drafters.dflash_state import DFlashState
from dflash_mlx.drafters.rope import make_rope
from dflash_mlx.targets.target import Target


class DraftAttention(nn.Module):
    """Grouped-query attention of a block over the target's features and itself."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.scale = head_dim**-0.5
        self.q_proj = nn.Linear(size, self.num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(size, self.num_kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(size, self.num_kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * head_dim, size, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, eps=config.rms_norm_eps)

    def keys_and_values(self, x: mx.array, rope: nn.Module, position: int | mx.array) -> tuple[mx.array, mx.array]:
        """x: (B, L, D), from `position`, () or (B,), on -> keys and values (B, num_kv_heads, L, head_dim)."""
        batch, length, _ = x.shape
        keys = self.k_norm(self.k_proj(x).reshape(batch, length, self.num_kv_heads, -1)).transpose(0, 2, 1, 3)
        values = self.v_proj(x).reshape(batch, length, self.num_kv_heads, -1).transpose(0, 2, 1, 3)
        return rope(keys, offset=position), values

    def __call__(self, x: mx.array, cache: RowKVCache, rope: nn.Module, seen: BlockMask) -> mx.array:
        """x: (B, L, D), blocks at the positions where the cache's rows end. They are written there."""
        batch, length, _ = x.shape
        queries = self.q_norm(self.q_proj(x).reshape(batch, length, self.num_heads, -1)).transpose(0, 2, 1, 3)
        queries = rope(queries, offset=cache.offset)
        keys, values = cache.update_and_fetch(*self.keys_and_values(x, rope, cache.offset))
        out = scaled_dot_product_attention(
            queries, seen.read(keys), seen.read(values), cache=None, scale=self.scale, mask=seen.mask
        )
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class DraftMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, x: mx.array, cache: RowKVCache, rope: nn.Module, seen: BlockMask) -> mx.array:
        return self.around(x, lambda normed: self.self_attn(normed, cache, rope, seen))

    def around(self, x: mx.array, attend: Callable[[mx.array], mx.array]) -> mx.array:
        """The layer around its attention. x: (blocks, rows, D); `attend` takes and returns the same shape."""
        h = x + attend(self.input_layernorm(x))
        return h + self.mlp(self.post_attention_layernorm(h))


class DFlashDrafter(nn.Module):
    """A DFlash drafter. Token embeddings and vocabulary head are the target's, unless the checkpoint brings its own
    row for the mask token or its own head for the tokens that it drafts.
    """

    layer_class: type[DraftLayer] = DraftLayer
    drafts_on_host = False
    drafting = DFlashConfig()

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [self.layer_class(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.own_mask_embedding:
            self.mask_embedding = mx.zeros((config.hidden_size,))
        if config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, len(config.draft_token_ids), bias=False)
        self._ropes = {
            kind: make_rope(config.rope_of(kind), config.head_dim, config.max_position_embeddings)
            for kind in set(config.layer_types)
        }

    def drafting_as(self, drafting: DFlashConfig) -> "DFlashDrafter":
        """The same drafter, with the same weights, which drafts in as many steps as that says."""
        other = copy(self)
        other.drafting = drafting
        return other

    @property
    def method(self) -> str:
        steps, schedule = self.drafting.diffusion_steps, self.drafting.noise_schedule
        return "dflash" if steps == 1 else f"dflash({steps} {schedule} steps)"

    @property
    def supports_trees(self) -> bool:
        # In one step places do not depend on each other.
        return self.drafting.diffusion_steps == 1

    @property
    def allows_rejection(self) -> bool:
        # Judging by rejection goes from left to right; a place drafted in a later step may know tokens after it.
        return self.drafting.diffusion_steps == 1

    @property
    def dtype(self) -> mx.Dtype:
        """What it computes in. Features and embeddings of another type are cast on their way in, and results back."""
        return self.norm.weight.dtype

    @property
    def places(self) -> int:
        return self.config.block_size - 1

    @property
    def taps(self) -> Sequence[int]:
        return self.config.target_layer_ids

    @property
    def networks(self) -> Sequence[nn.Module]:
        return [self]

    def rehearsal(self) -> "DFlashDrafter":
        return self

    def misfits(self, target: Target) -> list[str]:
        config, layers = self.config, len(target.layers)
        found = []
        if config.hidden_size != target.hidden_size:
            found.append(f"it was made for a hidden size of {config.hidden_size}, the target has {target.hidden_size}")
        if config.vocab_size != target.vocab_size:
            found.append(f"it was made for a vocabulary of {config.vocab_size}, the target has {target.vocab_size}")
        if config.num_target_layers not in (None, layers):
            found.append(f"it was made for {config.num_target_layers} target layers, the target has {layers}")
        outside = [i for i in config.target_layer_ids if not 0 <= i < layers]
        if outside:
            found.append(f"it reads target layers {outside}, the target has layers 0 to {layers - 1}")
        if any(a >= b for a, b in pairwise(config.target_layer_ids)):
            found.append(f"its target layers {list(config.target_layer_ids)} are not in rising order")
        return found

    def read(
        self, target: Target, tokens: mx.array, features: mx.array | None, caches: Sequence[KVCache | RowKVCache]
    ) -> None:
        assert features is not None
        self.extend_context(features, caches)

    def open(self, target: Target, caches: Sequence[KVCache], length: int) -> DFlashState:
        return DFlashState.of(self, target, caches, length)

    def blank(self, target: Target, rows: int, positions: int) -> DFlashState:
        return DFlashState.blank(self, target, rows, positions)

    def choose(
        self,
        writers: Sequence[Writer],
        logits: mx.array,
        hidden: mx.array,
        *,
        anchors: mx.array,
        position: mx.array,
        vocabulary: DraftVocabulary | None,
        tree: bool,
    ) -> Drafted:
        """Drafts of B answers after their `anchors` (B,), by the logits (B, W, n) and hidden states (B, W, D) of W
        places, the first of which are at `position` (B,). tree: of the only answer a tree is wanted.
        """
        return draft_each_place(writers, logits, position, vocabulary)

    def rope_of(self, layer: int) -> nn.Module:
        return self._ropes[self.config.layer_types[layer]]

    def make_cache(self) -> list[KVCache]:
        return [KVCache() for _ in self.layers]

    def filled(self, cache: Sequence[KVCache]) -> Sequence[KVCache]:
        """The same caches, with buffers also where nothing was ever written."""
        shape = (1, self.config.num_key_value_heads, 1, self.config.head_dim)
        for layer_cache in cache:
            if layer_cache.keys is None:
                layer_cache.keys, layer_cache.values = mx.zeros(shape, self.dtype), mx.zeros(shape, self.dtype)
        return cache

    def embed_block(self, tokens: mx.array, embed: Callable[[mx.array], mx.array]) -> mx.array:
        """Embeddings (B, L, D) of blocks of tokens (B, L), by the target's `embed` or the drafter's own mask row."""
        embedded = embed(tokens)
        if not self.config.own_mask_embedding:
            return embedded
        is_mask = (tokens == self.config.mask_token_id)[..., None]
        return mx.where(is_mask, self.mask_embedding.astype(embedded.dtype), embedded)

    def extend_context(self, target_hidden: mx.array, cache: Sequence[KVCache | RowKVCache]) -> None:
        """Write the keys and values of the next positions' features into the cache.

        target_hidden: (B, L, taps * D), the target's tapped layer outputs, for the L positions after those
        that the cache already holds.
        """
        context = self.hidden_norm(self.fc(target_hidden.astype(self.dtype)))
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            keys, values = layer.self_attn.keys_and_values(context, self.rope_of(i), layer_cache.offset)
            layer_cache.update_and_fetch(keys, values)

    def __call__(self, block: mx.array, rows: Rows) -> mx.array:
        """Hidden states of blocks, ready for the target's vocabulary head.

        block: (B, L, D) embeddings of each answer's anchor and L - 1 mask tokens. `rows` holds the features' keys and
        values; its lengths are the anchors' positions, and there is room for the block after them. Returns (B, L, D);
        row i predicts the token i places after the anchor, row 0 is unused.
        """
        config = self.config
        seen = self._masks(block.shape[1], rows)
        h = block.astype(self.dtype)
        if config.input_embedding_scale != 1.0:
            h = h * config.input_embedding_scale
        for i, (layer, layer_cache) in enumerate(zip(self.layers, rows.layers, strict=True)):
            h = layer(h, layer_cache, self.rope_of(i), seen[config.layer_types[i]])
        return self.norm(h).astype(block.dtype)

    def _masks(self, block: int, rows: Rows) -> dict[str, BlockMask]:
        """What a block's rows see, by layer type."""
        masks = {}
        for kind, i in {kind: i for i, kind in enumerate(self.config.layer_types)}.items():
            window = self.config.sliding_window if self.config.layer_is_sliding(i) else None
            masks[kind] = block_mask(
                block, rows.lengths.seen, rows.lengths.value, causal=self.config.layer_is_causal(i), window=window
            )
        return masks

    def adjust_logits(self, logits: mx.array) -> mx.array:
        """Apply the checkpoint's output multiplier and soft cap to the target head's logits (any shape)."""
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return mx.tanh(logits / cap) * cap if cap else logits
