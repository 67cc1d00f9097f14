"""Asking a worker, for tests."""

import asyncio
import time

from tiny import VOCAB

from dflash_mlx.sampling import SamplingParams
from dflash_mlx.server.worker import Job


def wait_until(condition, seconds=60.0):
    deadline = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < deadline, "waited in vain"
        time.sleep(0.005)


def job(prompt, max_tokens=10, **options):
    return Job(prompt=prompt, params=SamplingParams(max_tokens=max_tokens), **options)


def random_tokens(rng, count):
    return [rng.randrange(1, VOCAB) for _ in range(count)]


def random_prompt(rng, longest=30):
    return random_tokens(rng, rng.randint(1, longest))


async def collect(ticket):
    return [response async for response in ticket]


def tokens_of(responses):
    return [token for response in responses for token in response.token_ids]


def answer(worker, wanted):
    return asyncio.run(collect(worker.submit(wanted)))
