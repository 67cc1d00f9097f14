"""What the name and the config.json of a model say about it: its base model, its precision, its family."""

import re
from typing import Any

# How mlx-community and others mark a conversion: -4bit, -8bit-DWQ, -mxfp4-Q8, -bf16, -MLX-6bit, -4bit-g32, ...
_MARK = re.compile(
    r"[-_.](?:(?P<bits>[2-8])[-_]?bits?|(?P<int>int[48])|(?P<mode>mxfp4|mxfp8|nvfp4|fp4|fp8)(?:-q[48])?"
    r"|(?P<float>bf16|fp16|float16|bfloat16|fp32)|q(?P<q>[2-8])(?:[-_]\w{1,3})?|w(?P<w>[48])a\d+"
    r"|mlx|dwq(?:[-_]\w+)?|awq|gptq|gs?\d+|mixed(?:[-_]\w+)?|text|optiq)$",
    re.IGNORECASE,
)
# Bits a weight takes with its scales, where the mode alone says it.
_MODE_BITS = {"mxfp4": 4.25, "fp4": 4.5, "nvfp4": 4.5, "mxfp8": 8.25, "fp8": 8.25}
_AFFINE_OVERHEAD = 0.5  # a 16-bit scale and bias for each group of 64
_FAMILIES = {"minimax_m2": "minimax", "gemma4_unified": "gemma4", "mistral": "llama"}


def split_precision(name: str) -> tuple[str, float | None]:
    """A repository's name without its marks of precision, and the bits a weight takes, where the marks say it.

    "Qwen3-4B-8bit" -> ("Qwen3-4B", 8.5); "Qwen3-4B" -> ("Qwen3-4B", None).
    """
    bits: float | None = None
    while mark := _MARK.search(name):
        name = name[: mark.start()]
        found = _bits(mark)
        bits = found if found is not None else bits
    return name, bits


def _bits(mark: "re.Match[str]") -> float | None:
    if mark["mode"]:
        return _MODE_BITS[mark["mode"].lower()]
    if mark["float"]:
        return 32.0 if mark["float"].lower() == "fp32" else 16.0
    digits = mark["bits"] or mark["q"] or mark["w"] or (mark["int"] or "")[3:]
    return float(digits) + _AFFINE_OVERHEAD if digits else None


def base_name(repo: str) -> str:
    """The last part of "owner/name" without marks of precision, lower case: what quantizations of a model share."""
    return split_precision(repo.partition("@")[0].rpartition("/")[2])[0].lower()


def families_of(config: dict[str, Any]) -> list[str]:
    """The model files of mlx-lm that a target's config.json may ask for, outermost first.

    Models that also see have a type of their own and another one for their text part, either of which names the family.
    """
    kinds = [str(part.get("model_type") or "").removesuffix("_text") for part in (config, text_config(config))]
    return list(dict.fromkeys(_FAMILIES.get(kind, kind) for kind in kinds if kind))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def is_drafter(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of a drafter, which is no model of its own."""
    said = config.get("architectures")
    names = [str(name).lower() for name in said] if isinstance(said, list) else []
    kinds = any(kind in name for name in names for kind in ("dflash", "eagle", "medusa"))
    return kinds or any(field in config for field in ("dflash_config", "speculators_model_type", "medusa_num_heads"))
