"""Server-sent events, and noticing that a client has gone."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dflash_mlx.server.failures import RequestError

KEEP_ALIVE_SECONDS = 15.0

T = TypeVar("T")


class ClientGoneError(RequestError):
    """Nobody waits for the answer any more."""

    def __init__(self) -> None:
        super().__init__("the client closed the connection.", status=499)


def event(data: Any, name: str | None = None) -> bytes:
    """A server-sent event; `data` becomes JSON unless it is a string."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()


async def client_gone(receive: Receive) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes. Raises ClientGoneError."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(client_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        await _end(task, gone)


class EventStream(Response):
    """A response whose events come from an async generator, which is closed when the client goes.

    `on_end` is called in any case, also when not even the first event was asked for.
    `keep_alive` is sent while nothing comes for a while, so that no proxy or client gives up during a long prompt.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        on_end: Callable[[], None],
        keep_alive: bytes = b": waiting\n\n",
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_end, self._keep_alive = events, on_end, keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(client_gone(receive))
        following: asyncio.Future[bytes] | None = None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while True:
                following = following or asyncio.ensure_future(anext(self._events))
                waited: set[asyncio.Future[Any]] = {gone, following}
                await asyncio.wait(waited, timeout=KEEP_ALIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                body = self._keep_alive
                if following.done():
                    if isinstance(following.exception(), StopAsyncIteration):
                        break
                    body, following = following.result(), None
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await _end(gone, *([following] if following else []))
            await self._events.aclose()
            self._on_end()


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel what still runs and wait until it has stopped."""
    for task in tasks:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
