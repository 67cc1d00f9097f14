"""Random requests over all the sampling parameters: a server that drafts answers as one with --no-draft does."""

import random

import pytest
from fakes import running
from tiny_pair import make_templated_pair

from dflash_mlx.policy.trees_or_chains import PairCosts
from dflash_mlx.policy.width import RoundCosts
from dflash_mlx.server.worker import Worker


def random_request(rng: random.Random, vocab_size: int) -> dict:
    """A chat request over the sampling parameters."""
    asks = ["Why is the sky blue?", "Write a haiku.", "def fib(n):", "Count to ten.", "Say 'hello' in French.", "2+2="]
    request = {
        "model": "fake",
        "messages": [{"role": "user", "content": rng.choice(asks)}],
        "max_tokens": rng.randint(1, 24),
        "logprobs": True,
        "top_logprobs": rng.randint(0, 4),
        "n": rng.choice([1, 1, 1, 2]),
    }
    if rng.random() < 0.4:
        request |= {"temperature": rng.uniform(0.2, 1.5), "seed": rng.randrange(2**32)}
        request |= {"top_p": rng.uniform(0.5, 1)} if rng.random() < 0.5 else {}
        request |= {"extra_body": {"top_k": rng.randint(0, 50), "min_p": rng.uniform(0, 0.2)}}
    if rng.random() < 0.4:
        request["stop"] = rng.sample([".", " the", "\n", "e ", "and", ","], rng.randint(1, 3))
    if rng.random() < 0.4:
        request |= {"presence_penalty": rng.uniform(-1, 1), "frequency_penalty": rng.uniform(-1, 1)}
    if rng.random() < 0.3:
        request["logit_bias"] = {str(rng.randrange(vocab_size)): rng.uniform(-20, 5) for _ in range(3)}
    if rng.random() < 0.15:
        request["response_format"] = {"type": "json_object"}
    return request


def outcome(answer) -> list:
    """What must not depend on drafting: texts, tokens, ends and counts; log-probabilities apart."""
    choices = [(c.message.content, [e.token for e in c.logprobs.content], c.finish_reason) for c in answer.choices]
    return [choices, answer.usage.prompt_tokens, answer.usage.completion_tokens]


def logprobs_of(answer) -> list[float]:
    entries = [e for c in answer.choices for e in c.logprobs.content]
    return [x for e in entries for x in (e.logprob, *(t.logprob for t in e.top_logprobs))]


def check(pair, count, *, width=None):
    """Greedy and seeded answers agree; seeded ones are repeatable."""
    rng = random.Random(count)
    requests = [random_request(rng, pair.target.vocab_size) for _ in range(count)]
    answers = []
    for draft in (True, False):
        with running(Worker(pair, draft=draft, width=width), pair=pair) as server:
            client = server.openai()
            answers.append([client.chat.completions.create(**request) for request in requests])
            if draft:
                for request, first in zip(requests, answers[0], strict=True):
                    if "seed" in request:
                        assert outcome(client.chat.completions.create(**request)) == outcome(first), request
    for request, drafted, plain in zip(requests, *answers, strict=True):
        assert {a["mode"] for a in drafted.dflash["answers"]} == {pair.method}
        assert {a["mode"] for a in plain.dflash["answers"]} == {"plain"}
        assert outcome(drafted) == outcome(plain), request
        assert logprobs_of(drafted) == pytest.approx(logprobs_of(plain), abs=1e-3), request


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.long)])
def test_tiny_models(count, trees):
    pair = make_templated_pair()
    chains = RoundCosts({0: 1.0, 1: 1.01, 7: 1.1}, {1: 0.01, 7: 0.01}, steep=False)
    pair._costs = PairCosts(chains, RoundCosts({0: 1.0, 1: 1.01, 31: 1.1}, {1: 0.01, 7: 0.01}, steep=False, places=7))
    check(pair, count, width=None if trees else 5)


@pytest.mark.model
@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.long)])
def test_the_demo_pair(demo_pair, count):
    check(demo_pair, count)
