"""A connection between two ranks: messages in order, and the certainty that the other one is still there.

A collective operation of MLX waits for every rank, and no other thread can interrupt it. So whether the others are
alive is found out beside it: a rank that dies closes its connections, which is noticed at once, and a machine that is
cut off or stands still stops beating, which is noticed after `SILENCE` seconds.
"""

import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

# Seconds between two signs of life, and without any before the other rank counts as lost.
BEAT, SILENCE = 1.0, 8.0


class Channel:
    """Messages (JSON objects, one a line) to and from one other rank. An empty line is a sign of life.

    on_lost(reason) is called from another thread, once, when the other rank is gone. urgent: messages with this key go
    to on_urgent as soon as they come, from that thread, too; all others wait for `receive`.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        on_lost: Callable[[str], None],
        urgent: str,
        on_urgent: Callable[[dict[str, Any]], None],
    ) -> None:
        self._connection, self._on_lost, self._urgent, self._on_urgent = connection, on_lost, urgent, on_urgent
        self._received: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._sending, self._open = threading.Lock(), True
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENCE)
        self._incoming = connection.dup()  # with a time limit of its own
        self._incoming.settimeout(BEAT)
        for work in (self._read, self._beat):
            threading.Thread(target=work, name="dflash-ranks", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. That the other rank is gone is said by `on_lost` alone."""
        self._write(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """The next message, once there is one."""
        return self._received.get()

    def close(self) -> None:
        """Say no more; that the other rank then goes is no loss."""
        self._open = False

    def _write(self, line: bytes) -> None:
        try:
            with self._sending:
                self._connection.sendall(line)
        except OSError as error:
            self._lose(str(error))

    def _beat(self) -> None:
        while self._open:
            time.sleep(BEAT)
            self._write(b"\n")

    def _read(self) -> None:
        silent, rest = 0.0, b""
        try:
            while silent < SILENCE:
                try:
                    data = self._incoming.recv(1 << 16)
                except TimeoutError:
                    # One wait, however much time has passed: where this process stood still, the other may have, too.
                    silent += BEAT
                    continue
                if not data:
                    return self._lose("it ended")
                silent = 0.0
                *lines, rest = (rest + data).split(b"\n")
                for line in filter(None, lines):
                    self._take(json.loads(line))
            self._lose(f"nothing was heard of it for {SILENCE:.0f} seconds")
        except ConnectionError:
            self._lose("it ended")
        except (OSError, ValueError) as error:
            self._lose(str(error))

    def _take(self, message: dict[str, Any]) -> None:
        if self._urgent in message:
            self._on_urgent(message)
        else:
            self._received.put(message)

    def _lose(self, reason: str) -> None:
        was_open, self._open = self._open, False
        if was_open:
            self._on_lost(reason)
