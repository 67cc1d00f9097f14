"""The ASGI app: routes, and the one place where errors become responses."""

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_mlx.server.chat import chat_completions
from dflash_mlx.server.completions import completions
from dflash_mlx.server.failures import Failure, failure
from dflash_mlx.server.health import health_report, metrics_text
from dflash_mlx.server.messages import count_tokens, messages
from dflash_mlx.server.ollama import ollama_chat, ollama_generate, running, show, tags, version
from dflash_mlx.server.responses import responses
from dflash_mlx.server.security import Guard, Policy, error_body
from dflash_mlx.server.service import Service
from dflash_mlx.server.tokens import detokenize, tokenize
from dflash_mlx.server.web_page import page_file, root

Handler = Callable[[Service, Request], Awaitable[Response]]
Log = Callable[[str], None]
# Where clients of OpenAI and Ollama ask for embeddings.
_EMBEDDINGS = ("/v1/embeddings", "/api/embed", "/api/embeddings")


def create_app(service: Service, policy: Policy, *, access_log: Log | None = None) -> Starlette:
    """The app for a service whose worker is not started yet: the app starts it and closes it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        try:
            yield
        finally:
            # It waits for answers in progress, which this event loop has to deliver.
            await asyncio.to_thread(service.worker.close)
            service.close()

    def route(path: str, method: str, handler: Handler) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                response = await handler(service, request)
            except Exception as error:
                service.report(error)
                response = _refusal(failure(error), request)
            finally:
                service.settle(request)
            service.add_ignored(response, request)
            return response

        return Route(path, endpoint, methods=[method])

    return Starlette(
        routes=[
            route("/", "GET", root),
            route("/page/{name:path}", "GET", page_file),
            route("/health", "GET", health),
            route("/metrics", "GET", metrics),
            route("/v1/models", "GET", models),
            route("/v1/models/{name:path}", "GET", model),
            route("/v1/chat/completions", "POST", chat_completions),
            route("/v1/completions", "POST", completions),
            route("/v1/messages", "POST", messages),
            route("/v1/messages/count_tokens", "POST", count_tokens),
            route("/v1/responses", "POST", responses),
            route("/api/chat", "POST", ollama_chat),
            route("/api/generate", "POST", ollama_generate),
            route("/api/tags", "GET", tags),
            route("/api/ps", "GET", running),
            route("/api/show", "POST", show),
            route("/api/version", "GET", version),
            route("/tokenize", "POST", tokenize),
            route("/detokenize", "POST", detokenize),
        ],
        middleware=[Middleware(_Observer, service=service, access_log=access_log), Middleware(Guard, policy=policy)],
        exception_handlers={HTTPException: _no_route},
        lifespan=lifespan,
    )


async def health(service: Service, request: Request) -> Response:
    """Whether the decode loop is alive; 503 when it is not."""
    report = health_report(service)
    return JSONResponse(report, status_code=200 if report["status"] == "ok" else 503)


async def metrics(service: Service, request: Request) -> Response:
    """Prometheus' text format."""
    return PlainTextResponse(metrics_text(service), media_type="text/plain; version=0.0.4")


async def models(service: Service, request: Request) -> Response:
    """The served names, in a shape that OpenAI's and Anthropic's clients both read."""
    data = [_model(service, name) for name in service.names]
    ends = {"first_id": service.names[0], "last_id": service.names[-1], "has_more": False}
    return JSONResponse({"object": "list", "data": data, **ends})


async def model(service: Service, request: Request) -> Response:
    """One of them."""
    return JSONResponse(_model(service, service.check_model(request.path_params["name"])))


def _model(service: Service, name: str) -> dict[str, Any]:
    openai = {"id": name, "object": "model", "created": service.created, "owned_by": "dflash-mlx"}
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.created))
    return {**openai, "type": "model", "display_name": name, "created_at": made}


def _refusal(found: Failure, request: Request) -> Response:
    body = error_body(found, request.scope["path"])
    return JSONResponse(body, status_code=found.status, headers=found.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    embeds = request.scope["path"] in _EMBEDDINGS
    absent = "this server makes no embeddings" if embeds else "there is nothing at this path"
    words = {404: absent, 405: "this path does not take that method"}
    message = f"{words.get(error.status_code, error.detail)}; docs/server.md lists what there is."
    found = Failure(status=error.status_code, message=message, headers=dict(error.headers or {}))
    return _refusal(found, request)


class _Observer:
    """Middleware: counts requests, and writes the access log where one is wanted."""

    def __init__(self, app: ASGIApp, service: Service, access_log: Log | None) -> None:
        self.app, self.service, self.access_log = app, service, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 0
        request_id = _request_id(Headers(scope=scope).get("x-request-id", ""))

        async def sender(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # By OpenAI's name, and by Anthropic's.
                MutableHeaders(scope=message).update({"x-request-id": request_id, "request-id": request_id})
            await send(message)

        try:
            await self.app(scope, receive, sender)
        finally:
            seconds = time.monotonic() - started
            # Unknown paths share a name, so that nobody can fill the memory with names.
            route = scope["path"] if scope["path"] in _PATHS else "other"
            self.service.metrics.count_request(route, status, seconds)
            if self.access_log is not None:
                client = (scope.get("client") or ("?",))[0]
                path = json.dumps(scope["path"][:200])  # quoted, so that a path cannot write lines of its own
                self.access_log(f"{client} {scope['method']} {path} {status} {math.ceil(seconds * 1000)} ms")


def _request_id(wanted: str) -> str:
    """The client's own name for its request, where it can stand in a header, or a new one."""
    usable = 0 < len(wanted) <= 128 and all("!" <= c <= "~" for c in wanted)
    return wanted if usable else f"req_{uuid.uuid4().hex}"


_PATHS = frozenset(
    {
        "/",
        "/health",
        "/metrics",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/api/chat",
        "/api/generate",
        "/api/tags",
        "/api/ps",
        "/api/show",
        "/api/version",
        "/tokenize",
        "/detokenize",
    }
)
