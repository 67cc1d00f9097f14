"""What HTTP adds to the time of an answer."""

import statistics
import time

import httpx
import pytest
from fakes import running

from dflash_mlx.generation import generate
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.server.worker import Worker

PAIRS = 15


@pytest.mark.model
@pytest.mark.long
def test_the_server_adds_less_than_a_twentieth(demo_pair, capsys):
    """The same request by `generate` and over HTTP, in turns, drafts of a fixed width, no prefix cache; medians.

    They take turns, and each pair is compared by itself, so that other work on the machine hits both alike.
    """
    ask = [{"role": "user", "content": "Tell me about the history of Rome."}]
    body = {"messages": ask, "max_tokens": 48}
    direct: list[float] = []
    served: list[float] = []
    worker = Worker(demo_pair, width=4, cache_bytes=0)
    with running(worker, pair=demo_pair) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        for turn in range(PAIRS + 1):
            started = time.perf_counter()
            expected = generate(demo_pair, ask, SamplingParams(max_tokens=48), width=4)
            middle = time.perf_counter()
            answer = client.post("/v1/chat/completions", json=body).json()
            ended = time.perf_counter()
            assert answer["choices"][0]["message"]["content"] == expected.text
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            if turn:  # the first one warms up
                direct.append(middle - started)
                served.append(ended - middle)
    overhead = statistics.median(b / a for a, b in zip(direct, served, strict=True)) - 1
    with capsys.disabled():
        print(
            f" median {statistics.median(direct):.3f} s, over HTTP {statistics.median(served):.3f} s: {overhead:+.1%}"
        )
    assert overhead < 0.05
