"""The tokenizer inside a GGUF file -> tokenizer.json and its companions.

Only byte-level BPE ("gpt2" in GGUF's words) is rebuilt: vocabulary and merges are in the metadata, and
`tokenizer.ggml.pre` names the rule that cuts text into words first. A rule that is not in `_WORD_RULES` is refused,
because a guess would split some texts differently without anybody noticing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dflash_mlx.errors import CheckpointError

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# The tokens that end an answer: the end of text, of a turn, of a message.
_ENDS = ("eos", "eot", "eom")
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


# tokenizer.ggml.pre -> how text is cut into words before merging.
_WORD_RULES: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits_then_gpt2,
    "llama-bpe": lambda: _pattern(_LLAMA3),
    "qwen2": lambda: _pattern(_QWEN2),
}


def write_tokenizer(metadata: dict[str, Any], folder: Path, *, source: Path) -> dict[str, Any]:
    """Write tokenizer.json, tokenizer_config.json and, where there is one, chat_template.jinja into `folder`.

    Returns the ids for config.json and generation_config.json: bos_token_id, eos_token_id (a list where several tokens
    end an answer), pad_token_id, as far as the file names them. Raises CheckpointError for a tokenizer that is not
    supported or not complete; `source` is the file named in the message.
    """
    tokens = _texts(metadata, "tokenizer.ggml.tokens", source)
    ids = _special_ids(metadata, len(tokens), source)
    tokenizer = _build(metadata, tokens, ids, source)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _flag(metadata, "add_bos_token") and "bos" in ids,
        "add_eos_token": _flag(metadata, "add_eos_token") and "eos" in ids,
        **{f"{role}_token": tokens[ids[role]] for role in _ROLES if role in ids},
    }
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    if isinstance(length, int):
        config["model_max_length"] = length
    _write_json(folder / "tokenizer_config.json", config)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return _config_ids(ids)


def _build(metadata: dict[str, Any], tokens: list[str], ids: dict[str, int], source: Path) -> Tokenizer:
    rule = _word_rule(metadata, source)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        repeated = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise CheckpointError(f"{source}: the vocabulary lists {repeated!r} twice.")
    merges = _merges(metadata, vocabulary, source)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _WORD_RULES[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, tokens, ids)
    tokenizer.add_tokens(_added_tokens(metadata, tokens, source))
    return tokenizer


def _word_rule(metadata: dict[str, Any], source: Path) -> str:
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model != "gpt2":
        raise CheckpointError(
            f"{source}: its tokenizer is of kind {model!r}; only byte-level BPE ('gpt2') is supported. "
            "Use the model's safetensors checkpoint instead."
        )
    rule = metadata.get("tokenizer.ggml.pre")
    if not isinstance(rule, str) or rule not in _WORD_RULES:
        raise CheckpointError(
            f"{source}: its text is split by the rule {rule!r} (tokenizer.ggml.pre); supported are "
            f"{', '.join(_WORD_RULES)}. Use the model's safetensors checkpoint instead."
        )
    return rule


def _merges(metadata: dict[str, Any], vocabulary: dict[str, int], source: Path) -> list[tuple[str, str]]:
    merges = []
    for line in _texts(metadata, "tokenizer.ggml.merges", source):
        left, space, right = line.partition(" ")
        if not (space and left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise CheckpointError(
                f"{source}: the merge {line!r} does not join two tokens of the vocabulary to a third."
            )
        merges.append((left, right))
    return merges


def _added_tokens(metadata: dict[str, Any], tokens: list[str], source: Path) -> list[AddedToken]:
    """Tokens that are found in the text as a whole, before it is cut into words."""
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        found = f"{len(types):,}" if isinstance(types, np.ndarray) else "none"
        raise CheckpointError(
            f"{source}: expected {len(tokens):,} entries in tokenizer.ggml.token_type, found {found}."
        )
    return [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]


def _post_processor(metadata: dict[str, Any], tokens: list[str], ids: dict[str, int]) -> processors.PostProcessor:
    before = [tokens[ids["bos"]]] if _flag(metadata, "add_bos_token") and "bos" in ids else []
    after = [tokens[ids["eos"]]] if _flag(metadata, "add_eos_token") and "eos" in ids else []
    plain = processors.ByteLevel(trim_offsets=False)
    if not before and not after:
        return plain
    ends = {token: ids[role] for role, found in (("bos", before), ("eos", after)) for token in found}
    wrapped = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{token}:1" for token in before), "$B:1", *(f"{t}:1" for t in after)],
        special_tokens=list(ends.items()),
    )
    return processors.Sequence([plain, wrapped])


def _special_ids(metadata: dict[str, Any], count: int, source: Path) -> dict[str, int]:
    ids = {}
    for role in ("bos", *_ENDS, "unk", "pad"):
        key = f"tokenizer.ggml.{_ROLES.get(role, role)}_token_id"
        value = metadata.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < count:
            raise CheckpointError(f"{source}: {key} is {value!r}; expected a token number below {count:,}.")
        ids[role] = value
    if "eos" not in ids:
        raise CheckpointError(f"{source}: tokenizer.ggml.eos_token_id is missing, so answers would never end.")
    return ids


def _config_ids(ids: dict[str, int]) -> dict[str, Any]:
    ends = list(dict.fromkeys(ids[role] for role in _ENDS if role in ids))
    named = {f"{role}_token_id": ids[role] for role in ("bos", "pad") if role in ids}
    return {**named, "eos_token_id": ends[0] if len(ends) == 1 else ends}


def _flag(metadata: dict[str, Any], name: str) -> bool:
    return metadata.get(f"tokenizer.ggml.{name}") is True


def _texts(metadata: dict[str, Any], key: str, source: Path) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value:
        raise CheckpointError(f"{source}: expected a list of strings under {key}, found {type(value).__name__}.")
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
