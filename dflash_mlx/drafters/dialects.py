"""The layouts drafters are published in: recognised, brought into z-lab's, or refused by name.

z-lab's checkpoints (`DFlashDraftModel`, `DFlash2DraftModel`) are the form that the rest of this package reads. The
layout of vLLM's speculators nests the layers' shape in `transformer_layer_config`, counts the target's layers from 1
where z-lab counts from 0, and may draft from a reduced vocabulary, whose ids stand in the tensor `d2t`.
"""

from typing import Any

from dflash_mlx.errors import CheckpointError

SUPPORTED = (
    "a DFlash or DFlash 2 drafter is needed here, in z-lab's layout (DFlashDraftModel, DFlash2DraftModel) or that of "
    "speculators (dflash, dflash2)"
)
_NEXT = "Choose such a drafter for your target, or run with --no-draft."

# Parts of names in lower case, the longer before what they contain.
_OTHER_KINDS = (
    ("dspark", "a DSpark drafter"),
    ("peagle", "a P-EAGLE drafter"),
    ("eagle3", "an EAGLE-3 drafter"),
    ("eagle", "an EAGLE drafter"),
    ("hass", "a HASS drafter"),
    ("medusa", "a set of Medusa heads"),
    ("hydra", "a set of Hydra heads"),
    ("mlp_speculator", "an MLP speculator"),
    ("mlpspeculator", "an MLP speculator"),
    ("xpress", "an xPress drafter"),
    ("domino", "a Domino drafter"),
    ("jetspec", "a JetSpec drafter"),
    ("dflare", "a DFlare drafter"),
    ("dfly", "a DFly drafter"),
    ("pard", "a PARD drafter"),
    ("laguna", "a Laguna drafter (gated attention)"),
    ("muse_glimmer_assistant", "Muse Glimmer's own assistant"),
    ("museglimmerassistant", "Muse Glimmer's own assistant"),
    ("mtp", "a multi-token-prediction (MTP) head"),
    ("nextn", "a multi-token-prediction (MTP) head"),
)
_OURS = ("DFlashDraftModel", "DFlash2DraftModel", "DFlashSpeculator")

# Qwen3Config's own values: speculators writes only what differs from them.
_QWEN3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
}
_DFLASH2_DEFAULTS = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


def refuse_unsupported(raw: dict[str, Any]) -> None:
    """Raise CheckpointError, naming what was found, for a drafter of another kind or with parts that are missing here.

    raw: the config.json of a drafter in any layout.
    """
    nested = _flat(raw)
    kind = other_kind(raw)
    if kind is not None:
        raise CheckpointError(f"the drafter is {kind}; {SUPPORTED}. {_NEXT}")
    missing = [
        (nested.get("hidden_act") not in (None, "silu", "swish"), f"hidden_act {nested.get('hidden_act')!r}"),
        (bool(nested.get("attention_sink_bias")), "attention sinks (attention_sink_bias)"),
        (bool(nested.get("attention_modes")), "other kinds of attention (attention_modes)"),
        (bool(nested.get("mlp_bias")), "biases in its MLPs (mlp_bias)"),
        (bool(nested.get("sample_from_anchor")), "a first draft from the anchor's own row (sample_from_anchor)"),
        (bool(nested.get("shift_label")), "rows that draft one position further on (shift_label)"),
        (
            nested.get("target_hidden_size") not in (None, nested.get("hidden_size")),
            f"features of another size than its own (target_hidden_size {nested.get('target_hidden_size')})",
        ),
    ]
    parts = [part for there, part in missing if there]
    if parts:
        raise CheckpointError(
            f"the drafter has {' and '.join(parts)}, for which there is no code; {SUPPORTED}. {_NEXT}"
        )


def _flat(raw: dict[str, Any]) -> dict[str, Any]:
    return {**raw, **(raw.get("transformer_layer_config") or {}), **(raw.get("dflash_config") or {})}


def other_kind(raw: dict[str, Any]) -> str | None:
    """What a drafter that is not DFlash's is, with the words of config.json that say so; None if nothing says so."""
    nested = _flat(raw)
    for field in ("projector_type", "speculators_model_type"):
        value = str(nested.get(field) or "dflash").lower()
        if value not in ("dflash", "dflash2"):
            return f"{_kind_of(value) or f'one of the kind {value}'} ({field} {value!r})"
    if nested.get("markov_rank"):
        return f"a DSpark drafter (markov_rank {nested['markov_rank']})"
    architectures = [str(name) for name in raw.get("architectures") or ()]
    if any(name in _OURS for name in architectures):
        return None
    for name in (*architectures, str(raw.get("model_type") or "")):
        kind = _kind_of(name)
        if kind:
            return f"{kind} ({name})"
    return None


def _kind_of(name: str) -> str | None:
    lower = name.lower().replace("-", "")
    return next((kind for part, kind in _OTHER_KINDS if part in lower), None)


def is_speculators(raw: dict[str, Any]) -> bool:
    """Whether a config.json is in the layout of vLLM's speculators."""
    return "speculators_model_type" in raw or "transformer_layer_config" in raw


def from_speculators(raw: dict[str, Any]) -> dict[str, Any]:
    """A speculators config.json -> the same drafter's in z-lab's layout.

    Its sliding layers are causal inside the block unless `sliding_window_non_causal`; its full layers never are.
    """
    second = raw.get("speculators_model_type") == "dflash2"
    layer = dict(raw.get("transformer_layer_config") or {})
    if layer.get("model_type") in (None, "qwen3"):
        layer = {**_QWEN3_DEFAULTS, **layer}
    ids = raw.get("aux_hidden_state_layer_ids")
    if not ids:
        raise CheckpointError(
            "the drafter's config.json has no 'aux_hidden_state_layer_ids'; the checkpoint is incomplete."
        )
    if 0 in ids:
        raise CheckpointError(
            f"the drafter reads the target's embedding (aux_hidden_state_layer_ids {list(ids)} hold 0); only layers' "
            f"outputs, 1 and above, can be read here. {_NEXT}"
        )
    nested = {
        "block_size": raw.get("block_size", 8),
        "mask_token_id": raw.get("mask_token_id"),
        "target_layer_ids": [int(i) - 1 for i in ids],
    }
    if second:
        nested |= {name: raw.get(name, value) for name, value in _DFLASH2_DEFAULTS.items()}
    zlab = {
        **layer,
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": nested["block_size"],
        "dflash_config": nested,
    }
    if raw.get("sliding_window_non_causal", second):
        zlab["is_causal"] = False
    if raw.get("draft_vocab_size") not in (None, zlab.get("vocab_size")):
        zlab["draft_vocab_size"] = raw["draft_vocab_size"]
    for key in ("dtype", "torch_dtype", "quantization"):
        if key in raw:
            zlab[key] = raw[key]
    return zlab
