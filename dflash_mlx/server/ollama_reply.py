"""Ollama's objects: a whole answer, or its lines."""

import json
import time
from collections.abc import AsyncGenerator
from datetime import datetime, timezone
from typing import Any

from dflash_mlx.server.answers import Answers, Piece
from dflash_mlx.server.channels import REASONING
from dflash_mlx.server.failures import failure
from dflash_mlx.server.logprobs import chat_logprobs
from dflash_mlx.server.service import Service
from dflash_mlx.server.tools import ToolCall


class OllamaReply:
    """One answer. text_field: where its text stands ("response"); None for a chat's message."""

    def __init__(self, service: Service, answers: Answers, *, model: str, text_field: str | None) -> None:
        self.service, self.answers, self.model, self.text_field = service, answers, model, text_field
        self.started = time.perf_counter()

    async def whole(self) -> dict[str, Any]:
        pieces = [piece async for piece in self.answers.pieces()]
        return {**self._said(pieces), **self._end(pieces[-1])}

    async def lines(self) -> AsyncGenerator[bytes, None]:
        try:
            async for piece in self.answers.pieces():
                if piece.said or piece.logprobs:
                    yield _line({**self._said([piece]), "done": False})
                if piece.finish is not None:
                    yield _line({**self._said([]), **self._end(piece)})
        except Exception as error:
            self.service.report(error)
            yield _line(failure(error).ollama())

    def waiting(self) -> bytes:
        """A line that says nothing yet."""
        return _line({**self._said([]), "done": False})

    def _said(self, pieces: list[Piece]) -> dict[str, Any]:
        said = [one for piece in pieces for one in piece.said]
        texts = [one for one in said if not isinstance(one, ToolCall)]
        content = "".join(one.text for one in texts if one.kind != REASONING)
        reasoning = "".join(one.text for one in texts if one.kind == REASONING)
        calls = [_call(one) for one in said if isinstance(one, ToolCall)]
        message = {**({"thinking": reasoning} if reasoning else {}), **({"tool_calls": calls} if calls else {})}
        head: dict[str, Any] = {"model": self.model, "created_at": datetime.now(timezone.utc).isoformat()}
        if entries := [entry for piece in pieces for entry in piece.logprobs]:
            head["logprobs"] = chat_logprobs(entries, self.service.vocabulary)["content"]
        if self.text_field is not None:
            return {**head, self.text_field: content, **message}
        return {**head, "message": {"role": "assistant", "content": content, **message}}

    def _end(self, last: Piece) -> dict[str, Any]:
        """How it ended; times are in nanoseconds."""
        self.service.observe(self.answers)
        [answer] = self.answers.all
        waited, first = answer.ticket.queued_seconds or 0.0, answer.ticket.first_token_seconds or 0.0
        total = time.perf_counter() - self.started
        return {
            "done": True,
            "done_reason": "length" if last.finish == "length" else "stop",
            "total_duration": int(total * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self.answers.prompt_tokens,
            "prompt_eval_duration": int(max(0.0, first - waited) * 1e9),
            "eval_count": self.answers.completion_tokens,
            "eval_duration": int(max(0.0, total - first) * 1e9),
            "dflash": self.answers.statistics(),
        }


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _call(call: ToolCall) -> dict[str, Any]:
    """A call, whose arguments are an object here."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = {}
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments}}
