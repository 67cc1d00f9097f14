"""Token ids of one answer become text: with the first space, or without it."""

from collections.abc import Iterable
from typing import Any

# Any text that every vocabulary can spell.
_TEXT_BEFORE = "a"


def new_detokenizer(tokenizer: Any, *, continues: bool = False) -> Any:
    """mlx-lm's streaming detokenizer for one answer; read its `last_segment`, not its `text`.

    mlx-lm's detokenizers leave out a space at the very beginning, which is right for an answer that stands by itself.
    continues: the answer goes on in the text before it, so the first space stays. The detokenizer has then seen a
    letter before the answer.
    """
    detokenizer = tokenizer.detokenizer
    if continues:
        for token in tokenizer.encode(_TEXT_BEFORE, add_special_tokens=False):
            detokenizer.add_token(token)
        _ = detokenizer.last_segment  # reading it moves on to what comes next
    return detokenizer


def decoded(tokenizer: Any, tokens: Iterable[int], *, continues: bool = False) -> str:
    """The text of an answer's tokens, as `new_detokenizer` spells it."""
    detokenizer = new_detokenizer(tokenizer, continues=continues)
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return str(detokenizer.last_segment)
