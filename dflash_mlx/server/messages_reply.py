"""Anthropic's objects: a whole message, or its events."""

import json
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from dflash_mlx.server.answers import Answers, Piece, Said
from dflash_mlx.server.channels import REASONING
from dflash_mlx.server.failures import failure
from dflash_mlx.server.service import Service
from dflash_mlx.server.streaming import event
from dflash_mlx.server.tools import ToolCall

PING = event({"type": "ping"}, "ping")


class MessageReply:
    """One answer as Anthropic's clients expect it."""

    def __init__(self, service: Service, answers: Answers, *, model: str) -> None:
        self.service, self.answers = service, answers
        self.head = {"id": f"msg_{uuid.uuid4().hex[:24]}", "type": "message", "role": "assistant", "model": model}

    async def whole(self) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        last = None
        async for piece in self.answers.pieces():
            last = piece
            for said in piece.said:
                _extend(blocks, said)
        assert last is not None
        self.service.observe(self.answers)
        return {
            **self.head,
            "content": blocks,
            **self._stop(last),
            "usage": self._usage(),
            "dflash": self.answers.statistics(),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            pieces = self.answers.pieces()
            # The first event carries the prompt's token counts, which are known when the first piece is there.
            first = await anext(pieces)
            usage = {**self._usage(), "output_tokens": 0}
            start: dict[str, Any] = {
                **self.head,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": usage,
            }
            yield event({"type": "message_start", "message": start}, "message_start")
            blocks = _Blocks()
            for out in blocks.add(first):
                yield out
            last = first
            async for piece in pieces:
                last = piece
                for out in blocks.add(piece):
                    yield out
            for out in blocks.close():
                yield out
            self.service.observe(self.answers)
            delta = {"type": "message_delta", "delta": self._stop(last), "usage": self._usage()}
            yield event({**delta, "dflash": self.answers.statistics()}, "message_delta")
            yield event({"type": "message_stop"}, "message_stop")
        except Exception as error:
            self.service.report(error)
            yield event(failure(error).anthropic(), "error")

    def _usage(self) -> dict[str, Any]:
        """input_tokens are those that were not cached, as Anthropic counts."""
        cached = self.answers.cached_tokens
        return {
            "input_tokens": self.answers.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.answers.completion_tokens,
        }

    def _stop(self, last: Piece) -> dict[str, Any]:
        if last.finish == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if last.finish == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if last.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_string}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _extend(blocks: list[dict[str, Any]], said: Said | ToolCall) -> None:
    """Add to the last block, or begin a new one where the kind changes."""
    if isinstance(said, ToolCall):
        blocks.append({"type": "tool_use", "id": said.id, "name": said.name, "input": _input(said)})
        return
    kind = "thinking" if said.kind == REASONING else "text"
    if not blocks or blocks[-1]["type"] != kind:
        blocks.append(_empty(kind))
    blocks[-1][kind] += said.text


def _empty(kind: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": "", "signature": ""} if kind == "thinking" else {"type": "text", "text": ""}


def _input(call: ToolCall) -> Any:
    """A call's arguments as the object that Anthropic sends; text that is no object is wrapped."""
    try:
        value = json.loads(call.arguments or "{}")
    except ValueError:
        value = call.arguments
    return value if isinstance(value, dict) else {"value": value}


class _Blocks:
    """Content blocks as events: each starts, grows by deltas, and stops before the next one starts."""

    def __init__(self) -> None:
        self.index = -1
        self.open: str | None = None

    def add(self, piece: Piece) -> list[bytes]:
        out: list[bytes] = []
        for said in piece.said:
            if isinstance(said, ToolCall):
                block = {"type": "tool_use", "id": said.id, "name": said.name, "input": {}}
                whole = json.dumps(_input(said), ensure_ascii=False)
                out += [*self._start("tool_use", block), self._delta("input_json_delta", "partial_json", whole)]
                out += self.close()
                continue
            kind = "thinking" if said.kind == REASONING else "text"
            if self.open != kind:
                out += self._start(kind, _empty(kind))
            out.append(self._delta(f"{kind}_delta", kind, said.text))
        return out

    def close(self) -> list[bytes]:
        if self.open is None:
            return []
        self.open = None
        return [event({"type": "content_block_stop", "index": self.index}, "content_block_stop")]

    def _start(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        out = self.close()
        self.index += 1
        self.open = kind
        start = {"type": "content_block_start", "index": self.index, "content_block": block}
        return [*out, event(start, "content_block_start")]

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        delta = {"type": "content_block_delta", "index": self.index, "delta": {"type": kind, name: text}}
        return event(delta, "content_block_delta")
