"""An answer's text with and without its first space, against the tokenizers' own decoding of whole texts."""

import pytest
from json_tokens import byte_tokenizer
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from dflash_mlx.detokenizing import decoded


def sentencepiece_tokenizer(detokenizer=SPMStreamingDetokenizer) -> TokenizerWrapper:
    """Spelt as Llama 2's: a space before the text, ▁ for spaces, bytes for what has no token."""
    vocabulary = {"<end>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    for piece in ["▁", *"+abceinrstu", "▁a", "▁b", "▁+"]:
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "a"), ("▁", "b"), ("▁", "+")]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>"), detokenizer)


KINDS = {
    "byte-level": lambda: TokenizerWrapper(byte_tokenizer()._tokenizer, BPEStreamingDetokenizer),
    "sentencepiece": sentencepiece_tokenizer,
    "any": lambda: sentencepiece_tokenizer(NaiveStreamingDetokenizer),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rest", [" a + b", "a + b", " ", "  a", " é", "é"])
def test_an_answer_goes_on_in_its_prompt(kind, rest):
    """Prompt and answer together are the text that was cut."""
    tokenizer = KINDS[kind]()
    prompt, whole = "return", f"return{rest}"
    tokens = tokenizer.encode(whole, add_special_tokens=False)
    start = len(tokenizer.encode(prompt, add_special_tokens=False))
    assert tokenizer.decode(tokens[:start]) == prompt
    assert prompt + decoded(tokenizer, tokens[start:], continues=True) == whole


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_by_itself_begins_without_a_space(kind):
    tokenizer = KINDS[kind]()
    start = len(tokenizer.encode("return", add_special_tokens=False))
    tokens = tokenizer.encode("return a + b", add_special_tokens=False)[start:]
    assert decoded(tokenizer, tokens) == "a + b"
