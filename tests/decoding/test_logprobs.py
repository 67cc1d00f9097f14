"""Log-probabilities are mlx-lm's own, with and without drafts, one for each token of the answer."""

import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from json_tokens import json_pair
from mlx_lm.generate import generate_step
from test_generation import letter, make_pair, perfect_pair
from tiny import VOCAB, mostly_slow

from dflash_mlx.decoding.constraint import json_constraint, mask_rows
from dflash_mlx.decoding.logprobs import pack_logprobs, unpack_logprobs
from dflash_mlx.errors import UsageError
from dflash_mlx.generation import generate, stream_generate
from dflash_mlx.sampling import SamplingParams


def reference(pair, prompt, tokens, params):
    """mlx-lm's log-probabilities along these tokens: (steps, V)."""
    forced, history = iter(tokens), list(prompt)

    def choose(logprobs):
        history.append(next(forced, 0))
        return mx.array(history[-1:])

    # Given the history here, because mlx-lm 0.31 leaves most of the prompt out of it.
    processors = [
        lambda _, logits, processor=processor: processor(mx.array(history), logits)
        for processor in params.logits_processors()
    ]
    steps = generate_step(
        mx.array(prompt),
        pair.target.model,
        max_tokens=len(tokens),
        sampler=choose,
        logits_processors=processors,
    )
    return [np.array(logprobs) for _, logprobs in steps]


def check(answer, rows, count):
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    for entry, row in zip(answer.logprobs, rows, strict=True):
        assert abs(entry.logprob - row[entry.token_id]) < 1e-3
        best = np.sort(row)[::-1][:count]
        assert np.allclose([score for _, score in entry.top], best, atol=1e-3)
        assert all(abs(row[token] - score) < 1e-3 for token, score in entry.top)
        assert len({token for token, _ in entry.top}) == count


PARAMS = {
    "greedy": SamplingParams(),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    "bias": SamplingParams(logit_bias={3: 4.0, 8: -50.0}),
    "seeded": SamplingParams(temperature=0.8, seed=5, top_p=0.9),
    "sampled": SamplingParams(temperature=1.2),
}


@pytest.mark.parametrize("name", mostly_slow(list(PARAMS), "greedy", "sampled"))
def test_logprobs_are_mlx_lms(name):
    params = PARAMS[name]
    rng = random.Random(3)
    for count in (0, 6):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 12))]
        asked = replace(params, max_tokens=15, top_logprobs=count)
        pair = perfect_pair(prompt) if params == SamplingParams() else make_pair()
        for options in ({"width": 1}, {"width": 6}, {"width": 0}, {"draft": False}):
            answer = generate(pair, prompt, asked, **options)
            check(answer, reference(pair, prompt, answer.token_ids, params), count)
        assert (
            params.temperature or answer.token_ids == generate(pair, prompt, replace(params, max_tokens=15)).token_ids
        )


def test_drafting_does_not_change_them():
    """Random parameters: drafted and plain agree in tokens, text, finish reason and log-probabilities."""
    rng = random.Random(8)
    for _ in range(20):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 25))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 25),
            temperature=rng.choice([0.0, 0.0, 0.7]),
            seed=rng.randrange(100),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 5]),
            min_p=rng.choice([0.0, 0.05]),
            stop=rng.choice([(), (letter(rng.randrange(VOCAB)),), (letter(4) + letter(5), letter(9))]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.4]),
            frequency_penalty=rng.choice([0.0, 0.3]),
            logit_bias=rng.choice([{}, {rng.randrange(VOCAB): 3.0}]),
            top_logprobs=rng.choice([None, 0, 4]),
        )
        pair = make_pair() if rng.random() < 0.5 else perfect_pair(prompt)
        drafted = generate(pair, prompt, params, width=rng.randint(1, 7))
        plain = generate(pair, prompt, params, draft=False)
        for field in ("text", "token_ids", "finish_reason", "prompt_tokens", "generation_tokens"):
            assert getattr(drafted, field) == getattr(plain, field), field
        assert len(drafted.logprobs) == (0 if params.top_logprobs is None else drafted.generation_tokens)
        for a, b in zip(drafted.logprobs, plain.logprobs, strict=True):
            assert a.token_id == b.token_id
            assert abs(a.logprob - b.logprob) < 1e-3
            assert np.allclose([score for _, score in a.top], [score for _, score in b.top], atol=1e-3)


def test_each_round_brings_those_of_its_own_tokens():
    """Also the round that a stop string cuts short."""
    prompt = [3, 5]
    whole = generate(perfect_pair(prompt), prompt, SamplingParams(max_tokens=20))
    params = SamplingParams(max_tokens=20, top_logprobs=2, stop=(whole.text[9:11],))
    for response in stream_generate(perfect_pair(prompt), prompt, params, width=7):
        assert [entry.token_id for entry in response.logprobs] == response.token_ids


def test_what_a_constraint_forbids_is_no_alternative():
    pair = json_pair()
    constraint = json_constraint(pair, {"enum": ["ab", 12]})
    params = SamplingParams(max_tokens=10, top_logprobs=5)
    answer = generate(pair, [65], params, width=4, constraint=constraint)
    guide = constraint.start()
    for i, entry in enumerate(answer.logprobs):
        logits = pair.target.forward(mx.array([[65, *answer.token_ids[:i]]]), pair.target.make_cache())[0, -1:]
        row = np.array(mask_rows(logits, guide.allowed([])[1]))[0]
        row = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert abs(entry.logprob - row[entry.token_id]) < 1e-3
        assert {token for token, _ in entry.top} <= set(np.flatnonzero(np.isfinite(row)).tolist())
        guide.advance([entry.token_id])


def test_packing_keeps_every_bit():
    logits = mx.random.normal((3, 40), key=mx.random.key(2)) * 30
    tokens = mx.array([7, 0, 39])
    exact = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    for count in (0, 3, 40, 60):
        packed = pack_logprobs(logits, tokens, count)
        entries = unpack_logprobs(packed)
        assert [entry.token_id for entry in entries] == [7, 0, 39]
        assert [entry.logprob for entry in entries] == [float(exact[i, t]) for i, t in enumerate([7, 0, 39])]
        for entry, row in zip(entries, exact, strict=True):
            assert [score for _, score in entry.top] == sorted(row.tolist(), reverse=True)[:count]


def test_too_many_alternatives_are_refused():
    with pytest.raises(UsageError, match="top_logprobs"):
        SamplingParams(top_logprobs=21)
