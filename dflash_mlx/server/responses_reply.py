"""OpenAI's response objects: a whole response, or its events."""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from dflash_mlx.server.answers import Answers, Said
from dflash_mlx.server.channels import REASONING
from dflash_mlx.server.failures import failure
from dflash_mlx.server.logprobs import chat_logprobs
from dflash_mlx.server.service import Service
from dflash_mlx.server.streaming import event
from dflash_mlx.server.tools import ToolCall

Event = tuple[str, dict[str, Any]]


class ResponseReply:
    """One answer as a response: items of reasoning, messages and calls, in the order in which they were written."""

    def __init__(self, service: Service, answers: Answers, *, model: str, echo: dict[str, Any]) -> None:
        self.service, self.answers, self.echo = service, answers, echo
        self.with_logprobs = answers.order.params.top_logprobs is not None
        self.head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }

    async def whole(self) -> dict[str, Any]:
        final: dict[str, Any] = {}
        async for name, fields in self._events():
            if name in ("response.completed", "response.incomplete"):
                final = fields["response"]
        return final

    async def events(self) -> AsyncGenerator[bytes, None]:
        number = 0
        try:
            async for name, fields in self._events():
                yield event({"type": name, "sequence_number": number, **fields}, name)
                number += 1
        except Exception as error:
            self.service.report(error)
            found = failure(error)
            code = found.code or ("server_error" if found.status >= 500 else "invalid_prompt")
            told = {"error": {"code": code, "message": found.message}}
            failed = {"response": {**self._response("failed", []), **told}}
            yield event({"type": "response.failed", "sequence_number": number, **failed}, "response.failed")

    async def _events(self) -> AsyncGenerator[Event, None]:
        items = _Items(self.with_logprobs)
        yield "response.created", {"response": self._response("in_progress", [])}
        yield "response.in_progress", {"response": self._response("in_progress", [])}
        finish = None
        async for piece in self.answers.pieces():
            finish = piece.finish
            entries = chat_logprobs(piece.logprobs, self.service.vocabulary)["content"] if piece.logprobs else []
            for said in piece.said:
                for out in items.add(said, entries):
                    yield out
                entries = []
        status = "incomplete" if finish == "length" else "completed"
        for out in items.close(status):
            yield out
        self.service.observe(self.answers)
        yield f"response.{status}", {"response": self._response(status, items.done, finished=True)}

    def _response(self, status: str, output: list[dict[str, Any]], *, finished: bool = False) -> dict[str, Any]:
        response = {
            **self.head,
            "status": status,
            "output": output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "previous_response_id": None,
            "store": False,
            "usage": None,
            **self.echo,
        }
        if finished:
            response["usage"] = self._usage()
            response["dflash"] = self.answers.statistics()
        return response

    def _usage(self) -> dict[str, Any]:
        read, written = self.answers.prompt_tokens, self.answers.completion_tokens
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": self.answers.cached_tokens},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }


class _Items:
    """The items of a response as events: each is added, grows by deltas, and is done before the next one begins."""

    def __init__(self, with_logprobs: bool) -> None:
        self.with_logprobs = with_logprobs
        self.done: list[dict[str, Any]] = []
        self.kind: str | None = None
        self.id, self.text = "", ""
        self.logprobs: list[Any] = []

    def add(self, said: Said | ToolCall, logprobs: list[Any]) -> list[Event]:
        if isinstance(said, ToolCall):
            return [*self.close(), *self._call(said)]
        kind = "reasoning" if said.kind == REASONING else "message"
        out: list[Event] = []
        if self.kind != kind:
            out += [*self.close(), *self._open(kind)]
        self.text += said.text
        delta = {**self._place(), "delta": said.text}
        if kind == "message":
            self.logprobs += logprobs
            delta["logprobs"] = logprobs
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        return [*out, (name, delta)]

    def close(self, status: str = "completed") -> list[Event]:
        """Finish the open item, if there is one."""
        if self.kind is None:
            return []
        kind, part = self.kind, self._part(self.text)
        place, text = self._place(), self.text
        item = self._item(kind, status, [part])
        if kind == "message":
            name, done = "response.output_text.done", {**place, "text": text, "logprobs": self.logprobs}
        else:
            name, done = "response.reasoning_text.done", {**place, "text": text}
        index = len(self.done)
        self.done.append(item)
        self.kind, self.text, self.logprobs = None, "", []
        return [
            (name, done),
            ("response.content_part.done", {**place, "part": part}),
            ("response.output_item.done", {"output_index": index, "item": item}),
        ]

    def _open(self, kind: str) -> list[Event]:
        self.kind = kind
        self.id = f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}"
        added = {"output_index": len(self.done), "item": self._item(kind, "in_progress", [])}
        part = {**self._place(), "part": self._part("")}
        return [("response.output_item.added", added), ("response.content_part.added", part)]

    def _call(self, call: ToolCall) -> list[Event]:
        """A call comes whole: it cannot be read before its end."""
        index, item_id = len(self.done), f"fc_{uuid.uuid4().hex}"
        item = {"id": item_id, "type": "function_call", "call_id": call.id, "name": call.name}
        item |= {"arguments": call.arguments, "status": "completed"}
        self.done.append(item)
        place = {"item_id": item_id, "output_index": index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            ("response.output_item.added", {"output_index": index, "item": begun}),
            ("response.function_call_arguments.delta", {**place, "delta": call.arguments}),
            ("response.function_call_arguments.done", {**place, "name": call.name, "arguments": call.arguments}),
            ("response.output_item.done", {"output_index": index, "item": item}),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": len(self.done), "content_index": 0}

    def _item(self, kind: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        if kind == "message":
            return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}
        return {"id": self.id, "type": "reasoning", "summary": [], "status": status, "content": content}

    def _part(self, text: str) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        return {**part, "logprobs": self.logprobs} if self.with_logprobs else part
