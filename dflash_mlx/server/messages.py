"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol."""

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dflash_mlx.server.answers import Order
from dflash_mlx.server.chat import ChatRequest, prepare
from dflash_mlx.server.failures import RequestError
from dflash_mlx.server.fields import Fields
from dflash_mlx.server.messages_reply import PING, MessageReply
from dflash_mlx.server.parameters import MAX_TOKENS, sampling, stop_strings, wants_draft
from dflash_mlx.server.prompts import ANSWER, CONTINUED, earlier_call, effort_variables, template_variables
from dflash_mlx.server.service import Service
from dflash_mlx.server.streaming import EventStream, unless_gone
from dflash_mlx.server.tools import Choice, Offer, function_tool, offer

# Sent by common clients; they change nothing here. docs/server.md says so.
WITHOUT_EFFECT = (
    "metadata",
    "service_tier",
    "context_management",
    "inference_geo",
    "cache_control",
    "betas",
    "speed",
    "diagnostics",
    "user_profile_id",
    "workspace_id",
)


async def messages(service: Service, request: Request) -> Response:
    """Answer, streaming or not. Raises what the edge translates."""
    asked = read_request(service, await service.read_fields(request))
    order = await prepare(service, asked)
    answers = service.submit(order, request)
    reply = MessageReply(service, answers, model=asked.model)
    if asked.stream:
        return EventStream(reply.events(), on_end=answers.close, keep_alive=PING)
    return JSONResponse(await unless_gone(request.receive, reply.whole()))


async def count_tokens(service: Service, request: Request) -> Response:
    """How many tokens the request's prompt has."""
    asked = read_request(service, await service.read_fields(request), counting=True)
    free = replace(asked.order, offer=replace(asked.order.offer, forced=False))
    order = await prepare(service, replace(asked, wants_json=False, order=free))
    return JSONResponse({"input_tokens": len(order.prompts[0])})


def read_request(service: Service, fields: Fields, *, counting: bool = False) -> ChatRequest:
    """Check a body. Raises RequestError for what is wrong or cannot be done."""
    model = service.check_model(fields.text("model"))
    max_tokens = fields.whole("max_tokens", 1, MAX_TOKENS)
    if max_tokens is None and not counting:
        raise fields.wrong("max_tokens", "a whole number of at least 1")
    params = sampling(
        fields, service.defaults, max_tokens=max_tokens or 1, vocab_size=service.vocab_size, top_temperature=1.0
    )
    params = replace(params, stop=stop_strings(fields, "stop_sequences"))
    offered = replace(_read_tools(fields, service.pair.tokenizer), id_prefix="toolu_")
    wants_json, schema, effort = _read_output_config(fields.object("output_config"))
    variables = {**_thinking(fields.object("thinking")), **effort_variables(effort), **template_variables(fields)}
    conversation = [*_system(fields), *_conversation(fields)]
    begun = conversation[-1]["role"] == "assistant"  # the client has written the beginning of the answer
    asked = ChatRequest(
        model=model,
        messages=conversation,
        variables=variables,
        order=Order(prompts=[], params=params, draft=wants_draft(fields), offer=offered, stops=params.stop),
        wants_json=wants_json,
        schema=schema,
        stream=fields.flag("stream"),
        include_usage=True,
        ending=CONTINUED if begun else ANSWER,
    )
    fields.refuse("mcp_servers", "this server calls no other servers.", unless=([],))
    fields.refuse("container", "this server runs no code.")
    fields.without_effect(*WITHOUT_EFFECT)
    fields.done()
    return asked


def _thinking(thinking: Fields | None) -> dict[str, Any]:
    """`thinking` as the variable that reasoning models' templates know. A budget has no effect."""
    if thinking is None:
        return {}
    kind = thinking.choice("type", ("enabled", "disabled", "adaptive"), "enabled")
    thinking.without_effect("budget_tokens", "display")
    thinking.done()
    return {"enable_thinking": kind != "disabled"}


def _read_output_config(config: Fields | None) -> tuple[bool, dict[str, Any] | None, str | None]:
    if config is None:
        return False, None, None
    schema = None
    form = config.object("format")
    if form is not None:
        form.choice("type", ("json_schema",), "json_schema")
        schema = form.mapping("schema")
        if schema is None:
            raise form.wrong("schema", "an object")
        form.without_effect("name")
        form.done()
    effort = config.text("effort")
    config.done()
    return form is not None, schema, effort


def _read_tools(fields: Fields, tokenizer: Any) -> Offer:
    tools = []
    for tool in fields.objects("tools"):
        kind = tool.text("type")
        if kind not in (None, "custom"):
            raise RequestError(
                f"{tool.where('type')} {str(kind)[:60]} is not supported: this server runs no tools of its own.",
                param="tools",
            )
        tools.append(function_tool(tool, schema="input_schema"))
    choice = fields.object("tool_choice")
    if choice is None:
        return offer(tools, Choice(), True, tokenizer)
    kind = choice.choice("type", ("auto", "any", "tool", "none"), "auto")
    only = (choice.required_text("name"),) if kind == "tool" else None
    parallel = not choice.flag("disable_parallel_tool_use")
    choice.done()
    mode = {"any": "required", "tool": "required"}.get(kind, kind)
    return offer(tools, Choice(mode, only, several=only is None), parallel, tokenizer)


def _system(fields: Fields) -> list[dict[str, Any]]:
    value = fields.any("system")
    if value is None:
        return []
    text = value if isinstance(value, str) else "\n\n".join(_text(block) for block in fields.objects("system"))
    return [{"role": "system", "content": text}]


def _text(block: Fields) -> str:
    kind = block.required_text("type")
    if kind != "text":
        raise RequestError(f"{block.where('type')} {kind[:40]} is not supported: this server reads text only.")
    block.without_effect("cache_control", "citations")
    text = block.required_text("text")
    block.done()
    return text


def _conversation(fields: Fields) -> list[dict[str, Any]]:
    """Anthropic's messages as chat templates expect them: a tool's result is a message of its own."""
    found = fields.objects("messages")
    if not found:
        raise fields.wrong("messages", "a list of at least one message")
    conversation: list[dict[str, Any]] = []
    for message in found:
        role = message.choice("role", ("user", "assistant", "system"), "")
        if not role:
            raise message.wrong("role", "user or assistant")
        content = message.any("content")
        if isinstance(content, str):
            conversation.append({"role": role, "content": content})
        elif role == "assistant":
            conversation.append(_assistant(message.objects("content")))
        else:
            conversation += _user(role, message.objects("content"))
        if content is None:
            raise message.wrong("content", "a string or a list of blocks")
        message.done()
    return conversation


def _user(role: str, blocks: list[Fields]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in blocks:
        if block.any("type") == "tool_result":
            messages.append(_tool_result(block))
        else:
            texts.append(_text(block))
    if texts or not messages:
        messages.append({"role": role, "content": "\n\n".join(texts)})
    return messages


def _tool_result(block: Fields) -> dict[str, Any]:
    content = block.any("content")
    if content is None or isinstance(content, str):
        text = content or ""
    else:
        text = "\n\n".join(_text(part) for part in block.objects("content"))
    block.without_effect("cache_control")
    failed = block.flag("is_error")
    message = {"role": "tool", "tool_call_id": block.required_text("tool_use_id")}
    block.done()
    return {**message, "content": f"Error: {text}" if failed else text}


def _assistant(blocks: list[Fields]) -> dict[str, Any]:
    texts, reasoning, calls = [], [], []
    for block in blocks:
        kind = block.any("type")
        if kind == "thinking":
            reasoning.append(block.required_text("thinking"))
            block.without_effect("signature")
            block.done()
        elif kind == "redacted_thinking":
            continue  # Nobody but its maker can read it.
        elif kind == "tool_use":
            arguments = block.mapping("input") or {}
            calls.append(earlier_call(block.required_text("id"), block.required_text("name"), arguments))
            block.without_effect("cache_control", "caller")
            block.done()
        else:
            texts.append(_text(block))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message
