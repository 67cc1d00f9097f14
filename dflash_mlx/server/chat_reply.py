"""OpenAI's chat objects: a whole answer, or its chunks."""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from dflash_mlx.answer import GenerationResponse
from dflash_mlx.server.answers import Answers, Piece, Said
from dflash_mlx.server.channels import CONTENT, REASONING
from dflash_mlx.server.failures import failure
from dflash_mlx.server.logprobs import chat_logprobs, prompt_logprobs
from dflash_mlx.server.service import Service
from dflash_mlx.server.streaming import event
from dflash_mlx.server.tools import ToolCall


def usage(answers: Answers) -> dict[str, Any]:
    """OpenAI's token counts: what was read and what was emitted."""
    prompt, completion = answers.prompt_tokens, answers.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": answers.cached_tokens},
    }


class ChatReply:
    """OpenAI's objects for one request. rounds: chunks say what their round brought."""

    def __init__(
        self, service: Service, answers: Answers, *, model: str, include_usage: bool, rounds: bool = False
    ) -> None:
        self.service, self.answers, self.include_usage, self.rounds = service, answers, include_usage, rounds
        self.head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.with_logprobs = answers.order.params.top_logprobs is not None

    async def whole(self) -> dict[str, Any]:
        choices = [_Choice(i) for i in range(len(self.answers.all))]
        async for piece in self.answers.pieces():
            choices[piece.index].add(piece, self.service)
        self.service.observe(self.answers)
        answer = {
            **self.head,
            "object": "chat.completion",
            "choices": [choice.to_json(self.with_logprobs) for choice in choices],
            "usage": usage(self.answers),
            "dflash": self.answers.statistics(),
        }
        if (count := self.answers.order.prompt_logprobs) is not None:
            entries = self.answers.all[0].ticket.prompt_logprobs
            answer["prompt_logprobs"] = prompt_logprobs(entries, count, self.service.vocabulary)
        return answer

    async def events(self) -> AsyncGenerator[bytes, None]:
        calls = [0] * len(self.answers.all)
        try:
            for index in range(len(self.answers.all)):
                yield self._chunk(index, {"role": "assistant", "content": ""})
            async for piece in self.answers.pieces():
                for said in self._deltas(piece, calls):
                    yield said
                if piece.finish is not None:
                    last = self.answers.finished and not self.include_usage
                    statistics = self.answers.statistics() if last else None
                    yield self._chunk(piece.index, {}, finish=piece.finish, dflash=statistics)
            self.service.observe(self.answers)
            if self.include_usage:
                head = {**self.head, "object": "chat.completion.chunk", "choices": []}
                yield event({**head, "usage": usage(self.answers), "dflash": self.answers.statistics()})
        except Exception as error:
            self.service.report(error)
            yield event(failure(error).openai())
            return
        yield event("[DONE]")

    def _deltas(self, piece: Piece, calls: list[int]) -> list[bytes]:
        """A chunk for each stretch of text and each call. The round's log-probabilities and figures go with the first
        of them; a round that shows no text yet has a chunk for them alone."""
        logprobs = chat_logprobs(piece.logprobs, self.service.vocabulary) if piece.logprobs else None
        figures = {"round": _round(piece.response)} if self.rounds else None
        chunks = []
        for said in piece.said or ([Said(CONTENT, "")] if logprobs or figures else []):
            delta = _delta(said, calls, piece.index)
            chunks.append(self._chunk(piece.index, delta, logprobs=logprobs, dflash=figures))
            logprobs = figures = None
        return chunks

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
        dflash: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk: dict[str, Any] = {**self.head, "object": "chat.completion.chunk", "choices": [choice]}
        if self.include_usage:
            chunk["usage"] = None
        if dflash is not None:
            chunk["dflash"] = dflash
        return event(chunk)


def _round(response: GenerationResponse) -> dict[str, int]:
    """What a round brought: the tokens of the answer, and how many drafts were verified and kept for them."""
    return {
        "tokens": len(response.token_ids),
        "drafted": response.width or 0,
        "accepted": response.num_accepted or 0,
    }


def _delta(said: Said | ToolCall, calls: list[int], index: int) -> dict[str, Any]:
    if isinstance(said, ToolCall):
        calls[index] += 1
        return {"tool_calls": [{"index": calls[index] - 1, **_call(said)}]}
    return {"reasoning_content" if said.kind == REASONING else "content": said.text}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class _Choice:
    """A whole answer, collected."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.content, self.reasoning = "", ""
        self.calls: list[ToolCall] = []
        self.logprobs: list[Any] = []
        self.finish: str | None = None

    def add(self, piece: Piece, service: Service) -> None:
        for said in piece.said:
            if isinstance(said, ToolCall):
                self.calls.append(said)
            elif said.kind == REASONING:
                self.reasoning += said.text
            else:
                self.content += said.text
        if piece.logprobs:
            self.logprobs += chat_logprobs(piece.logprobs, service.vocabulary)["content"]
        self.finish = piece.finish

    def to_json(self, with_logprobs: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_call(call) for call in self.calls]
            message["content"] = self.content or None
        logprobs = {"content": self.logprobs, "refusal": None} if with_logprobs else None
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": self.finish}
