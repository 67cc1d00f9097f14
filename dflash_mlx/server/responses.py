"""POST /v1/responses: OpenAI's newer protocol, without its memory: each request brings its whole conversation."""

from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dflash_mlx.server.answers import Order
from dflash_mlx.server.chat import WITHOUT_EFFECT, ChatRequest, prepare
from dflash_mlx.server.failures import RequestError
from dflash_mlx.server.fields import Fields
from dflash_mlx.server.formats import read_response_format
from dflash_mlx.server.parameters import max_tokens_of, sampling, wants_draft
from dflash_mlx.server.prompts import earlier_call, effort_variables, template_variables, text_of
from dflash_mlx.server.responses_reply import ResponseReply
from dflash_mlx.server.service import Service
from dflash_mlx.server.streaming import EventStream, unless_gone
from dflash_mlx.server.tools import Offer, function_tool, offer, read_choice

_LOGPROBS = "message.output_text.logprobs"
# What OpenAI's own tools did. Their results are in the messages after them, so a conversation goes on without these.
_OTHERS_WORK = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
)
_ENCRYPTED = "reasoning.encrypted_content"  # asked for by clients that keep nothing; our reasoning is plain text


@dataclass(frozen=True, kw_only=True)
class ResponseRequest(ChatRequest):
    """`echo` are the request's settings that the answer repeats."""

    echo: dict[str, Any]


async def responses(service: Service, request: Request) -> Response:
    """Answer, streaming or not. Raises what the edge translates."""
    asked = read_request(service, await service.read_fields(request))
    answers = service.submit(await prepare(service, asked), request)
    reply = ResponseReply(service, answers, model=asked.model, echo=asked.echo)
    if asked.stream:
        return EventStream(reply.events(), on_end=answers.close)
    return JSONResponse(await unless_gone(request.receive, reply.whole()))


def read_request(service: Service, fields: Fields) -> ResponseRequest:
    """Check a body. Raises RequestError for what is wrong or cannot be done."""
    model = service.check_model(fields.text("model"))
    max_tokens = max_tokens_of(fields, "max_output_tokens", service.defaults.max_tokens)
    params = sampling(
        fields,
        service.defaults,
        max_tokens=max_tokens or service.defaults.max_tokens,
        vocab_size=service.vocab_size,
    )
    params = replace(params, top_logprobs=_read_logprobs(fields))
    offered = _read_tools(fields, service.pair.tokenizer)
    text = fields.object("text")
    wants_json, schema = read_response_format(text.object("format") if text else None, nested=False)
    if text is not None:
        text.without_effect("verbosity")
        text.done()
    instructions = fields.text("instructions")
    first = [{"role": "system", "content": instructions}] if instructions else []
    asked = ResponseRequest(
        model=model,
        messages=[*first, *_conversation(fields)],
        variables={**_reasoning(fields.object("reasoning")), **template_variables(fields)},
        order=Order(prompts=[], params=params, draft=wants_draft(fields), offer=offered),
        wants_json=wants_json,
        schema=schema,
        stream=fields.flag("stream"),
        include_usage=True,
        echo={
            "instructions": instructions,
            "max_output_tokens": max_tokens,
            "parallel_tool_calls": fields.flag("parallel_tool_calls", True),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "tool_choice": fields.any("tool_choice") or "auto",
            "tools": fields.any("tools") or [],
            "text": fields.any("text") or {"format": {"type": "text"}},
            "metadata": fields.any("metadata") or {},
        },
    )
    _refuse_memory(fields)
    fields.without_effect("stream_options", *WITHOUT_EFFECT)
    fields.done()
    return asked


def _refuse_memory(fields: Fields) -> None:
    """What only a server that keeps answers, or runs tools, could do."""
    fields.refuse("store", "this server keeps nothing.", unless=(False,))
    fields.refuse("background", "ask and wait, or stream.", unless=(False,))
    fields.refuse("truncation", "a conversation that is too long is refused.", unless=("disabled",))
    for name in ("previous_response_id", "conversation", "prompt", "max_tool_calls", "context_management"):
        fields.refuse(name, "this server keeps nothing; send the whole conversation as input.")


def _read_logprobs(fields: Fields) -> int | None:
    top = fields.whole("top_logprobs", 0, 20)
    wanted = False
    for name in fields.items("include") or []:
        if name not in (_LOGPROBS, _ENCRYPTED):
            raise RequestError(f"include may be {_LOGPROBS}; got {str(name)[:80]!r}.", param="include")
        wanted = wanted or name == _LOGPROBS
    if top and not wanted:
        raise RequestError(f"top_logprobs needs {_LOGPROBS} in include.", param="top_logprobs")
    return (top or 0) if wanted else None


def _reasoning(reasoning: Fields | None) -> dict[str, Any]:
    if reasoning is None:
        return {}
    variables = effort_variables(reasoning.text("effort"))
    reasoning.without_effect("summary", "generate_summary")
    reasoning.done()
    return variables


def _read_tools(fields: Fields, tokenizer: Any) -> Offer:
    tools = []
    for tool in fields.objects("tools"):
        kind = tool.required_text("type")
        if kind != "function":
            # Of OpenAI's own tools, which this server does not have, the model is not told.
            fields.ignore(f"{tool.where('type')}.{kind}")
            continue
        tools.append(function_tool(tool))
    return offer(tools, read_choice(fields), fields.flag("parallel_tool_calls", True), tokenizer)


def _conversation(fields: Fields) -> list[dict[str, Any]]:
    """The input as chat templates expect it. An answer's reasoning, text and calls become one message again."""
    value = fields.any("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    items = fields.objects("input")
    if not items:
        raise fields.wrong("input", "a string or a list of at least one item")
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.text("type") or "message"
        if kind in _OTHERS_WORK:
            fields.ignore(f"{item.where('type')}.{kind}")
            continue
        if kind not in ("message", "function_call", "function_call_output", "reasoning"):
            raise RequestError(
                f"{item.where('type')} {kind[:60]} is not supported: this server has no tools and no memory. "
                "Send messages, function_call, function_call_output and reasoning.",
                param=item.where("type"),
            )
        item.without_effect("id", "status", "phase")
        if kind == "message":
            _add_message(messages, item)
        elif kind == "function_call_output":
            output = text_of(item, "output", ("input_text", "output_text"))
            messages.append({"role": "tool", "tool_call_id": item.required_text("call_id"), "content": output})
        elif kind == "function_call":
            call = earlier_call(item.required_text("call_id"), item.required_text("name"), item.any("arguments"))
            _answer(messages).setdefault("tool_calls", []).append(call)
        else:
            _add_reasoning(messages, item)
        item.done()
    return messages


def _answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that is being put together: the last message, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_message(messages: list[dict[str, Any]], item: Fields) -> None:
    role = item.choice("role", ("system", "developer", "user", "assistant"), "")
    if not role:
        raise item.wrong("role", "one of system, developer, user, assistant")
    content = text_of(item, "content", ("input_text", "output_text", "text", "refusal"))
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == "assistant" and not last["content"] and "tool_calls" not in last:
        last["content"] = content
    else:
        messages.append({"role": "system" if role == "developer" else role, "content": content})


def _add_reasoning(messages: list[dict[str, Any]], item: Fields) -> None:
    texts = [part.required_text("text") for part in item.objects("content")]
    item.without_effect("summary", "encrypted_content")
    if texts:
        messages.append({"role": "assistant", "content": "", "reasoning_content": "".join(texts)})
