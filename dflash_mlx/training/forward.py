"""The drafter's forward for training: many blocks of many sequences at once, with the decode loop's own modules.

Block a of a sequence starts at anchor position n. Its rows see the target's features at positions below n and the rows
of their own block, nothing else; positions and rotary embedding are those of the decode loop. So the scores are two
parts joined in one softmax, context (A * K rows by T) and block (K by K), instead of A * K rows by T + A * K.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from dflash_mlx.drafters.dflash import DFlashDrafter, DraftAttention
from dflash_mlx.targets.taps import tapped
from dflash_mlx.targets.target import Target


def target_features(target: Target, tokens: mx.array, layer_ids: Sequence[int]) -> mx.array:
    """tokens (B, T) -> the target's tapped layer outputs (B, T, taps * D), without gradient."""
    with tapped(target.layers, layer_ids) as outputs:
        target.model(tokens)
    return mx.stop_gradient(mx.concatenate([outputs[i] for i in layer_ids], axis=-1))


def feature_sizes(target: Target, texts: Iterable[mx.array], layer_ids: Sequence[int]) -> mx.array:
    """The mean size of each feature, |x| over the tokens of `texts` (B, T) each; (taps * D,) float32, above 0.

    Residual streams grow with depth and have a few channels a thousand times larger than the others (Gemma's most of
    all), which say nearly the same of every token. Divided by their sizes, features of all layers and channels count.
    """
    means = [mx.abs(target_features(target, text, layer_ids).astype(mx.float32)).mean(axis=(0, 1)) for text in texts]
    sizes = mx.stack(means).mean(axis=0)
    return mx.maximum(sizes, 1e-3 * sizes.mean() + 1e-12)


def draft_hidden(
    drafter: DFlashDrafter,
    embed: Callable[[mx.array], mx.array],
    features: mx.array,
    anchor_tokens: mx.array,
    anchors: mx.array,
    sizes: mx.array | None = None,
) -> mx.array:
    """Hidden states of all blocks, ready for the target's vocabulary head.

    features: (B, T, taps * D). anchor_tokens, anchors: (B, A), the token at each anchor and its position. sizes:
    (B, A), the rows of each block, whose further rows mean nothing; None for whole blocks. Returns (B, A, K, D) for
    blocks of K; row j predicts the token j places after the anchor, row 0 is unused.
    """
    config = drafter.config
    batch, count = anchors.shape
    masks = mx.full((batch, count, config.block_size - 1), config.mask_token_id, dtype=anchor_tokens.dtype)
    block = mx.concatenate([anchor_tokens[..., None], masks], axis=-1).reshape(batch * count, config.block_size)
    h = embed(block).astype(features.dtype)
    if config.input_embedding_scale != 1.0:
        h = h * config.input_embedding_scale
    context = drafter.hidden_norm(drafter.fc(features))
    for i, layer in enumerate(drafter.layers):
        window = config.sliding_window if config.layer_is_sliding(i) else None
        seen = visible(
            anchors,
            features.shape[1],
            config.block_size,
            causal=config.layer_is_causal(i),
            window=window,
            sizes=sizes,
        )
        attend = partial(
            block_attention, layer.self_attn, context=context, rope=drafter.rope_of(i), anchors=anchors, seen=seen
        )
        h = layer.around(h, attend)
    return drafter.norm(h).reshape(batch, count, config.block_size, -1)


def visible(
    anchors: mx.array, length: int, block: int, *, causal: bool, window: int | None, sizes: mx.array | None = None
) -> tuple[mx.array, mx.array | None]:
    """What block rows may see: context positions, (B, A, 1 or K, T) bool, and rows of their block.

    Those are (B or 1, A or 1, 1 or K, K), or None where all rows see all.
    """
    columns = mx.arange(length)
    starts = anchors[:, :, None, None]
    context = columns < starts
    if not causal and window is None and sizes is None:
        return context, None
    rows = mx.arange(block)
    inside = mx.ones((1, 1, 1, block), dtype=mx.bool_)
    if sizes is not None:
        # A row that means nothing sees itself: one that sees nothing would be no number, and spoil its block.
        inside = (rows < sizes[:, :, None, None]) | (rows[:, None] == rows)
    if causal:
        inside = inside & (rows[None] <= rows[:, None])
    if window is not None:
        context = context & (starts + rows[:, None] - columns < window)
        inside = inside & (mx.abs(rows[None] - rows[:, None]) < window)
    return context, inside


def block_attention(
    attention: DraftAttention,
    x: mx.array,
    context: mx.array,
    rope: nn.Module,
    anchors: mx.array,
    seen: tuple[mx.array, mx.array | None],
) -> mx.array:
    """Attention of blocks x (B * A, K, D) over context (B, T, D) and themselves, written out.

    The fused attention of MLX has no usable gradient with an array mask on CUDA.
    """
    batch, count = anchors.shape
    block, kv_heads = x.shape[1], attention.num_kv_heads
    group = attention.num_heads // kv_heads
    positions = anchors.reshape(-1)
    context_keys, context_values = attention.keys_and_values(context, rope, 0)
    keys, values = attention.keys_and_values(x, rope, positions)
    queries = attention.q_proj(x).reshape(batch * count, block, attention.num_heads, -1)
    queries = rope(attention.q_norm(queries).transpose(0, 2, 1, 3), offset=positions) * attention.scale
    head_dim = queries.shape[-1]

    # (B * A, kv, group * K, d) for the block's own keys, (B, kv, A * group * K, d) for the context's.
    own = queries.reshape(batch * count, kv_heads, group * block, head_dim)
    shape = (batch, kv_heads, count, group, block)
    by_row = own.reshape(batch, count, kv_heads, group * block, head_dim).transpose(0, 2, 1, 3, 4)
    by_row = by_row.reshape(batch, kv_heads, count * group * block, head_dim)
    outside_scores = (by_row @ context_keys.swapaxes(-1, -2)).reshape(*shape, -1)
    inside_scores = (own @ keys.swapaxes(-1, -2)).reshape(batch, count, kv_heads, group, block, block)
    inside_scores = inside_scores.transpose(0, 2, 1, 3, 4, 5)

    context_seen, block_seen = seen
    nothing = mx.array(-mx.inf, dtype=outside_scores.dtype)
    outside_scores = mx.where(context_seen[:, None, :, None], outside_scores, nothing)
    if block_seen is not None:
        inside_scores = mx.where(block_seen[:, None, :, None], inside_scores, nothing)
    weights = mx.softmax(mx.concatenate([outside_scores, inside_scores], axis=-1), axis=-1, precise=True)

    length = context.shape[1]
    outside = weights[..., :length].reshape(batch, kv_heads, count * group * block, length) @ context_values
    outside = outside.reshape(*shape, head_dim).transpose(0, 2, 1, 3, 4, 5)
    inside = weights[..., length:].transpose(0, 2, 1, 3, 4, 5).reshape(-1, kv_heads, group * block, block) @ values
    out = outside.reshape(-1, attention.num_heads, block, head_dim) + inside.reshape(
        -1, attention.num_heads, block, head_dim
    )
    return attention.o_proj(out.transpose(0, 2, 1, 3).reshape(batch * count, block, -1))
