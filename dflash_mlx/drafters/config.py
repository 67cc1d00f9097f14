"""What a drafter checkpoint's config.json says, in one form.

Field names follow the public z-lab checkpoints; other layouts are brought into that one first (`dialects.py`). Newer
checkpoints moved fields into `dflash_config` (block size) and `rope_parameters` (rope base), so every field is looked
up from the most specific place outwards, as the official loader does (`dflash` 0.1.0).
"""

from dataclasses import dataclass
from typing import Any

from dflash_mlx.drafters.dialects import from_speculators, is_speculators, refuse_unsupported
from dflash_mlx.errors import WRONG_VALUES, CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_DEFAULT_BLOCK = 16  # where a checkpoint does not say, as in the official loader
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# A rope with three position axes; a drafter's text has one, and then it is the plain rope.
_PLAIN_ROPES = ("default", "mrope")
DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True)
class Rope:
    """A rotary embedding: its base, and the `rope_scaling` fields that change it (None for the plain one)."""

    theta: float
    scaling: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The shape of a DFlash drafter and how it is tied to its target.

    `target_layer_ids` are 0-based decoder layers of the target whose *outputs* are the drafter's features.
    `layer_types` and `is_causal` decide what a query of the block may see (see `attention_mask.block_mask`).
    `draft_token_ids`, when not empty, are the only tokens that are drafted: most text needs few of a large vocabulary,
    and the vocabulary head is a large part of a draft's cost. The drafter borrows the target's embedding and head;
    `own_mask_embedding` and `own_head` say that its checkpoint brings a row for the mask token, or a head for the
    tokens it drafts. `ropes` holds what differs from `rope_theta` and `rope_scaling`, by layer type. `conv_*` and
    `selector_*` are DFlash 2's and 0 in DFlash.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    ropes: tuple[tuple[str, Rope], ...] = ()
    max_position_embeddings: int = 32_768
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    draft_token_ids: tuple[int, ...] = ()
    own_mask_embedding: bool = False
    own_head: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0

    @property
    def feature_size(self) -> int:
        """Size of one position's concatenated target features."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def is_dflash2(self) -> bool:
        """Whether the drafter has DFlash 2's convolutions and path selector."""
        return self.selector_rank > 0

    def layer_is_sliding(self, layer: int) -> bool:
        return self.layer_types[layer] == _SLIDING

    def layer_is_causal(self, layer: int) -> bool:
        """Sliding layers are causal inside the block and full layers are not, unless the checkpoint says."""
        return self.layer_is_sliding(layer) if self.is_causal is None else self.is_causal

    def rope_of(self, layer_type: str) -> Rope:
        """The rotary embedding of a kind of layer."""
        return dict(self.ropes).get(layer_type, Rope(self.rope_theta, self.rope_scaling))


# Far above any real drafter. What is built here has to fit into memory.
_LARGEST = {
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_hidden_layers": 1000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "vocab_size": 2**24,
    "block_size": 2**16,
}


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """The layers that a checkpoint means which names none: evenly spread from the second to the third from last."""
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return [round(1 + i * step) for i in range(num_draft_layers)]


def parse_draft_config(raw: dict[str, Any]) -> DraftConfig:
    """Read the config.json of a drafter, in z-lab's layout or that of vLLM's speculators.

    Raises CheckpointError naming the field when one is missing or contradictory, or the kind of drafter when
    it is one that is not supported.
    """
    try:
        refuse_unsupported(raw)
        return _parse(from_speculators(raw) if is_speculators(raw) else raw)
    except WRONG_VALUES as error:
        raise CheckpointError(
            f"the drafter's config.json holds a value of another kind than expected: {error}. Fetch the folder again."
        ) from error


def _parse(raw: dict[str, Any]) -> DraftConfig:
    """A config.json in z-lab's layout. Raises CheckpointError, and what wrong types of values lead to."""
    if "dflash_config" not in raw and "target_layer_ids" not in raw:
        raise CheckpointError(
            "this is not a DFlash drafter: its config.json has neither dflash_config nor target_layer_ids "
            f"(model_type {raw.get('model_type')!r}). It may be a target; a drafter is needed in its place."
        )
    nested = raw.get("dflash_config") or {}

    def optional(name: str, default: Any) -> Any:
        value = nested.get(name)
        value = raw.get(name) if value is None else value
        return default if value is None else value

    def required(name: str) -> Any:
        value = optional(name, None)
        if value is None:
            raise CheckpointError(f"the drafter's config.json has no {name!r}; the checkpoint is incomplete.")
        return value

    heads = int(required("num_attention_heads"))
    layers = _layer_count(required("num_hidden_layers"))
    target_layers = optional("num_target_layers", None)
    if target_layers is not None and optional("target_layer_ids", None) is None:
        layer_ids = default_target_layer_ids(int(target_layers), layers)
    else:
        layer_ids = required("target_layer_ids")
    rope, ropes = parse_ropes(raw)
    layer_types, window = _layers(raw, nested, layers)
    cap = optional("final_logit_softcapping", None)
    config = DraftConfig(
        hidden_size=int(required("hidden_size")),
        intermediate_size=int(required("intermediate_size")),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=int(optional("num_key_value_heads", heads)),
        head_dim=int(optional("head_dim", int(required("hidden_size")) // heads)),
        vocab_size=int(required("vocab_size")),
        block_size=int(optional("block_size", _DEFAULT_BLOCK)),
        mask_token_id=int(required("mask_token_id")),
        target_layer_ids=tuple(int(i) for i in layer_ids),
        num_target_layers=None if target_layers is None else int(target_layers),
        rms_norm_eps=float(optional("rms_norm_eps", 1e-6)),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        ropes=ropes,
        max_position_embeddings=int(optional("max_position_embeddings", 32_768)),
        attention_bias=bool(optional("attention_bias", False)),
        layer_types=layer_types,
        sliding_window=window,
        is_causal=optional("is_causal", nested.get("causal")),
        input_embedding_scale=float(optional("input_embedding_scale", 1.0)),
        output_multiplier=float(optional("output_multiplier", 1.0)),
        final_logit_softcapping=float(cap) if cap and float(cap) > 0 else None,
        draft_token_ids=tuple(int(i) for i in optional("draft_token_ids", ())),
        conv_kernel_size=int(optional("conv_kernel_size", 0)),
        conv_group_size=int(optional("conv_group_size", 0)),
        selector_rank=int(optional("selector_rank", 0)),
        selector_top_k=int(optional("selector_top_k", 0)),
    )
    _check(config, raw)
    return config


def parse_ropes(raw: dict[str, Any]) -> tuple[Rope, tuple[tuple[str, Rope], ...]]:
    """The drafter's rope, and those of its layer types where they have their own.

    As in Transformers: `rope_scaling` goes before `rope_parameters`, and a base inside them before `rope_theta`.
    """
    fields = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    fallback = raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta") or 10_000.0
    if fields and set(fields) <= {_FULL, _SLIDING}:
        ropes = tuple((name, _rope(own or {}, fallback)) for name, own in sorted(fields.items()))
        return ropes[0][1], ropes
    return _rope(fields, fallback), ()


def _rope(fields: dict[str, Any], fallback: float) -> Rope:
    theta = float(fields.get("rope_theta") or fallback)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind in _PLAIN_ROPES:
        return Rope(theta)
    if kind not in _ROPE_TYPES:
        raise CheckpointError(
            f"the drafter's rope is of the type {kind!r}; this version has {', '.join(_ROPE_TYPES)}. "
            "Choose another drafter, or run with --no-draft."
        )
    return Rope(theta, {key: value for key, value in fields.items() if key != "rope_theta"})


def _layer_count(value: Any) -> int:
    """Checked before anything is made for each layer."""
    count, most = int(value), _LARGEST["num_hidden_layers"]
    if count > most:
        raise CheckpointError(
            "the drafter's config.json names more layers (num_hidden_layers) than any drafter has; expected 1 to "
            f"{most}. Fetch the folder again."
        )
    return count


def _layers(raw: dict[str, Any], nested: dict[str, Any], count: int) -> tuple[tuple[str, ...], int | None]:
    """What each layer's attention is, and the window of those that slide."""
    window = raw.get("sliding_window")
    types = raw.get("layer_types")
    if nested.get("use_swa") and nested.get("swa_window_size"):
        return tuple(types or (_SLIDING,) * count), int(nested["swa_window_size"])
    if types is None and raw.get("use_sliding_window") and window:
        first = int(raw.get("max_window_layers") or 0)
        types = [_FULL if i < first else _SLIDING for i in range(count)]
    return tuple(types or (_FULL,) * count), None if window is None else int(window)


def _check(config: DraftConfig, raw: dict[str, Any]) -> None:
    problems = []
    if config.block_size < 2:
        problems.append(f"block_size is {config.block_size}; a block is an anchor and at least one mask")
    if not config.target_layer_ids:
        problems.append("target_layer_ids is empty; the drafter needs features of at least one target layer")
    if any(i < 0 for i in config.target_layer_ids):
        problems.append(f"target_layer_ids {list(config.target_layer_ids)} go below the target's first layer, 0")
    if len(config.layer_types) != config.num_hidden_layers:
        problems.append(f"layer_types has {len(config.layer_types)} entries for {config.num_hidden_layers} layers")
    unknown = set(config.layer_types) - {_FULL, _SLIDING}
    if unknown:
        problems.append(f"layer_types has {sorted(unknown)}; known are {_FULL} and {_SLIDING}")
    if _SLIDING in config.layer_types and not config.sliding_window:
        problems.append("it has sliding_attention layers and no sliding_window")
    if not 0 <= config.mask_token_id < config.vocab_size:
        problems.append(f"mask_token_id {config.mask_token_id} is outside the vocabulary of {config.vocab_size}")
    if any(not 0 <= i < config.vocab_size for i in config.draft_token_ids):
        problems.append(f"draft_token_ids has ids outside the vocabulary of {config.vocab_size}")
    for name, most in _LARGEST.items():
        if not 1 <= getattr(config, name) <= most:
            problems.append(f"{name} is {getattr(config, name)}; expected 1 to {most}")
    problems += _dflash2_problems(config, raw)
    if problems:
        raise CheckpointError("the drafter's config.json does not fit together: " + "; ".join(problems) + ".")


def _dflash2_problems(config: DraftConfig, raw: dict[str, Any]) -> list[str]:
    """DFlash 2 needs all of its fields, and DFlash has none of them."""
    said = "DFlash2DraftModel" in (raw.get("architectures") or ())
    values = {name: getattr(config, name) for name in DFLASH2_FIELDS}
    if not said and not any(values.values()):
        return []
    problems = [f"a DFlash 2 drafter needs {name}" for name, value in values.items() if value < 1]
    if config.conv_group_size > 0 and config.hidden_size % config.conv_group_size:
        problems.append(f"conv_group_size {config.conv_group_size} does not divide hidden_size {config.hidden_size}")
    choices = len(config.draft_token_ids) or config.vocab_size
    if config.selector_top_k > choices:
        problems.append(f"selector_top_k {config.selector_top_k} is more than the {choices} tokens it may draft")
    return problems
