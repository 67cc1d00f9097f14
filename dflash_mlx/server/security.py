"""Who may ask: the key, the host a request names, and the page it comes from."""

import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_mlx.server.failures import Failure

PAGE_FOLDER = "/page/"
# Headers of an answer that a web page may read.
_EXPOSED = "x-request-id, x-dflash-ignored, retry-after"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """keys: API keys, none for an open server. hosts: names beyond IP addresses and localhost by which it may be
    called. origins: web pages that may call it ("*": any), none by default.
    """

    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()

    def owner(self, presented: str | None) -> str | None:
        """Whose request it is: a name made from the key, or None for a wrong one. Takes the same time for any key."""
        if not self.keys:
            return ""
        given = _digest(presented or "")
        found = None
        for key in self.keys:
            if hmac.compare_digest(given, _digest(key)):
                found = given.hex()
        return found if presented else None

    def allows_host(self, host: str) -> bool:
        """Whether the Host header may stand. A name that an attacker's DNS made up for this machine may not."""
        name = host_name(host)
        return name is not None and (
            _is_address(name) or name == "localhost" or name.endswith(".localhost") or name in self.hosts
        )

    def allows_origin(self, origin: str, host: str) -> bool:
        """Whether a page of that origin may call: the listed ones, and what this server itself would serve."""
        if "*" in self.origins or origin in self.origins:
            return True
        return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def host_name(host: str) -> str | None:
    """The name in a Host header, without the port, in lower case; None when it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018  raises for a bad port
    except ValueError:
        return None
    if parts.username is not None or parts.path or parts.query or parts.fragment:
        return None
    return parts.hostname.rstrip(".") if parts.hostname else None


def own_names(host: str) -> tuple[str, ...]:
    """The names by which a server that listens on `host` is called; beyond loopback, the machine's own as well."""
    names = {host.lower()}
    if not is_loopback(host):
        machine = socket.gethostname().lower()
        names |= {machine, f"{machine.partition('.')[0]}.local"}
    return tuple(sorted(names))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def presented_key(headers: Headers) -> str | None:
    """The key in `Authorization: Bearer KEY` or, as Anthropic's clients send it, in `x-api-key`."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


def wants_page(headers: Headers) -> bool:
    """Whether a request for / comes from a browser that opens the page."""
    return "text/html" in headers.get("accept", "")


def is_open(path: str, headers: Headers) -> bool:
    """What needs no key: whether the server works, and the page with its files, which hold no secret."""
    return path == "/health" or path.startswith(PAGE_FOLDER) or (path == "/" and wants_page(headers))


class Guard:
    """Middleware: refuses what the policy does not allow before any route sees it, and answers CORS preflights."""

    def __init__(self, app: ASGIApp, policy: Policy) -> None:
        self.app, self.policy = app, policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.policy.allows_host(host) and not _is_old_and_local(scope, headers):
            name = (host_name(host) or "NAME")[:80]
            text = f"this server is not called {name!r}; start it with --allowed-host {name}."
            await refuse(403, text, scope)(scope, receive, send)
            return
        if origin is not None and not self.policy.allows_origin(origin, host):
            text = f"web pages from {origin[:80]!r} may not use this server; start it with --cors-origin {origin[:80]}."
            await refuse(403, text, scope)(scope, receive, send)
            return
        cors = _cors_headers(origin) if origin is not None else {}
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers, cors)(scope, receive, send)
            return
        scope["dflash.owner"] = ""
        if not is_open(scope["path"], headers):
            owner = self.policy.owner(presented_key(headers))
            if owner is None:
                text = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
                await refuse(401, text, scope)(scope, receive, _with_headers(send, cors))
                return
            scope["dflash.owner"] = owner
        await self.app(scope, receive, _with_headers(send, cors))


def _is_old_and_local(scope: Scope, headers: Headers) -> bool:
    """Whether a request has no Host because HTTP/1.0 needs none, and comes from this machine; no browser's does."""
    client = (scope.get("client") or ("",))[0]
    bare = scope["http_version"] == "1.0" and "host" not in headers and "origin" not in headers
    return bare and _is_address(client) and ipaddress.ip_address(client).is_loopback


def refuse(status: int, message: str, scope: Scope) -> JSONResponse:
    """An error in the shape that the route's protocol has."""
    found = Failure(status=status, message=message, code="invalid_api_key" if status == 401 else None)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse(error_body(found, scope["path"]), status_code=status, headers=headers)


def error_body(found: Failure, path: str) -> dict[str, Any]:
    """A failure in the shape of the protocol that `path` belongs to."""
    if path.startswith("/api/"):
        return found.ollama()
    return found.anthropic() if path.startswith("/v1/messages") else found.openai()


def _cors_headers(origin: str) -> dict[str, str]:
    return {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED, "Vary": "Origin"}


def _preflight(headers: Headers, cors: dict[str, str]) -> Response:
    wanted = headers.get("access-control-request-headers", "authorization, content-type")
    allowed = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Allow-Headers": wanted}
    if "access-control-request-private-network" in headers:
        allowed["Access-Control-Allow-Private-Network"] = "true"  # browsers ask this for pages from the internet
    return Response(status_code=204, headers={**cors, **allowed, "Access-Control-Max-Age": "600"})


def _with_headers(send: Send, extra: dict[str, str]) -> Send:
    if not extra:
        return send

    async def sender(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(extra)
        await send(message)

    return sender


def normalized(names: Iterable[str]) -> tuple[str, ...]:
    """Host names as they are compared: lower case, without a port."""
    return tuple(name for name in (host_name(n) for n in names) if name)
