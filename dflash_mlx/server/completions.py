"""POST /v1/completions: OpenAI's older protocol, which continues a text."""

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dflash_mlx.detokenizing import decoded
from dflash_mlx.pair import ModelPair
from dflash_mlx.server.answers import Answers, Order, Piece, Said
from dflash_mlx.server.chat import WITHOUT_EFFECT, read_stream_options
from dflash_mlx.server.chat_reply import usage
from dflash_mlx.server.failures import RequestError, failure
from dflash_mlx.server.fields import Fields
from dflash_mlx.server.fill_in_the_middle import fill_in_the_middle
from dflash_mlx.server.formats import read_format
from dflash_mlx.server.logprobs import (
    Echo,
    Offsets,
    completion_logprobs,
    echo_logprobs,
    prompt_logprobs,
    read_prompt_logprobs,
)
from dflash_mlx.server.parameters import MAX_ANSWERS, answers_wanted, max_tokens_of, sampling, stop_strings, wants_draft
from dflash_mlx.server.service import Service
from dflash_mlx.server.streaming import EventStream, event, unless_gone

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """A checked request; prompts are texts or token ids. echo: the answers begin with their prompts.

    prompt_logprobs: how many alternatives to report for each token of a prompt, beside its answer; None: no report.
    """

    model: str
    prompts: list[str | list[int]]
    suffix: str
    echo: bool
    prompt_logprobs: int | None
    order: Order
    wants_json: bool
    schema: dict[str, Any] | None
    stream: bool
    include_usage: bool


async def completions(service: Service, request: Request) -> Response:
    """Answer, streaming or not. Raises what the edge translates."""
    asked = read_request(service, await service.read_fields(request))
    order = await service.tokenizing(lambda: _with_prompts(service.pair, asked))
    constraint = await service.constraint(asked.schema) if asked.wants_json else None
    echoes = await service.tokenizing(lambda: _echoes(service.pair, asked, order.prompts)) if asked.echo else []
    answers = service.submit(replace(order, constraint=constraint), request)
    reply = _Reply(service, asked, answers, echoes)
    if asked.stream:
        return EventStream(reply.events(), on_end=answers.close)
    return JSONResponse(await unless_gone(request.receive, reply.whole()))


def read_request(service: Service, fields: Fields) -> CompletionRequest:
    """Check a body. Raises RequestError for what is wrong or cannot be done."""
    model = service.check_model(fields.text("model"))
    only_prompt = type(fields.any("max_tokens")) is int and fields.any("max_tokens") == 0
    wanted = 1 if only_prompt else max_tokens_of(fields, "max_tokens", service.defaults.max_tokens)
    max_tokens = wanted or DEFAULT_MAX_TOKENS
    params = sampling(fields, service.defaults, max_tokens=max_tokens, vocab_size=service.vocab_size)
    params = replace(params, stop=stop_strings(fields, "stop"), top_logprobs=fields.whole("logprobs", 0, 20))
    prompts = _read_prompts(fields, service.vocab_size)
    n = answers_wanted(fields, len(prompts))
    wants_json, schema = read_format(fields)
    stream, include_usage = read_stream_options(fields)
    echo, suffix = fields.flag("echo"), fields.text("suffix") or ""
    scored = read_prompt_logprobs(fields, stream=stream)
    alternatives = [n for n in (scored, params.top_logprobs if echo else None) if n is not None]
    if suffix and (echo or not all(isinstance(prompt, str) for prompt in prompts)):
        raise RequestError("suffix needs prompts that are texts, and no echo.", param="suffix")
    order = Order(
        prompts=[],
        params=params,
        n=n,
        draft=wants_draft(fields),
        continues=True,
        prompt_logprobs=max(alternatives, default=None),
        only_prompt=only_prompt,
    )
    asked = CompletionRequest(
        model=model,
        prompts=prompts,
        suffix=suffix,
        echo=echo,
        prompt_logprobs=scored,
        order=order,
        wants_json=wants_json,
        schema=schema,
        stream=stream,
        include_usage=include_usage,
    )
    fields.refuse("best_of", "every answer that is made is sent; use n.", unless=(n,))
    fields.without_effect(*WITHOUT_EFFECT)
    fields.done()
    return asked


def _read_prompts(fields: Fields, vocab_size: int) -> list[str | list[int]]:
    """A text, texts, token ids, or lists of token ids."""
    value = fields.any("prompt")
    expected = "a string, token ids, or a list of these"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise fields.wrong("prompt", expected)
    prompts = [value] if all(isinstance(item, int) for item in value) else value
    if len(prompts) > MAX_ANSWERS:
        raise RequestError(f"prompt should be at most {MAX_ANSWERS} prompts; got {len(prompts)}.", param="prompt")
    for prompt in prompts:
        if isinstance(prompt, str):
            continue
        if not isinstance(prompt, list) or not prompt:
            raise fields.wrong("prompt", expected)
        if not all(type(token) is int and 0 <= token < vocab_size for token in prompt):
            raise RequestError(f"token ids should be whole numbers from 0 to {vocab_size - 1}.", param="prompt")
    return prompts


def _with_prompts(pair: ModelPair, asked: CompletionRequest) -> Order:
    """The order with its prompts as token ids. Raises RequestError."""
    if not asked.suffix:
        encoded = [pair.encode_prompt(prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]
        return replace(asked.order, prompts=encoded)
    filled = [fill_in_the_middle(pair.tokenizer, str(prompt), asked.suffix) for prompt in asked.prompts]
    params = asked.order.params
    params = replace(params, stop_token_ids=tuple(dict.fromkeys([*params.stop_token_ids, *filled[0][1]])))
    return replace(asked.order, prompts=[prompt for prompt, _ in filled], params=params)


def _echoes(pair: ModelPair, asked: CompletionRequest, encoded: list[list[int]]) -> list[Echo]:
    """The prompts as they are echoed. What the tokenizer puts in front of a text is no part of that text."""
    echoes = []
    for prompt, tokens in zip(asked.prompts, encoded, strict=True):
        if isinstance(prompt, str):
            bare = pair.tokenizer.encode(prompt, add_special_tokens=False)
            echoes.append(Echo(tokens, prompt, added=int(tokens[1:] == list(bare))))
        else:
            echoes.append(Echo(tokens, decoded(pair.tokenizer, tokens, continues=True), added=0))
    return echoes


class _Reply:
    """OpenAI's objects for one request. echoes: of the prompts, where they are wanted."""

    def __init__(self, service: Service, asked: CompletionRequest, answers: Answers, echoes: list[Echo]) -> None:
        self.service, self.asked, self.answers = service, asked, answers
        self.echoes = [echo for echo in echoes for _ in range(asked.order.n)]
        self.begun = [not echoes] * len(answers.all)
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }
        self.with_logprobs = asked.order.params.top_logprobs is not None
        self.offsets = [Offsets() for _ in answers.all]

    async def whole(self) -> dict[str, Any]:
        texts = [""] * len(self.answers.all)
        logprobs: list[dict[str, list[Any]]] = [
            {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} for _ in texts
        ]
        finishes: list[str | None] = [None] * len(texts)
        async for piece in self.answers.pieces():
            text, found = self._added(piece)
            texts[piece.index] += text
            for name, values in (found or {}).items():
                logprobs[piece.index][name] += values
            finishes[piece.index] = piece.finish
        self.service.observe(self.answers)
        choices: list[dict[str, Any]] = [
            {"index": i, "text": text, "logprobs": logprobs[i] if self.with_logprobs else None, "finish_reason": finish}
            for i, (text, finish) in enumerate(zip(texts, finishes, strict=True))
        ]
        if (count := self.asked.prompt_logprobs) is not None:
            for choice, answer in zip(choices, self.answers.all, strict=True):
                entries = answer.ticket.prompt_logprobs
                choice["prompt_logprobs"] = prompt_logprobs(entries, count, self.service.vocabulary)
        return {**self.head, "choices": choices, "usage": usage(self.answers), "dflash": self.answers.statistics()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            async for piece in self.answers.pieces():
                text, logprobs = self._added(piece)
                if not text and logprobs is None and piece.finish is None:
                    continue
                choice = {"index": piece.index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish}
                chunk: dict[str, Any] = {**self.head, "choices": [choice]}
                if self.asked.include_usage:
                    chunk["usage"] = None
                elif piece.finish is not None and self.answers.finished:
                    chunk["dflash"] = self.answers.statistics()
                yield event(chunk)
            self.service.observe(self.answers)
            if self.asked.include_usage:
                totals = {"usage": usage(self.answers), "dflash": self.answers.statistics()}
                yield event({**self.head, "choices": [], **totals})
        except Exception as error:
            self.service.report(error)
            yield event(failure(error).openai())
            return
        yield event("[DONE]")

    def _added(self, piece: Piece) -> tuple[str, dict[str, Any] | None]:
        """The text of a piece, and its log-probabilities; in front of the first one stands the echo of the prompt."""
        if self.begun[piece.index]:
            return _text(piece), self._logprobs(piece)
        self.begun[piece.index] = True
        echo, offsets = self.echoes[piece.index], self.offsets[piece.index]
        text = echo.text + _text(piece)
        if not self.with_logprobs:
            return text, None
        count = self.asked.order.params.top_logprobs
        entries = [replace(e, top=e.top[:count]) for e in self.answers.all[piece.index].ticket.prompt_logprobs]
        found = echo_logprobs(echo, entries, self.service.vocabulary, offsets)
        for name, values in (self._logprobs(piece) or {}).items():
            found[name] += values
        return text, found

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not piece.logprobs:
            return None
        return completion_logprobs(piece.logprobs, self.service.vocabulary, self.offsets[piece.index])


def _text(piece: Piece) -> str:
    return "".join(said.text for said in piece.said if isinstance(said, Said))
