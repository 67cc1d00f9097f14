"""Text for a gap between two texts (`suffix`), for models whose vocabulary has tokens for it."""

from typing import Any

from dflash_mlx.server.failures import RequestError

# (before the text in front, before the text after the gap, before the answer) of the families that learnt it so, and
# what they write where the gap is full.
_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SmolLM
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
_ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<file_sep>", "<|endoftext|>", "▁<EOT>")


def fill_in_the_middle(tokenizer: Any, before: str, after: str) -> tuple[list[int], tuple[int, ...]]:
    """The prompt for the text between `before` and `after`, and tokens that end it. Raises RequestError."""
    vocabulary = tokenizer.get_vocab()
    markers = next((markers for markers in _MARKERS if all(marker in vocabulary for marker in markers)), None)
    if markers is None:
        raise RequestError(
            "suffix is not supported: this model's vocabulary has no tokens for a gap in a text. Leave suffix out, or "
            "serve a model for code that has them.",
            param="suffix",
        )
    prefix, suffix, middle = (vocabulary[marker] for marker in markers)
    between = list(tokenizer.encode(after, add_special_tokens=False))
    prompt = [prefix, *tokenizer.encode(before, add_special_tokens=False), suffix, *between, middle]
    beginning = list(tokenizer.encode("", add_special_tokens=True))  # what the tokenizer puts in front of any text
    bos = [token for token in beginning if token == getattr(tokenizer, "bos_token_id", None)]
    return [*bos, *prompt], tuple(vocabulary[end] for end in _ENDS if end in vocabulary)
