"""What a drafter checkpoint's config.json says, in one form.

Field names follow the public z-lab checkpoints. Newer checkpoints moved fields into `dflash_config` (block
size) and `rope_parameters` (rope base), so every field is looked up from the most specific place outwards.
"""

from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import CheckpointError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_REFUSED = {
    "DFlash2DraftModel": "a DFlash 2 drafter (convolutions and path selector)",
    "Qwen3DSparkModel": "a DSpark drafter",
    "Gemma4DSparkModel": "a DSpark drafter",
    "LlamaForCausalLMEagle3": "an EAGLE-3 drafter",
}


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The shape of a DFlash drafter and how it is tied to its target.

    `target_layer_ids` are 0-based decoder layers of the target whose *outputs* are the drafter's features.
    `layer_types` and `is_causal` decide what a query of the block may see (see `dflash.attention_mask`).
    `draft_token_ids`, when not empty, are the only tokens that are drafted: most text needs few of a large vocabulary,
    and the vocabulary head is a large part of a draft's cost.
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
    max_position_embeddings: int = 32_768
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    draft_token_ids: tuple[int, ...] = ()

    @property
    def feature_size(self) -> int:
        """Size of one position's concatenated target features."""
        return len(self.target_layer_ids) * self.hidden_size

    def layer_is_sliding(self, layer: int) -> bool:
        return self.layer_types[layer] == _SLIDING

    def layer_is_causal(self, layer: int) -> bool:
        """Sliding layers are causal inside the block and full layers are not, unless the checkpoint says."""
        return self.layer_is_sliding(layer) if self.is_causal is None else self.is_causal


def parse_draft_config(raw: dict[str, Any]) -> DraftConfig:
    """Read the config.json of a drafter.

    Raises CheckpointError naming the field when one is missing or contradictory, or the kind of drafter when
    it is one that is not supported.
    """
    for architecture in raw.get("architectures") or []:
        if architecture in _REFUSED:
            raise CheckpointError(
                f"the drafter is {_REFUSED[architecture]} ({architecture}); this version runs DFlash drafters "
                "(DFlashDraftModel). Choose one of those, or run with --no-draft."
            )
    if "dflash_config" not in raw and "target_layer_ids" not in raw:
        raise CheckpointError(
            "this is not a DFlash drafter: its config.json has neither dflash_config nor target_layer_ids "
            f"(model_type {raw.get('model_type')!r}). Give a drafter to --draft-model and the target to --model."
        )
    nested = raw.get("dflash_config") or {}
    rope = raw.get("rope_parameters") or {}

    def required(name: str) -> Any:
        value = nested.get(name, raw.get(name))
        if value is None:
            raise CheckpointError(f"the drafter's config.json has no {name!r}; the checkpoint is incomplete.")
        return value

    def optional(name: str, default: Any) -> Any:
        value = nested.get(name, raw.get(name))
        return default if value is None else value

    heads = int(required("num_attention_heads"))
    layers = int(required("num_hidden_layers"))
    scaling = raw.get("rope_scaling")
    if scaling is None and rope.get("rope_type", "default") != "default":
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    config = DraftConfig(
        hidden_size=int(required("hidden_size")),
        intermediate_size=int(required("intermediate_size")),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=int(optional("num_key_value_heads", heads)),
        head_dim=int(optional("head_dim", int(required("hidden_size")) // heads)),
        vocab_size=int(required("vocab_size")),
        block_size=int(required("block_size")),
        mask_token_id=int(required("mask_token_id")),
        target_layer_ids=tuple(int(i) for i in required("target_layer_ids")),
        num_target_layers=raw.get("num_target_layers"),
        rms_norm_eps=float(optional("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or optional("rope_theta", 10_000.0)),
        rope_scaling=scaling,
        max_position_embeddings=int(optional("max_position_embeddings", 32_768)),
        attention_bias=bool(optional("attention_bias", False)),
        layer_types=tuple(raw.get("layer_types") or (_FULL,) * layers),
        sliding_window=raw.get("sliding_window"),
        is_causal=optional("is_causal", nested.get("causal")),
        input_embedding_scale=float(optional("input_embedding_scale", 1.0)),
        output_multiplier=float(optional("output_multiplier", 1.0)),
        final_logit_softcapping=optional("final_logit_softcapping", None),
        draft_token_ids=tuple(int(i) for i in optional("draft_token_ids", ())),
    )
    _check(config)
    return config


def _check(config: DraftConfig) -> None:
    problems = []
    if config.block_size < 2:
        problems.append(f"block_size is {config.block_size}; a block is an anchor and at least one mask")
    if not config.target_layer_ids:
        problems.append("target_layer_ids is empty; the drafter needs features of at least one target layer")
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
    if problems:
        raise CheckpointError("the drafter's config.json does not fit together: " + "; ".join(problems) + ".")
