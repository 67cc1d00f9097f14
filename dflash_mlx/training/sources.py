"""Where conversations come from when the target does not invent everything: prompt, topic and conversation files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dflash_mlx.errors import UsageError
from dflash_mlx.training.store import Conversation
from dflash_mlx.training.template import ChatFrame, encode_text, render

_TEXT_KEYS = ("prompt", "instruction", "question", "text", "content")
_CHAT_KEYS = ("messages", "conversations", "conversation")


def read_prompts(path: Path) -> list[list[dict[str, str]]]:
    """Chats that end with a user turn, from JSONL (`prompt` or `messages`) or text (a prompt a line).

    Raises UsageError naming the line that cannot be read.
    """
    chats = []
    for number, value in _lines(path):
        chat = [_message("user", value)] if isinstance(value, str) else _chat_of(value, path, number)
        while chat and chat[-1]["role"] == "assistant":
            chat = chat[:-1]
        if not chat or chat[-1]["role"] != "user":
            raise UsageError(f"{path}, line {number}: expected a chat with a user turn.")
        chats.append(chat)
    return _not_empty(chats, path)


def read_topics(path: Path) -> list[str]:
    """Beginnings of user turns, a line each."""
    return _not_empty([str(value) for _, value in _lines(path, json_lines=False)], path)


def read_conversations(path: Path) -> list[list[dict[str, str]]]:
    """Finished chats from JSONL, each with an answer at least. Raises UsageError naming the line."""
    chats = []
    for number, value in _lines(path):
        if isinstance(value, str):
            raise UsageError(f"{path}, line {number}: expected a JSON object with messages, found text.")
        chat = _chat_of(value, path, number)
        if not any(message["role"] == "assistant" for message in chat):
            raise UsageError(f"{path}, line {number}: expected an assistant's message, found none.")
        chats.append(chat)
    return _not_empty(chats, path)


def encode_prompts(
    chats: list[list[dict[str, str]]], tokenizer: Any, *, thinking: str, longest: int
) -> list[list[int]]:
    """Token ids of each chat up to where the answer begins; chats longer than `longest` are left out."""
    if tokenizer.has_chat_template:
        texts = [render(tokenizer, chat, thinking=thinking) for chat in chats]
        encoded = [encode_text(tokenizer, text) for text in texts]
    else:
        encoded = [
            [int(i) for i in tokenizer.encode("\n".join(message["content"] for message in chat))] for chat in chats
        ]
    return [tokens for tokens in encoded if 0 < len(tokens) <= longest]


def encode_conversation(
    chat: list[dict[str, str]], tokenizer: Any, frame: ChatFrame, *, thinking: str, max_length: int
) -> Conversation | None:
    """A finished chat as token ids with its answers' spans; None where the template does not keep turns apart.

    Cut at `max_length`.
    """
    whole = encode_text(tokenizer, render(tokenizer, chat, thinking=thinking, generation=False))
    spans = []
    for i, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        opening = encode_text(tokenizer, render(tokenizer, chat[:i], thinking=thinking))
        if whole[: len(opening)] != opening:
            return None
        start = len(opening)
        end = next((at + 1 for at in range(start, len(whole)) if whole[at] in frame.eos_ids), len(whole))
        spans.append((start, min(end, max_length)))
    spans = [(start, end) for start, end in spans if end > start]
    if not spans:
        return None
    return Conversation(np.array(whole[: spans[-1][1]], np.int32), tuple(spans))


def _lines(path: Path, *, json_lines: bool | None = None) -> Iterator[tuple[int, Any]]:
    """(line number, JSON object or text) of each line that is not empty."""
    as_json = path.suffix in (".jsonl", ".json") if json_lines is None else json_lines
    try:
        with path.open(encoding="utf-8") as file:
            lines = [(number, line.strip()) for number, line in enumerate(file, start=1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    for number, line in lines:
        try:
            yield number, json.loads(line) if as_json else line
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: expected a JSON object a line: {error}.") from error


def _chat_of(value: Any, path: Path, number: int) -> list[dict[str, str]]:
    if isinstance(value, dict):
        for key in _TEXT_KEYS:
            if isinstance(value.get(key), str):
                return [_message("user", value[key])]
        value = next((value[key] for key in _CHAT_KEYS if isinstance(value.get(key), list)), None)
    if not isinstance(value, list):
        raise UsageError(f"{path}, line {number}: expected `prompt` or `messages`, found neither.")
    roles = {"human": "user", "gpt": "assistant"}
    try:
        chat = [
            _message(m.get("role") or roles.get(m["from"], m["from"]), m.get("content") or m["value"]) for m in value
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}, line {number}: expected messages with role and content.") from error
    if not all(isinstance(text, str) for message in chat for text in message.values()):
        raise UsageError(f"{path}, line {number}: expected role and content to be text.")
    return chat


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _not_empty(values: list[Any], path: Path) -> list[Any]:
    if not values:
        raise UsageError(f"{path} is empty; expected a line at least.")
    return values
