"""MLX's ring of connections, with fewer cores than it wants.

A rank that waits for the others asks its sockets again and again (MLX's `SocketThread` in distributed/ring/ring.cpp),
which keeps a core busy. Where a GPU computes, no one else needs that core. Where a CPU does, and several ranks are on
one machine, the rank that the others wait for does not get it: with three processes on two busy cores, a sum of 37
kilobytes took 127 ms, and takes 0.5 ms when the sockets wait in the kernel.
"""

import os
import socket
import stat
import struct

import mlx.core as mx

from dflash_mlx.runtime import backend

# Microseconds after which a socket stops to wait, since the same thread of MLX's may have something to send, too.
_TURN = 1000


def connect_ranks() -> mx.distributed.Group:
    """All processes that MLX's launcher has started; waits until they are connected. Raises RuntimeError, ValueError.

    On a CPU, the ring's sockets wait for their data.
    """
    before = _polled()
    group = mx.distributed.init()
    if "MLX_HOSTFILE" in os.environ and backend().kind == "cpu":
        for number in _polled() - before:
            let_wait(number)
    return group


def let_wait(number: int) -> None:
    """Let reading from a socket, and writing to it, wait for a moment instead of failing at once."""
    with socket.socket(fileno=os.dup(number)) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, _TURN))
    os.set_blocking(number, True)


def _polled() -> set[int]:
    """The sockets of this process, by number, that are asked again and again: they never wait."""
    found = set()
    for number in map(int, os.listdir("/dev/fd")):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode) and not os.get_blocking(number):
                found.add(number)
        except OSError:  # closed by now, as the one that listed them
            continue
    return found
