"""The DFlash drafter (arXiv 2602.06036, section 3): one forward drafts a whole block.

The block is the anchor (newest token) followed by mask tokens. Its queries see the target's features of every
earlier position as extra keys and values, and each other. Only the features' keys and values are kept between
rounds: a block's own are thrown away, so a drafter never has to roll anything back but rejected features.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope

from dflash_mlx.drafters.config import DraftConfig, parse_draft_config
from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.folder import read_json
from dflash_mlx.targets.device_cache import DeviceKVCache, held_rows
from dflash_mlx.targets.target import expand, keeps_quantized

DraftCache = KVCache | DeviceKVCache


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
        """x: (1, L, D), at `position` onwards -> keys and values (1, num_kv_heads, L, head_dim)."""
        batch, length, _ = x.shape
        keys = self.k_norm(self.k_proj(x).reshape(batch, length, self.num_kv_heads, -1)).transpose(0, 2, 1, 3)
        values = self.v_proj(x).reshape(batch, length, self.num_kv_heads, -1).transpose(0, 2, 1, 3)
        return rope(keys, offset=position), values

    def __call__(
        self, x: mx.array, cache: DraftCache, rope: nn.Module, position: int | mx.array, mask: mx.array | None
    ) -> mx.array:
        batch, length, _ = x.shape
        queries = self.q_norm(self.q_proj(x).reshape(batch, length, self.num_heads, -1)).transpose(0, 2, 1, 3)
        queries = rope(queries, offset=position)
        keys, values = self.keys_and_values(x, rope, position)
        held = held_rows(cache)
        if held is not None:
            keys = mx.concatenate([held[0], keys], axis=2)
            values = mx.concatenate([held[1], values], axis=2)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self.scale, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))


class DraftMLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, x: mx.array, cache: DraftCache, rope: nn.Module, position: int | mx.array, mask: mx.array | None
    ) -> mx.array:
        h = x + self.self_attn(self.input_layernorm(x), cache, rope, position, mask)
        return h + self.mlp(self.post_attention_layernorm(h))


class DFlashDrafter(nn.Module):
    """A DFlash drafter. Token embeddings and vocabulary head are the target's and are not part of it."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [DraftLayer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rope = initialize_rope(
            config.head_dim,
            config.rope_theta,
            traditional=False,
            scaling_config=config.rope_scaling,
            max_position_embeddings=config.max_position_embeddings,
        )

    def make_cache(self) -> list[DraftCache]:
        return [KVCache() for _ in self.layers]

    def extend_context(self, target_hidden: mx.array, cache: Sequence[DraftCache]) -> None:
        """Append the keys and values of the next positions' features to the cache.

        target_hidden: (1, L, taps * D), the target's tapped layer outputs, for the L positions after those
        that the cache already holds.
        """
        context = self.hidden_norm(self.fc(target_hidden))
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            layer_cache.update_and_fetch(*layer.self_attn.keys_and_values(context, self.rope, layer_cache.offset))

    def __call__(
        self, block: mx.array, cache: Sequence[DraftCache], *, context_length: int | mx.array | None = None
    ) -> mx.array:
        """Hidden states of a block, ready for the target's vocabulary head.

        block: (1, B, D) embeddings of the anchor and B - 1 mask tokens. `context_length` is the number of
        cached positions that are valid, and so the anchor's position: None means all of them (not with device
        caches). Given as an array it may still be unknown to the host. Returns (1, B, D); row i predicts the token
        i places after the anchor, row 0 is unused.
        """
        rows = held_rows(cache[0])
        held = rows[0].shape[2] if rows else 0
        position = held if context_length is None else context_length
        masks: dict[tuple[bool, bool], mx.array | None] = {}
        h = block * self.config.input_embedding_scale if self.config.input_embedding_scale != 1.0 else block
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            kind = (self.config.layer_is_causal(i), self.config.layer_is_sliding(i))
            if kind not in masks:
                causal, sliding = kind
                window = self.config.sliding_window if sliding else None
                masks[kind] = attention_mask(block.shape[1], held, context_length, causal=causal, window=window)
            h = layer(h, layer_cache, self.rope, position, masks[kind])
        return self.norm(h)

    def adjust_logits(self, logits: mx.array) -> mx.array:
        """Apply the checkpoint's output multiplier and soft cap to the target head's logits (any shape)."""
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return mx.tanh(logits / cap) * cap if cap else logits


def attention_mask(
    block: int, held: int, valid: int | mx.array | None, *, causal: bool, window: int | None
) -> mx.array | None:
    """Which of `held` cached positions and `block` block rows each block row may see.

    Boolean (block, held + block), or None where everything is visible. A row sees cached positions below
    `valid` (all of them when None); with a window only those less than `window` before it. Inside the block a
    row sees all rows, or those up to itself when `causal`.
    """
    if valid is None and not causal and window is None:
        return None
    if valid is None:
        valid = held
    rows = mx.arange(block)[:, None]
    columns = mx.arange(held + block)[None]
    in_block = columns - held
    context = (columns < held) & (columns < valid)
    inside = in_block >= 0
    if causal:
        inside = inside & (in_block <= rows)
    if window is not None:
        context = context & (valid + rows - columns < window)
        inside = inside & (mx.abs(in_block - rows) < window)
    return context | inside


def load_drafter(folder: Path, *, dtype: mx.Dtype, keep_quantized: bool | None = None) -> DFlashDrafter:
    """Read a drafter folder: config.json and safetensors in the public layout, quantized or not.

    `dtype` is the type of activations and unquantized weights; never float16, in which DFlash drafters
    overflow. Quantized weights are kept or expanded as `keep_quantized` says; None does what is faster here.
    Raises CheckpointError.
    """
    if dtype == mx.float16:
        dtype = mx.bfloat16
    raw = read_json(folder / "config.json")
    drafter = DFlashDrafter(parse_draft_config(raw))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"no .safetensors file in the drafter folder {folder}.")
    weights: dict[str, mx.array] = {}
    try:
        for file in files:
            weights.update(cast("dict[str, mx.array]", mx.load(str(file))))
    except RuntimeError as error:
        raise CheckpointError(f"cannot read the drafter's weights in {folder}: {error}") from error
    quantization = raw.get("quantization")
    if quantization:
        nn.quantize(
            drafter,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            mode=quantization.get("mode", "affine"),
            class_predicate=lambda path, module: hasattr(module, "to_quantized") and f"{path}.scales" in weights,
        )
    try:
        drafter.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise CheckpointError(f"the drafter's weights in {folder} do not fit its config.json: {error}") from error
    if keep_quantized is None:
        keep_quantized = keeps_quantized(drafter, dtype)
    if quantization and not keep_quantized:
        drafter = cast(DFlashDrafter, expand(drafter, dtype))
    else:
        drafter.set_dtype(dtype)
    drafter.eval()
    mx.eval(drafter.parameters())
    return drafter
