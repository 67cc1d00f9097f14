"""POST /api/chat and /api/generate, and what goes with them: Ollama's protocol."""

import time
from collections import deque
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dflash_mlx.server.answers import Order
from dflash_mlx.server.chat import ChatRequest, prepare, read_tools
from dflash_mlx.server.fields import Fields
from dflash_mlx.server.formats import Format
from dflash_mlx.server.logprobs import read_top_logprobs
from dflash_mlx.server.ollama_reply import OllamaReply
from dflash_mlx.server.parameters import MAX_TOKENS, sampling, stop_strings, wants_draft
from dflash_mlx.server.prompts import earlier_call, effort_variables
from dflash_mlx.server.service import Service
from dflash_mlx.server.streaming import EventStream, unless_gone

# Clients ask for a version of Ollama's and compare it with the one whose protocol they need; this is the one we follow.
OLLAMA_VERSION = "0.12.11"
NEVER = "9999-12-31T23:59:59Z"


async def ollama_chat(service: Service, request: Request) -> Response:
    """Answer a conversation, streaming unless told otherwise. Raises what the edge translates."""
    fields = await service.read_fields(request)
    if fields.items("messages") == []:
        return _loaded(service, fields, {"message": {"role": "assistant", "content": ""}})
    asked = _read_request(service, fields, _conversation(fields))
    return await _answer(service, request, asked, await prepare(service, asked), text_field=None)


async def ollama_generate(service: Service, request: Request) -> Response:
    """Answer a prompt through the chat template, or continue it (`raw`). Raises what the edge translates."""
    fields = await service.read_fields(request)
    prompt, system = fields.text("prompt") or "", fields.text("system")
    if not prompt:
        return _loaded(service, fields, {"response": ""})
    for name in ("suffix", "template"):
        fields.refuse(name, "this server makes prompts by the model's own chat template.", unless=("",))
    fields.refuse("context", "send the conversation to /api/chat.", unless=([],))
    fields.refuse("images", "this server reads text only.", unless=([],))
    raw = fields.flag("raw")
    messages = [{"role": "system", "content": system}] if system else []
    asked = _read_request(service, fields, [*messages, {"role": "user", "content": prompt}])
    if raw:
        tokens = await service.tokenizing(lambda: service.pair.encode_prompt(prompt))
        constraint = await service.constraint(asked.schema) if asked.wants_json else None
        order = replace(asked.order, prompts=[tokens], constraint=constraint, continues=True)
    else:
        order = await prepare(service, asked)
    return await _answer(service, request, asked, order, text_field="response")


async def tags(service: Service, request: Request) -> Response:
    """The served names."""
    return JSONResponse({"models": [_model(service, name) for name in service.names]})


async def running(service: Service, request: Request) -> Response:
    """The served names again: they are loaded for as long as the server runs."""
    size = service.worker.status().memory_active
    more = {"size": size, "size_vram": size, "expires_at": NEVER, "context_length": service.pair.context_length}
    return JSONResponse({"models": [{**_model(service, name), **more} for name in service.names]})


async def version(service: Service, request: Request) -> Response:
    return JSONResponse({"version": OLLAMA_VERSION})


async def show(service: Service, request: Request) -> Response:
    """What clients want to know of a model before they use it. Raises RequestError."""
    fields = await service.read_fields(request)
    name = _check_model(service, fields.text("model") or fields.required_text("name"))
    fields.without_effect("name", "verbose")
    fields.done()
    tokenizer = service.pair.tokenizer
    able = {"completion": True, "tools": tokenizer.has_tool_calling, "thinking": tokenizer.has_thinking}
    info = {"general.architecture": "mlx", "mlx.context_length": service.pair.context_length}
    more = {"capabilities": [what for what, has in able.items() if has], "model_info": info}
    return JSONResponse({**_model(service, name), "modelfile": "", "parameters": "", "template": "", **more})


def _model(service: Service, name: str) -> dict[str, Any]:
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.created))
    details = {"format": "mlx", "family": "", "families": [], "parameter_size": "", "quantization_level": ""}
    return {"name": name, "model": name, "modified_at": made, "size": 0, "digest": "", "details": details}


def _loaded(service: Service, fields: Fields, nothing: dict[str, Any]) -> Response:
    """What a request without words gets: clients send it to have the model loaded, and here it always is."""
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    head = {"model": _check_model(service, fields.text("model")), "created_at": made}
    return JSONResponse({**head, **nothing, "done": True, "done_reason": "load"})


def _check_model(service: Service, name: str | None) -> str:
    """The served name; Ollama's clients add a tag to it."""
    if name is not None and name not in service.names:
        name = name.removesuffix(":latest")
    return service.check_model(name)


async def _answer(
    service: Service, request: Request, asked: ChatRequest, order: Order, *, text_field: str | None
) -> Response:
    answers = service.submit(order, request)
    reply = OllamaReply(service, answers, model=asked.model, text_field=text_field)
    if asked.stream:
        return EventStream(
            reply.lines(), on_end=answers.close, keep_alive=reply.waiting(), media_type="application/x-ndjson"
        )
    return JSONResponse(await unless_gone(request.receive, reply.whole()))


def _read_request(service: Service, fields: Fields, messages: list[dict[str, Any]]) -> ChatRequest:
    """Check what both routes have. Raises RequestError for what is wrong or cannot be done."""
    options = fields.object("options") or Fields({}, "options", ignored=fields.ignored)
    max_tokens = service.defaults.max_tokens
    if options.any("num_predict") not in (None, -1, -2):  # both stand for no limit of the request's own
        max_tokens = options.whole("num_predict", 1, MAX_TOKENS) or max_tokens
    params = sampling(options, service.defaults, max_tokens=max_tokens, vocab_size=service.vocab_size)
    params = replace(params, stop=stop_strings(options, "stop"), top_logprobs=read_top_logprobs(fields))
    options.done()
    offered = read_tools(fields, service.pair.tokenizer)
    wants_json, schema = _read_format(fields)
    asked = ChatRequest(
        model=_check_model(service, fields.text("model")),
        messages=messages,
        variables=_thinking(fields),
        order=Order(prompts=[], params=params, draft=wants_draft(fields), offer=offered),
        wants_json=wants_json,
        schema=schema,
        stream=fields.flag("stream", True),
        include_usage=True,
    )
    fields.done()
    return asked


def _read_format(fields: Fields) -> Format:
    """`format`: "json", a schema, or nothing."""
    value = fields.any("format")
    if value in (None, "", "json"):
        return value == "json", None
    if not isinstance(value, dict):
        raise fields.wrong("format", "json or a JSON schema")
    return True, value


def _thinking(fields: Fields) -> dict[str, Any]:
    """`think`: true, false, or how much."""
    value = fields.any("think")
    if isinstance(value, bool):
        return {"enable_thinking": value}
    return effort_variables(fields.text("think"))


def _conversation(fields: Fields) -> list[dict[str, Any]]:
    """Ollama's messages as chat templates expect them; its calls have no ids, so results follow in their order."""
    found = fields.objects("messages")
    if not found:
        raise fields.wrong("messages", "a list of at least one message")
    open_calls: deque[str] = deque()
    return [_message(one, number, open_calls) for number, one in enumerate(found)]


def _message(fields: Fields, number: int, open_calls: deque[str]) -> dict[str, Any]:
    role = fields.choice("role", ("system", "user", "assistant", "tool"), "")
    if not role:
        raise fields.wrong("role", "one of system, user, assistant, tool")
    message: dict[str, Any] = {"role": role, "content": fields.text("content") or ""}
    fields.refuse("images", "this server reads text only.", unless=([],))
    if thinking := fields.text("thinking"):
        message["reasoning_content"] = thinking
    calls = []
    for i, call in enumerate(fields.objects("tool_calls")):
        function = call.object("function")
        if function is None:
            raise call.wrong("function", "an object")
        call_id = call.text("id") or f"call_{number}_{i}"
        calls.append(earlier_call(call_id, function.required_text("name"), function.any("arguments")))
        open_calls.append(call_id)
    if calls:
        message["tool_calls"] = calls
    if role == "tool":
        message["tool_call_id"] = open_calls.popleft() if open_calls else f"call_{number}"
        if name := fields.text("tool_name"):
            message["name"] = name
    fields.done()
    return message
