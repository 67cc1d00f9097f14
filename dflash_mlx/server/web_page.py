"""The page at `/`: a chat in the browser. Its files hold no secret; whatever it asks the server for takes the key."""

import hashlib
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from dflash_mlx.server.failures import RequestError
from dflash_mlx.server.security import wants_page
from dflash_mlx.server.service import Service

FOLDER = Path(__file__).parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

# Nothing but this server's own files and routes: no other address, no inline script or style, no frame around it.
CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a browser asks each time whether the file has changed
}


async def root(service: Service, request: Request) -> Response:
    """The page for browsers. For others, that there is a server: some clients ask for this first, with HEAD."""
    if wants_page(request.headers):
        response = _file("index.html", request)
    else:
        response = PlainTextResponse("dflash-mlx is running\n")
    response.headers["Vary"] = "Accept"
    return response


async def page_file(service: Service, request: Request) -> Response:
    """A file that the page consists of. Only those that came with this package have a name here."""
    return _file(request.path_params["name"], request)


def _file(name: str, request: Request) -> Response:
    found = files().get(name)
    if found is None:
        raise RequestError(f"the page has no file {name[:80]!r}.", status=404)
    body, tag = found
    headers = {**HEADERS, "ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=KINDS[Path(name).suffix], headers=headers)


@cache
def files() -> dict[str, tuple[bytes, str]]:
    """The page's files by name, each with its entity tag."""
    bodies = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in KINDS}
    return {name: (body, f'"{hashlib.sha256(body).hexdigest()[:20]}"') for name, body in bodies.items()}
