"""The processes that MLX's launcher has started together, one a machine: rank 0, which does everything, and the others.

MLX connects them for its collective operations. Beside that, each of the others has a `Channel` to rank 0, over which
it learns what to do, and by which each learns of the end of the others: then all of them end.
"""

import atexit
import faulthandler
import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from dflash_mlx.errors import GroupError
from dflash_mlx.ranks import started_together
from dflash_mlx.ranks.channel import Channel
from dflash_mlx.ranks.ring import connect_ranks

# Seconds within which all ranks have to be connected.
_PATIENCE = 60.0
# Seconds that a rank waits after an error of its own: the end of another one may explain it better.
_SECOND_THOUGHTS = 2.0


class Group:
    """This process among the others. channels: to all others (rank 0), or to rank 0.

    ranks: MLX's group, for its collective operations.
    """

    def __init__(self, ranks: mx.distributed.Group) -> None:
        self.ranks, self.rank, self.size = ranks, ranks.rank(), ranks.size()
        self.channels: list[Channel] = []
        self._ending = threading.Lock()

    def connect(self) -> None:
        """Connect all others with rank 0, which chooses a port and a secret for that. Raises OSError."""
        if self.rank == 0:
            with socket.create_server((_address_of_rank_0(), 0)) as listener:
                secret = secrets.token_hex(16)
                self._tell([listener.getsockname()[1], *bytes.fromhex(secret)])
                listener.settimeout(_PATIENCE)
                while len(self.channels) < self.size - 1:
                    self._admit(listener.accept()[0], secret)
            atexit.register(self.end)
            return
        port, *secret_bytes = self._tell([0] * 17)
        connection = socket.create_connection((_address_of_rank_0(), port), timeout=_PATIENCE)
        connection.sendall(json.dumps([bytes(secret_bytes).hex(), self.rank, socket.gethostname()]).encode() + b"\n")
        self.channels = [
            Channel(
                connection,
                on_lost=lambda reason: self._stop(f"rank 0 is gone: {reason}"),
                urgent="end",
                on_urgent=self._end_with_rank_0,
            )
        ]

    def _tell(self, numbers: list[int]) -> list[int]:
        """Rank 0's numbers, on every rank."""
        return np.array(mx.distributed.all_sum(mx.array(numbers, dtype=mx.int32), group=self.ranks)).tolist()

    def _admit(self, connection: socket.socket, secret: str) -> None:
        """Take a connection, if it is from one of the other ranks."""
        connection.settimeout(_PATIENCE)
        # Unbuffered, so that nothing is read beyond this line.
        with connection.makefile("rb", buffering=0) as lines:
            try:
                given, rank, host = json.loads(lines.readline(1000))
            except (OSError, ValueError):
                given = rank = host = None
        if not secrets.compare_digest(str(given).encode(), secret.encode()):
            connection.close()
            return
        name = f"rank {rank} ({host})"
        self.channels.append(
            Channel(
                connection,
                on_lost=lambda reason: self._stop(f"{name} is gone: {reason}"),
                urgent="failed",
                on_urgent=lambda message: self._stop(f"{name} failed: {message['failed']}"),
            )
        )

    def send(self, message: dict[str, Any]) -> None:
        """From rank 0 to all others."""
        for channel in self.channels:
            channel.send(message)

    def fail(self, reason: str) -> NoReturn:
        """End this rank, and with it all others, after an error of its own."""
        time.sleep(_SECOND_THOUGHTS)
        self.send({"failed": reason})
        self._stop(reason)

    def end(self) -> None:
        """Let the other ranks end, since rank 0 does."""
        for channel in self.channels:
            channel.close()
        self.send({"end": None})

    def wait_for_news(self, error: Exception) -> None:
        """Where another rank's end may explain an error of MLX's, wait to hear of it: this process then ends, too."""
        if isinstance(error, RuntimeError):
            time.sleep(_SECOND_THOUGHTS)

    def _end_with_rank_0(self, message: dict[str, Any]) -> None:
        reason = message["end"]
        if reason is None:
            _leave(0)
        self._stop(reason)

    def _stop(self, reason: str) -> NoReturn:
        """End this process at once, wherever its other threads wait, and tell the other ranks why."""
        with self._ending:
            if self.rank == 0:
                for channel in self.channels:
                    channel.close()
                self.send({"end": reason})
            _say_alone(f"error: {reason}; all ranks stop. Start them again.")
            _leave(1)


@cache
def join_group() -> Group | None:
    """The group that this process was started in; None where it was started alone. Raises GroupError."""
    if not started_together():
        return None
    rank = os.environ["MLX_RANK"]
    print(f"rank {rank} waits for the others, at most {_PATIENCE:.0f} seconds.", file=sys.stderr, flush=True)
    with open(os.devnull, "w") as nowhere:
        # MLX holds Python's lock while it connects, so that no thread of Python's could end this process.
        faulthandler.dump_traceback_later(_PATIENCE, exit=True, file=nowhere)
        try:
            group = Group(connect_ranks())
            if group.size > 1:
                group.connect()
        except (OSError, RuntimeError, ValueError) as error:
            raise GroupError(f"cannot connect the machines: {error}. See docs/several-macs.md.") from error
        finally:
            faulthandler.cancel_dump_traceback_later()
    return group if group.size > 1 else None


def leave_group(code: int) -> None:
    """End rank 0 at once with an exit code, and the others; nothing happens where this process is alone.

    MLX sometimes aborts at the regular end of a process whose answers were made in a thread that has just ended: as the
    thread goes, MLX wants Python's lock for what it compiled there, and Python gives it to nobody any more.
    """
    if join_group.cache_info().currsize and (group := join_group()) is not None:
        group.end()
        _leave(code)


def _address_of_rank_0() -> str:
    """The address under which MLX reaches rank 0."""
    try:
        if "MLX_HOSTFILE" in os.environ:
            return str(json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())[0][0]).rpartition(":")[0]
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"the hosts in {os.environ['MLX_HOSTFILE']} cannot be read ({error})") from error
    if "MLX_JACCL_COORDINATOR" in os.environ:
        return os.environ["MLX_JACCL_COORDINATOR"].rpartition(":")[0]
    return os.environ.get("NCCL_HOST_IP", "127.0.0.1")


def _say_alone(line: str) -> None:
    """Write a last line to stderr. After it nothing more is written there.

    MLX reports lost connections there from threads of its own, in pieces, which would otherwise tear the line apart.
    """
    with suppress(OSError, ValueError):
        sys.stderr.flush()
        number = sys.stderr.fileno()
        kept = os.dup(number)
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        # A line of MLX's may have been begun, or one of an answer.
        os.write(kept, f"\n{line}\n".encode())


def _leave(code: int) -> NoReturn:
    """End the process from any thread. The others may be in an operation that never ends."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
