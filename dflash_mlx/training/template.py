"""The fixed parts of a chat: what the model's template puts around user turns and answers, as token ids."""

from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import UsageError

_USER, _ANSWER, _SECOND = "sentineluserone", "sentinelanswerone", "sentinelusertwo"


@dataclass(frozen=True)
class ChatFrame:
    """Token ids of a chat's fixed parts.

    `prefix` goes up to the first user turn; `answer_opening` from the user turn's end to where the answer begins;
    `user_opening` from after the token that ended an answer to the next user turn (None where the template has no
    second turn). A model without a chat template has only a prefix: its text just goes on.
    """

    prefix: tuple[int, ...]
    answer_opening: tuple[int, ...]
    user_opening: tuple[int, ...] | None
    eos_ids: frozenset[int]
    special_ids: frozenset[int]
    thinking: bool

    @property
    def user_end(self) -> int | None:
        """The token that ends a user turn."""
        return self.answer_opening[0] if self.answer_opening else None


def chat_frame(tokenizer: Any, *, thinking: str = "auto") -> ChatFrame:
    """Find the fixed parts by rendering messages that are easy to find again.

    tokenizer: mlx-lm's TokenizerWrapper. thinking: "on", "off", or "auto" for what the template does by itself.
    Raises UsageError when the template changes or repeats the user's text.
    """
    eos_ids = frozenset(int(i) for i in tokenizer.eos_token_ids)
    special_ids = frozenset(int(i) for i in tokenizer.all_special_ids)
    if not tokenizer.has_chat_template:
        prefix = tuple(tokenizer.encode("")) or _bos(tokenizer) or tuple(sorted(eos_ids))[:1]
        return ChatFrame(tuple(p for p in prefix), (), None, eos_ids, special_ids, False)
    text = render(tokenizer, [_message("user", _USER)], thinking=thinking)
    if text.count(_USER) != 1:
        raise UsageError(
            f"expected the chat template to show a user's message once, found it {text.count(_USER)} times. "
            "Give finished conversations with --conversations instead."
        )
    before, after = text.split(_USER)
    return ChatFrame(
        prefix=tuple(encode_text(tokenizer, before)) or _bos(tokenizer) or tuple(sorted(eos_ids))[:1],
        answer_opening=tuple(encode_text(tokenizer, after)),
        user_opening=_user_opening(tokenizer, eos_ids, thinking),
        eos_ids=eos_ids,
        special_ids=special_ids,
        thinking=thinking == "on" or (thinking == "auto" and bool(getattr(tokenizer, "has_thinking", False))),
    )


def render(tokenizer: Any, messages: list[dict[str, str]], *, thinking: str, generation: bool = True) -> str:
    """Messages through the chat template, as text."""
    extra = {} if thinking == "auto" else {"enable_thinking": thinking == "on"}
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation, **extra))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of text that already holds its special tokens."""
    return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def _user_opening(tokenizer: Any, eos_ids: frozenset[int], thinking: str) -> tuple[int, ...] | None:
    messages = [_message("user", _USER), _message("assistant", _ANSWER), _message("user", _SECOND)]
    try:
        text = render(tokenizer, messages, thinking=thinking)
    except Exception:  # Templates raise whatever they like for chats they do not know.
        return None
    if text.count(_ANSWER) != 1 or text.count(_SECOND) != 1:
        return None
    tokens = encode_text(tokenizer, text.split(_ANSWER)[1].split(_SECOND)[0])
    # The answer itself ends with the end token, so that it is not forced a second time.
    if tokens and tokens[0] in eos_ids:
        tokens = tokens[1:]
    return tuple(tokens) or None


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _bos(tokenizer: Any) -> tuple[int, ...]:
    token = getattr(tokenizer, "bos_token_id", None)
    return () if token is None else (int(token),)
