"""The shape of the drafter that a target gets."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from dflash_mlx.checks import check_shapes
from dflash_mlx.drafters.checkpoint import load_drafter
from dflash_mlx.drafters.checkpoint import make_drafter as random_drafter
from dflash_mlx.drafters.config import DFLASH2_FIELDS, DraftConfig
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.drafters.dialects import is_speculators
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.hub.folder import read_json
from dflash_mlx.targets.target import Target
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.template import ChatFrame
from dflash_mlx.training.trees import count_parameters

# DFlash 2's sizes in the public checkpoints, whose hidden sizes are 5,000 and more.
_KERNEL, _GROUP, _TOP_K = 2, 16, 16
_RANKS = (256, 128, 64, 32)
# The selector's codebooks have two rows for each token and would be most of a small drafter for a large vocabulary, so
# they hold at most this share of its other weights. Those of the public checkpoints hold less than a tenth.
_CODEBOOK_SHARE = 0.25


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """The paper's choice of `count` of a target's `layers`: evenly from layer 1 to the third-last."""
    if count == 1:
        return (layers // 2,)
    taps = {min(max(0, round(1 + i * (layers - 4) / (count - 1))), layers - 1) for i in range(count)}
    return tuple(sorted(taps))


def make_config(target: Target, tokenizer: Any, frame: ChatFrame, options: TrainOptions) -> DraftConfig:
    """The drafter's config: the target's width and heads, the options' depth, block and taps.

    Raises UsageError for taps that the target does not have.
    """
    heads = int(target.text_config("num_attention_heads"))
    depth = len(target.layers)
    taps = options.taps or default_taps(depth, options.num_taps)
    if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < depth:
        raise UsageError(f"taps should be rising layer numbers from 0 to {depth - 1}; got {list(taps)}.")
    sliding = options.sliding_window is not None
    config = DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=_feed_forward(target),
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=int(target.text_config("num_key_value_heads") or heads),
        head_dim=target.head_dim or target.hidden_size // heads,
        vocab_size=target.vocab_size,
        block_size=options.block_size,
        mask_token_id=options.mask_token if options.mask_token is not None else mask_token(target, tokenizer, frame),
        target_layer_ids=taps,
        num_target_layers=depth,
        rms_norm_eps=float(target.text_config("rms_norm_eps") or 1e-6),
        rope_theta=_rope_theta(target),
        max_position_embeddings=target.context_length or 32_768,
        layer_types=("sliding_attention" if sliding else "full_attention",) * options.layers,
        sliding_window=options.sliding_window,
    )
    # Blocks of the public DFlash 2 checkpoints see both ways in sliding layers, too.
    return config if options.heads == "dflash" else replace(with_dflash2_parts(config, options), is_causal=False)


def with_dflash2_parts(config: DraftConfig, options: TrainOptions) -> DraftConfig:
    """The config of a DFlash drafter with DFlash 2's parts, in the sizes that were asked for or that suit it.

    Raises UsageError for sizes that do not fit.
    """
    others = count_parameters(random_drafter(config).parameters())
    rank = next((r for r in _RANKS if 2 * config.vocab_size * r <= _CODEBOOK_SHARE * others), _RANKS[-1])
    second = replace(
        config,
        conv_kernel_size=options.conv_kernel_size or _KERNEL,
        conv_group_size=options.conv_group_size or math.gcd(config.hidden_size, _GROUP),
        selector_rank=options.selector_rank or rank,
        selector_top_k=options.selector_top_k or min(_TOP_K, config.vocab_size),
    )
    if second.hidden_size % second.conv_group_size:
        raise UsageError(
            f"conv-group-size should divide the hidden size {second.hidden_size}; got {second.conv_group_size}."
        )
    if second.selector_top_k > second.vocab_size:
        raise UsageError(
            f"selector-top-k should be at most the {second.vocab_size} tokens there are; got {second.selector_top_k}."
        )
    return second


def make_drafter(target: Target, tokenizer: Any, frame: ChatFrame, options: TrainOptions) -> DFlashDrafter:
    """A new drafter, or a copy of the one in `options.init_from`, whose shape then counts.

    A DFlash drafter may be given DFlash 2's parts, with which it drafts at first as without. Raises UsageError where
    the options ask for another shape, PairError where it does not fit the target.
    """
    if options.init_from is None:
        drafter = random_drafter(make_config(target, tokenizer, frame, options))
    else:
        drafter = warm_start(options.init_from)
        refuse_other_shape(drafter.config, options)
        check_shapes(target, drafter)
        if options.heads == "dflash2" and not drafter.config.is_dflash2:
            plain = drafter.parameters()
            drafter = random_drafter(with_dflash2_parts(drafter.config, options))
            drafter.update(plain)
    if options.draft_vocabulary is not None and options.draft_vocabulary < drafter.config.selector_top_k:
        raise UsageError(
            f"draft-vocabulary should be at least the {drafter.config.selector_top_k} tokens that the selector chooses "
            f"among; got {options.draft_vocabulary}."
        )
    return drafter


def refuse_other_shape(config: DraftConfig, options: TrainOptions) -> None:
    """Raise UsageError naming every option that contradicts the drafter to start from. Defaults contradict nothing."""
    held = {
        "layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "taps": config.target_layer_ids,
        "num_taps": len(config.target_layer_ids),
        "sliding_window": config.sliding_window,
        "mask_token": config.mask_token_id,
    }
    if config.is_dflash2:
        held |= {name: getattr(config, name) for name in DFLASH2_FIELDS}
    defaults = {field.name: field.default for field in fields(options)}
    conflicts = []
    for name, value in held.items():
        asked = getattr(options, name)
        if asked not in (defaults[name], value):
            label = "taps" if name == "num_taps" else name.replace("_", "-")
            conflicts.append(f"--{label} {_words(asked)} where it has {_words(value)}")
    if conflicts:
        raise UsageError(
            f"the drafter in {options.init_from} keeps its shape, but the options ask for {', '.join(conflicts)}. "
            "Leave them out, or train without --init-from."
        )


def _words(value: Any) -> str:
    return ",".join(str(x) for x in value) if isinstance(value, tuple) else str(value)


def warm_start(folder: Path) -> DFlashDrafter:
    """The drafter in a folder, in float32. Raises CheckpointError, also for what only the decode loop knows."""
    import mlx.core as mx

    drafter = load_drafter(folder, dtype=mx.float32, keep_quantized=False)
    if is_speculators(read_json(folder / "config.json")):
        raise CheckpointError(
            f"the drafter in {folder} is in the layout of speculators; training reads and writes z-lab's. "
            "Convert it first: dflash-mlx convert DRAFTER NEW_FOLDER --to zlab."
        )
    config = drafter.config
    if config.own_head or config.own_mask_embedding:
        raise CheckpointError(
            f"the drafter in {folder} has a head or mask row of its own; training knows drafters that use the "
            "target's. Start from one of those, or train without --init-from."
        )
    return drafter


def mask_token(target: Target, tokenizer: Any, frame: ChatFrame) -> int:
    """An id whose embedding can stand for "not known yet": the tokenizer's mask token, or a special one not in use."""
    named = getattr(tokenizer, "mask_token_id", None)
    if named is not None:
        return int(named)
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    special = frame.special_ids | {int(i) for i, token in added.items() if getattr(token, "special", False)}
    used = {*frame.prefix, *frame.answer_opening, *(frame.user_opening or ()), *frame.eos_ids}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        value = getattr(tokenizer, name, None)
        used |= {value} if isinstance(value, int) else set()
    free = sorted(i for i in special - used if 0 <= i < target.vocab_size)
    return free[0] if free else target.vocab_size - 1


def _feed_forward(target: Target) -> int:
    size = target.text_config("intermediate_size")
    return int(size[0] if isinstance(size, list) else size) if size else 3 * target.hidden_size


def _rope_theta(target: Target) -> float:
    parameters = target.text_config("rope_parameters") or {}
    return float(parameters.get("rope_theta") or target.text_config("rope_theta") or 10_000.0)
