"""A byte-level tokenizer with a few longer tokens, as real ones have them, and a pair of tiny models that uses it."""

import json

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tiny import tiny_drafter, tiny_target
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from dflash_mlx.pair import ModelPair

_MERGES = ['{ "', '" :', '" ,', "t r", "tr u", "tru e", "n u", "nu l", "nul l", '" }', "1 2", "a b", "} }"]


def byte_tokenizer() -> TokenizerWrapper:
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [tuple(merge.split(" ")) for merge in _MERGES]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    vocabulary["<end>"] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>"))


def json_pair(*, seed: int = 0, block_size: int = 8, drafter=None) -> ModelPair:
    tokenizer = byte_tokenizer()
    # A few rows more than tokens, as padded vocabularies have.
    size = len(tokenizer.get_vocab()) + 5
    return ModelPair(
        name="json",
        target=tiny_target("llama", seed=seed, vocab_size=size),
        drafter=drafter or tiny_drafter(block_size=block_size, vocab_size=size),
        tokenizer=tokenizer,
        dtype=mx.float32,
        block_size=block_size,
    )


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["ab", "true", "null"]}, "maxItems": 3},
        "good": {"type": "boolean"},
    },
    "required": ["name", "age", "good"],
    "additionalProperties": False,
}


def fits_schema(text: str) -> bool:
    """Whether a text is a value of SCHEMA, checked by hand."""
    value = json.loads(text)
    return (
        set(value) <= {"name", "age", "tags", "good"}
        and len(value["name"]) <= 12
        and isinstance(value["age"], int)
        and 0 <= value["age"] <= 150
        and isinstance(value["good"], bool)
        and all(tag in ("ab", "true", "null") for tag in value.get("tags", []))
    )
