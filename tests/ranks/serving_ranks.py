"""Rank 0's worker of the server answers four clients at a time, some of whom leave; the answers are compared.

Argument: a target's folder. Prints a line of JSON: how many answers there were, and which were wrong.
"""

import asyncio
import json
import random
import sys
from pathlib import Path

from many_answers import divided_pair
from serving import collect, job, random_prompt, tokens_of
from tiny import plain_tokens, tiny_drafter

from dflash_mlx.ranks.group import leave_group
from dflash_mlx.server.worker import Worker
from dflash_mlx.targets.loading import load_target

LENGTH, CLIENTS = 10, 4


async def client(worker, truths, rng, wrong):
    for number in range(3):
        prompt, truth = truths[rng.randrange(len(truths))]
        ticket = worker.submit(job(prompt, LENGTH))
        if number == 1:
            await asyncio.sleep(rng.random() / 4)
            ticket.cancel()
            continue
        found = tokens_of(await collect(ticket))
        if found != truth:
            wrong.append((found, truth))


async def serve(worker, truths, wrong):
    await asyncio.gather(*(client(worker, truths, random.Random(i), wrong) for i in range(CLIENTS)))


pair = divided_pair(sys.argv[1], tiny_drafter())
rng, whole = random.Random(5), load_target(Path(sys.argv[1]), dtype="float32")[0]
prompts = [random_prompt(rng) for _ in range(6)]


def until_the_end(tokens):
    return tokens[: tokens.index(0) + 1] if 0 in tokens else tokens


truths = [(prompt, until_the_end(plain_tokens(whole, prompt, LENGTH))) for prompt in prompts]
worker, wrong = Worker(pair, max_active=CLIENTS), list[object]()
worker.start()
asyncio.run(serve(worker, truths, wrong))
worker.close(10)
print(json.dumps({"answers": 2 * CLIENTS, "wrong": wrong}))
leave_group(0)
