"""The official clients against the demo pair: what a request means does not depend on drafting, nor on HTTP."""

import json

import openai
import pytest
from fakes import running

from dflash_mlx.generation import generate
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.server.worker import Worker

pytestmark = [pytest.mark.model, pytest.mark.slow]

ASK = [{"role": "user", "content": "Name three colours of the rainbow."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def truth(demo_pair):
    """Plain decoding by `generate`, before the worker has the pair."""
    return generate(demo_pair, ASK, SamplingParams(max_tokens=24, top_logprobs=3), draft=False)


@pytest.fixture(scope="module")
def server(demo_pair, truth):
    worker = Worker(demo_pair, max_active=4)  # little to measure
    with running(worker, pair=demo_pair, names=("demo",)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    return server.openai()


def test_chat_is_what_generate_says(client, truth, demo_pair):
    answer = client.chat.completions.create(model="demo", messages=ASK, max_tokens=24, logprobs=True, top_logprobs=3)
    [choice] = answer.choices
    assert choice.message.content == truth.text
    assert choice.finish_reason == truth.finish_reason
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (truth.prompt_tokens, len(truth.token_ids))
    assert "".join(bytes(e.bytes).decode(errors="replace") for e in choice.logprobs.content) == truth.text
    for found, expected in zip(choice.logprobs.content, truth.logprobs, strict=True):
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert [t.logprob for t in found.top_logprobs] == pytest.approx([t[1] for t in expected.top], abs=1e-3)
    assert answer.dflash["answers"][0]["acceptance"]["rounds"] > 0


def test_every_protocol_gives_the_same_text(server, client, truth):
    other = server.anthropic()
    message = other.messages.create(model="demo", max_tokens=24, messages=ASK)
    assert message.content[0].text == truth.text
    assert client.responses.create(model="demo", input=ASK, max_output_tokens=24).output_text == truth.text
    streamed = client.chat.completions.create(model="demo", messages=ASK, max_tokens=24, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == truth.text
    with other.messages.stream(model="demo", max_tokens=24, messages=ASK) as stream:
        assert "".join(stream.text_stream) == truth.text
    counted = other.messages.count_tokens(model="demo", messages=ASK)
    assert counted.input_tokens == truth.prompt_tokens


def test_rounds_add_up_to_the_answer(client, truth):
    """What the page draws is what the answer's own figures say."""
    options = {"model": "demo", "messages": ASK, "max_tokens": 24, "stream": True}
    chunks = list(client.chat.completions.create(**options, extra_body={"dflash": {"rounds": True}}))
    rounds = [c.dflash["round"] for c in chunks if "round" in (c.model_extra.get("dflash") or {})]
    acceptance = chunks[-1].dflash["answers"][0]["acceptance"]
    assert sum(r["tokens"] for r in rounds) == len(truth.token_ids)
    assert sum(r["drafted"] > 0 for r in rounds) == acceptance["rounds"] > 0
    for name in ("drafted", "accepted"):
        assert sum(r[name] for r in rounds) == acceptance[name]


def test_completions_take_texts_and_tokens(server, client):
    tokenizer = server.service.pair.tokenizer
    text = "The capital of France is"
    answer = client.completions.create(model="demo", prompt=[text, tokenizer.encode(text)], max_tokens=6, logprobs=1)
    assert answer.choices[0].text == answer.choices[1].text
    assert "Paris" in answer.choices[0].text
    assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text
    assert answer.choices[0].text.startswith(" "), "prompt and answer are one text"


def test_stop_seed_and_n(client, truth):
    stop = truth.text[8:12]
    cut = client.chat.completions.create(model="demo", messages=ASK, max_tokens=24, stop=[stop]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (truth.text[: truth.text.index(stop)], "stop")
    sampled = {"model": "demo", "messages": ASK, "max_tokens": 8, "temperature": 1.0, "seed": 3}
    first, again = (client.chat.completions.create(**sampled, n=2) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert texts[0] != texts[1]
    second = client.chat.completions.create(**{**sampled, "seed": 4})
    assert second.choices[0].message.content == texts[1]


@pytest.mark.parametrize(("form", "max_tokens"), [("json_object", 24), ("json_schema", 80)])
def test_structured_output(client, form, max_tokens):
    described = {"type": form}
    if form == "json_schema":
        described["json_schema"] = {"name": "town", "schema": SCHEMA, "strict": True}
    ask = [{"role": "user", "content": "Describe Paris as a JSON object."}]
    options = {"model": "demo", "messages": ask, "max_tokens": max_tokens, "response_format": described}
    drafted = client.chat.completions.create(**options)
    plain = client.chat.completions.create(**options, extra_body={"dflash": {"draft": False}})
    assert drafted.choices[0].message.content == plain.choices[0].message.content
    assert drafted.choices[0].finish_reason == plain.choices[0].finish_reason
    assert drafted.dflash["answers"][0]["mode"] == "dflash+ngram"
    assert plain.dflash["answers"][0]["mode"] == "plain"
    if form == "json_schema":
        assert set(json.loads(drafted.choices[0].message.content)) == {"city", "people"}
    else:
        assert drafted.choices[0].message.content.lstrip().startswith("{")


def test_errors(client):
    for options in ({"n": 99}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="demo", messages=ASK, **options)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="demo", prompt=[5] * 100_000)
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="schema"):
        client.chat.completions.create(model="demo", messages=ASK, response_format=bad)
