"""Running the app with uvicorn: the socket, time limits on connections, a graceful end."""

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflash_mlx.errors import DFlashError, UsageError

HEADER_BYTES = 64 * 1024
HEADER_SECONDS = 15.0
IDLE_SECONDS = 30
END_SECONDS = 5


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises DFlashError when the address cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"--host {host} is no address of this machine ({error}); try 127.0.0.1.") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise DFlashError(f"cannot listen on {host} port {port}: {reason}; choose another with --port.") from None
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(
    app: ASGIApp, *, on_ready: Callable[[], None] | None = None, on_end: Callable[[], None] | None = None
) -> uvicorn.Server:
    """A server to `run(sockets=[listener])`, until Ctrl-C or SIGTERM.

    on_end is called then, in a thread of its own, while open connections are still served: it should see that answers
    come to an end.
    """
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=2 * END_SECONDS,
    )
    return _Server(config, on_ready, on_end)


class _Server(uvicorn.Server):
    """uvicorn's server, for which a signal is a wish to end and not an accident."""

    def __init__(
        self, config: uvicorn.Config, on_ready: Callable[[], None] | None, on_end: Callable[[], None] | None
    ) -> None:
        super().__init__(config)
        self._on_ready, self._on_end = on_ready, on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_end is None:
            await super().shutdown(sockets=sockets)
        else:
            await asyncio.gather(asyncio.to_thread(self._on_end), super().shutdown(sockets=sockets))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override, unused-ignore]
        if threading.current_thread() is not threading.main_thread():
            yield  # where no signal can arrive
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Protocol(H11Protocol):
    """uvicorn's HTTP, with a time limit on the arrival of a request's headers."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(HEADER_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        waiting_before = self._waits_for_headers()
        super().data_received(data)
        if not self._waits_for_headers():
            self._stop_timer()
        elif not waiting_before or self._header_timer is None:
            self._stop_timer()
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _waits_for_headers(self) -> bool:
        return str(self.conn.their_state) == "IDLE"

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
