"""A connection between ranks: its messages, and how the end of the other side is noticed."""

import os
import queue
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_mlx.ranks import channel
from dflash_mlx.ranks.channel import Channel


class End:
    """One side of a connection, and what it was told."""

    def __init__(self, connection):
        self.lost, self.urgent = queue.Queue(), queue.Queue()
        self.channel = Channel(connection, on_lost=self.lost.put, urgent="end", on_urgent=self.urgent.put)


@pytest.fixture
def pair():
    both = _connected()
    yield both
    for one in both:
        one.close()


def _connected():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


def test_messages_come_in_order_and_urgent_ones_at_once(pair):
    here, there = map(End, pair)
    for number in range(3):
        here.channel.send({"call": number})
    here.channel.send({"end": None})
    assert there.urgent.get(timeout=5) == {"end": None}
    assert [there.channel.receive()["call"] for _ in range(3)] == [0, 1, 2]


def test_an_end_is_noticed_at_once(pair):
    here = End(pair[0])
    pair[1].close()
    assert here.lost.get(timeout=5) == "it ended"


def test_silence_counts_as_an_end_and_signs_of_life_do_not(pair, monkeypatch):
    monkeypatch.setattr(channel, "SILENCE", 0.5)
    monkeypatch.setattr(channel, "BEAT", 0.05)
    here = End(pair[0])
    assert "nothing was heard" in here.lost.get(timeout=5)
    both = [End(connection) for connection in _connected()]
    time.sleep(1.0)
    assert all(end.lost.empty() for end in both)


STANDS_STILL = """
import os, signal, subprocess, sys, time
from dflash_mlx.ranks import channel
channel.BEAT, channel.SILENCE = 0.05, 0.5
from test_channel import End, _connected
ends = [End(connection) for connection in _connected()]
wake = f"import os, signal, time; time.sleep(1.5); os.kill({os.getpid()}, signal.SIGCONT)"
with subprocess.Popen([sys.executable, "-c", wake]):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1.0)
sys.exit(not all(end.lost.empty() for end in ends))
"""


def test_standing_still_together_is_no_silence():
    """As on a machine that sleeps, or has too much else to do."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    assert subprocess.run([sys.executable, "-c", STANDS_STILL], env=environment).returncode == 0


def test_after_close_an_end_is_no_loss(pair):
    here, there = map(End, pair)
    here.channel.close()
    there.channel.close()
    pair[1].shutdown(socket.SHUT_RDWR)
    time.sleep(0.2)
    assert here.lost.empty()
    assert there.lost.empty()
