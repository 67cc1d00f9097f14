"""Tiny random models for the real worker: with letters for tokens, or with a real tokenizer and chat template."""

from dataclasses import dataclass

import mlx.core as mx
from fakes import FakeTokenizer
from json_tokens import json_pair
from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from tiny import VOCAB, tiny_drafter, tiny_target

from dflash_mlx.pair import ModelPair


def letter(token: int) -> str:
    return chr(ord("A") + token)


class Letters:
    """A detokenizer of one letter a token."""

    def __init__(self) -> None:
        self.text, self._given = "", 0

    def add_token(self, token: int) -> None:
        self.text += letter(token)

    def finalize(self) -> None:
        pass

    @property
    def last_segment(self) -> str:
        segment, self._given = self.text[self._given :], len(self.text)
        return segment


@dataclass
class LetterTokenizer(FakeTokenizer):
    eos_token_ids: frozenset[int] = frozenset({0})

    @property
    def detokenizer(self) -> Letters:  # type: ignore[override]
        return Letters()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1 + ord(c) % (VOCAB - 1) for c in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(letter, tokens))

    def convert_ids_to_tokens(self, token: int) -> str:
        return letter(token)


def make_letter_pair(**tokenizer: bool) -> ModelPair:
    return ModelPair(
        name="tiny",
        target=tiny_target("llama"),
        drafter=tiny_drafter(),
        tokenizer=LetterTokenizer(**tokenizer),  # type: ignore[arg-type]
        dtype=mx.float32,
        block_size=8,
    )


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_templated_pair(detokenizer: type[StreamingDetokenizer] | None = None) -> ModelPair:
    pair = json_pair()
    fast = pair.tokenizer._tokenizer
    fast.chat_template = TEMPLATE
    pair.tokenizer = TokenizerWrapper(
        fast,
        detokenizer or type(pair.tokenizer.detokenizer),
        eos_token_ids=pair.tokenizer.eos_token_ids,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
    )
    return pair
