"""POST /v1/chat/completions: OpenAI's chat protocol."""

from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dflash_mlx.decoding.constraint import Constraint
from dflash_mlx.server.answers import Order
from dflash_mlx.server.channels import REASONING, initial_state, transitions_of
from dflash_mlx.server.chat_reply import ChatReply
from dflash_mlx.server.failures import RequestError
from dflash_mlx.server.fields import Fields
from dflash_mlx.server.formats import read_format
from dflash_mlx.server.grammar import answer_grammar
from dflash_mlx.server.logprobs import read_prompt_logprobs, read_top_logprobs
from dflash_mlx.server.parameters import answers_wanted, max_tokens_of, sampling, stop_strings, wants_draft_and_rounds
from dflash_mlx.server.prompts import (
    ANSWER,
    CONTINUED,
    chat_messages,
    encode_chat,
    prompt_end,
    read_ending,
    template_variables,
)
from dflash_mlx.server.service import Service
from dflash_mlx.server.streaming import EventStream, unless_gone
from dflash_mlx.server.tools import Offer, function_tool, offer, read_choice

# Sent by common clients; they change nothing here. docs/server.md says so.
WITHOUT_EFFECT = (
    "user",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "verbosity",
    "prediction",
    "client_metadata",
    "thread",
    "cache_prompt",
    "provider",
)


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A checked request, but for its prompt, which needs the tokenizer."""

    model: str
    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    order: Order
    wants_json: bool
    schema: dict[str, Any] | None
    stream: bool
    include_usage: bool
    rounds: bool = False
    ending: str = ANSWER


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer, streaming or not. Raises what the edge translates."""
    asked = read_request(service, await service.read_fields(request))
    order = await prepare(service, asked)
    answers = service.submit(order, request)
    reply = ChatReply(service, answers, model=asked.model, include_usage=asked.include_usage, rounds=asked.rounds)
    if asked.stream:
        return EventStream(reply.events(), on_end=answers.close)
    return JSONResponse(await unless_gone(request.receive, reply.whole()))


def read_request(service: Service, fields: Fields) -> ChatRequest:
    """Check a body. Raises RequestError for what is wrong or cannot be done."""
    tokenizer = service.pair.tokenizer
    model = service.check_model(fields.text("model"))
    most = service.defaults.max_tokens
    limit = max_tokens_of(fields, "max_completion_tokens", most)
    older = max_tokens_of(fields, "max_tokens", most)
    params = sampling(
        fields,
        service.defaults,
        max_tokens=limit or older or most,
        vocab_size=service.vocab_size,
    )
    offered = read_tools(fields, tokenizer)
    stops = stop_strings(fields, "stop")
    params = replace(params, stop=stops, top_logprobs=read_top_logprobs(fields))
    wants_json, schema = read_format(fields)
    stream, include_usage = read_stream_options(fields)
    draft, rounds = wants_draft_and_rounds(fields)
    if rounds and not stream:
        fields.ignore("dflash.rounds")
    asked = ChatRequest(
        model=model,
        messages=chat_messages(fields),
        variables=template_variables(fields),
        order=Order(
            prompts=[],
            params=params,
            n=answers_wanted(fields),
            draft=draft,
            offer=offered,
            prompt_logprobs=read_prompt_logprobs(fields, stream=stream),
        ),
        wants_json=wants_json,
        schema=schema,
        stream=stream,
        include_usage=include_usage,
        rounds=rounds,
        ending=read_ending(fields),
    )
    fields.refuse("modalities", "this server writes text only.", unless=(["text"],))
    fields.refuse("store", "this server keeps nothing.", unless=(False,))
    for name in ("audio", "web_search_options", "moderation"):
        fields.refuse(name, "this server writes text only, and searches nothing.")
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        fields.refuse(name, f"it is OpenAI's old form; use {instead}.")
    fields.without_effect(*WITHOUT_EFFECT)
    fields.done()
    return asked


def read_stream_options(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether the stream ends with the token counts."""
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise RequestError("stream_options needs stream.", param="stream_options")
    include_usage = options.flag("include_usage")
    options.without_effect("include_obfuscation")
    options.done()
    return stream, include_usage


def read_tools(fields: Fields, tokenizer: Any) -> Offer:
    """`tools`, `tool_choice` and `parallel_tool_calls`. Raises RequestError."""
    tools = []
    for tool in fields.objects("tools"):
        tool.choice("type", ("function",), "function")
        function = tool.object("function")
        if function is None:
            raise tool.wrong("function", "an object")
        tools.append(function_tool(function))
        tool.done()
    return offer(tools, read_choice(fields), fields.flag("parallel_tool_calls", True), tokenizer)


async def prepare(service: Service, asked: ChatRequest) -> Order:
    """The order with its prompt, markers and constraint. Raises RequestError and UsageError."""
    pair, order = service.pair, asked.order
    tools = order.offer.tools

    def encode() -> tuple[list[int], str]:
        tokens = encode_chat(pair, asked.messages, tools, asked.variables, ending=asked.ending)
        return tokens, prompt_end(pair, tokens)

    prompt, ending = await service.tokenizing(encode)
    state = initial_state(pair.tokenizer, ending)
    params = order.params
    if tools and not order.offer.parallel and pair.tokenizer.tool_call_end:
        # The end of the first call ends the answer, at exactly that token.
        params = replace(params, stop=(*params.stop, pair.tokenizer.tool_call_end))
    return replace(
        order,
        prompts=[prompt],
        params=params,
        state=state,
        transitions=transitions_of(pair.tokenizer, tools=bool(tools)),
        constraint=await _constraint(service, asked, reasoning=state == REASONING),
        continues=asked.ending == CONTINUED,
    )


async def _constraint(service: Service, asked: ChatRequest, *, reasoning: bool) -> Constraint | None:
    """What the answer has to look like: JSON, calls, or one of them; None where it is free."""
    offered = asked.order.offer
    if not asked.wants_json and not offered.forced:
        return None
    if not offered.tools and not reasoning:
        return await service.constraint(asked.schema)
    return await service.grammar(
        answer_grammar(
            service.pair.tokenizer,
            offered=offered,
            wants_json=asked.wants_json,
            schema=asked.schema,
            reasoning=reasoning,
        )
    )
