"""Prompts that are echoed with log-probabilities, and gaps that are filled: /v1/completions by a tiny model."""

import mlx.core as mx
import openai
import pytest
from fakes import running
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from tiny_pair import make_templated_pair
from transformers import AddedToken

from dflash_mlx.scoring import SCORED_AT_ONCE
from dflash_mlx.server.fill_in_the_middle import fill_in_the_middle
from dflash_mlx.server.worker import Worker

TEXT = "return true and null }" * 12


@pytest.fixture(scope="module")
def truth():
    """mlx-lm's model in one pass over the prompt: log-softmax at each place."""
    pair = make_templated_pair(BPEStreamingDetokenizer)
    tokens = pair.encode_prompt(TEXT)
    assert len(tokens) > SCORED_AT_ONCE + 3
    logits = pair.target.model(mx.array([tokens]))[0].astype(mx.float32)
    return tokens, logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def server(truth):
    pair = make_templated_pair(BPEStreamingDetokenizer)
    with running(Worker(pair, width=3), pair=pair) as found:
        yield found


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scores_are_those_of_mlx_lm(server, truth, as_tokens, max_tokens):
    tokens, expected = truth
    prompt = tokens if as_tokens else TEXT
    answer = server.openai().completions.create(
        model="fake", prompt=prompt, echo=True, max_tokens=max_tokens, logprobs=3
    )
    [choice] = answer.choices
    found = choice.logprobs
    assert len(found.tokens) == len(tokens) + max_tokens
    assert choice.text == "".join(found.tokens)
    assert choice.text.startswith(TEXT)
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    for place, token in enumerate(tokens[1:]):
        row = expected[place]
        assert found.token_logprobs[place + 1] == pytest.approx(row[token].item(), abs=1e-4)
        # The bytes of characters share one text, so that some of the three best stand for each other.
        assert max(found.top_logprobs[place + 1].values()) == pytest.approx(mx.max(row).item(), abs=1e-4)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), max_tokens)
    assert choice.finish_reason == "length"


def check_scores(found, tokens, rows, count):
    """vLLM's `prompt_logprobs` of a prompt, against the target's log-probabilities after each of its tokens."""
    assert found[0] is None
    assert len(found) == len(tokens)
    for here, token, row in zip(found[1:], tokens[1:], rows, strict=False):
        own = here[str(token)]
        assert own["logprob"] == pytest.approx(row[token].item(), abs=1e-4)
        # Products of other shapes round differently, so that neighbours this close may change places.
        assert (row > row[token] + 1e-4).sum().item() < own["rank"] <= (row > row[token] - 1e-4).sum().item()
        best = sorted((entry["rank"], entry["logprob"]) for entry in here.values())[:count]
        assert [rank for rank, _ in best] == [*range(1, count + 1)]
        expected = mx.sort(row)[::-1][:count].tolist()
        assert [logprob for _, logprob in best] == pytest.approx(expected, abs=1e-4)
        assert count <= len(here) <= count + 1


def test_prompts_are_scored_as_by_vllm(server, truth):
    tokens, rows = truth
    client, ask = server.openai(), {"model": "fake", "max_tokens": 2}
    more = {"prompt": tokens, "echo": True, "logprobs": 1, "extra_body": {"prompt_logprobs": 3}}
    choice = client.completions.create(**ask, **more).choices[0]
    check_scores(choice.prompt_logprobs, tokens, rows, 3)
    assert {len(top) for top in choice.logprobs.top_logprobs[1:]} == {1}
    decoded = [
        here[str(token)]["decoded_token"] for here, token in zip(choice.prompt_logprobs[1:], tokens[1:], strict=True)
    ]
    assert decoded == choice.logprobs.tokens[1 : len(tokens)]

    ask["messages"] = [{"role": "user", "content": "a b"}]
    answer = client.chat.completions.create(**ask, n=2, extra_body={"prompt_logprobs": 0})
    read = server.service.pair.encode_chat(ask["messages"])
    logits = server.service.pair.target.model(mx.array([read]))[0].astype(mx.float32)
    check_scores(answer.prompt_logprobs, read, logits - mx.logsumexp(logits, axis=-1, keepdims=True), 0)
    with pytest.raises(openai.BadRequestError, match="without stream"):
        client.chat.completions.create(**ask, stream=True, extra_body={"prompt_logprobs": 0})


def test_streams_and_several_prompts(server):
    ask = {"model": "fake", "prompt": ["a b", "null"], "n": 2, "echo": True, "max_tokens": 3, "logprobs": 0}
    whole = server.openai().completions.create(**ask)
    assert [choice.text[:3] for choice in whole.choices] == ["a b", "a b", "nul", "nul"]
    texts, tokens = [""] * 4, [[], [], [], []]
    for chunk in server.openai().completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]


def test_an_echo_without_scores(server):
    client = server.openai()
    bare = client.completions.create(model="fake", prompt="a b", max_tokens=4).choices[0]
    echoed = client.completions.create(model="fake", prompt="a b", max_tokens=4, echo=True).choices[0]
    assert (echoed.text, echoed.logprobs) == (f"a b{bare.text}", None)
    nothing = client.completions.create(model="fake", prompt="a b", max_tokens=0)
    assert (nothing.choices[0].text, nothing.usage.completion_tokens) == ("", 0)


def test_a_gap_needs_tokens_for_it(server):
    with pytest.raises(openai.BadRequestError, match="no tokens for a gap"):
        server.openai().completions.create(model="fake", prompt="a", suffix="b")
    with pytest.raises(openai.BadRequestError, match="needs prompts that are texts"):
        server.openai().completions.create(model="fake", prompt=[1, 2], suffix="b")


def test_a_gap_in_a_text():
    tokenizer = make_templated_pair().tokenizer
    names = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
    tokenizer._tokenizer.add_tokens([AddedToken(name, special=False) for name in names])
    prompt, ends = fill_in_the_middle(tokenizer, "a b", " null")
    assert tokenizer.decode(prompt) == "<|fim_prefix|>a b<|fim_suffix|> null<|fim_middle|>"
    assert tokenizer.decode(list(ends)) == "<|file_sep|>"
