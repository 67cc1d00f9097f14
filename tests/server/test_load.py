"""Many clients of the real worker over tiny models: none is lost, each gets its own answer, memory stays flat."""

import asyncio
import json
import resource
import sys

import httpx
import pytest
from fakes import running
from serving import wait_until
from tiny_pair import letter, make_letter_pair

from dflash_mlx.generation import generate
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.server.worker import Worker

PROMPTS = [f"{word} number {i}" for i, word in enumerate(["apples", "pears", "plums", "nuts", "figs"] * 2)]


@pytest.fixture(scope="module")
def pair():
    return make_letter_pair()


@pytest.fixture(scope="module")
def truth(pair):
    """Plain decoding's answers, made before any worker has the pair."""
    params = SamplingParams(max_tokens=40)
    return {text: generate(pair, pair.encode_prompt(text), params, draft=False) for text in PROMPTS}


@pytest.fixture
def server(pair, truth):
    with running(Worker(pair, max_queue=400, width=3, cache_bytes=20_000_000), pair=pair, names=("tiny",)) as found:
        yield found


async def stream(client: httpx.AsyncClient, prompt: str) -> tuple[str, str]:
    """The text and the finish reason of a streamed completion."""
    text, finish = "", ""
    body = {"prompt": prompt, "max_tokens": 40, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]  # and no keep-alives
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        [choice] = json.loads(line.removeprefix("data: "))["choices"]
        text += choice["text"]
        finish = choice["finish_reason"] or finish
    return text, finish


def client_of(server):
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_many_streams_at_once(server, truth, count):
    async def everyone():
        async with client_of(server) as client:
            return await asyncio.gather(*(stream(client, PROMPTS[i % len(PROMPTS)]) for i in range(count)))

    answers = asyncio.run(everyone())
    for i, (text, finish) in enumerate(answers):
        expected = truth[PROMPTS[i % len(PROMPTS)]]
        assert (text, finish) == (expected.text, expected.finish_reason)
    assert httpx.get(f"{server.url}/health").json()["active"] == 0


def test_a_client_that_leaves_frees_its_slot_within_a_round(server):
    """The worker stops at the next round: far fewer tokens are made than were asked for."""
    before = server.worker.status().totals
    body = {"prompt": "on and on", "max_tokens": 7000, "stream": True, "logit_bias": {"0": -100}}
    with httpx.Client(base_url=server.url) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        next(line for line in answer.iter_lines() if letter(1) <= line)
    wait_until(lambda: not server.worker.status().active)
    after = server.worker.status().totals
    assert after.finished["cancelled"] == before.finished.get("cancelled", 0) + 1
    assert after.generated_tokens - before.generated_tokens < 3500
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200


def test_the_end_of_the_server_is_told_to_open_streams(server):
    body = {"prompt": "on and on", "max_tokens": 7000, "stream": True, "logit_bias": {"0": -100}}
    with httpx.Client(base_url=server.url) as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        server.server.should_exit = True
        *_, last = lines
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"


@pytest.mark.long
def test_memory_is_flat_over_two_thousand_requests(server):
    """Different prompts each time, so that the prefix cache fills and evicts; a tenth of the clients leave early."""

    async def ask(client: httpx.AsyncClient, i: int) -> None:
        body = {"prompt": f"{i} bottles on the wall", "max_tokens": 8, "stream": i % 10 == 0}
        if i % 10:
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            return
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                break

    async def several(start: int, end: int) -> None:
        async with client_of(server) as client:
            for i in range(start, end, 20):
                await asyncio.gather(*(ask(client, j) for j in range(i, i + 20)))

    asyncio.run(several(0, 400))
    middle = peak_megabytes()
    mlx_middle = server.worker.status().memory_active
    asyncio.run(several(400, 2400))
    assert peak_megabytes() - middle < 20
    status = server.worker.status()
    assert status.memory_active < mlx_middle * 1.05 + 1e6
    assert status.cache.bytes <= status.cache.limit_bytes
    assert status.cache.evictions > 100


def peak_megabytes() -> float:
    """The most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
