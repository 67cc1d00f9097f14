"""OpenAI's chat and completion protocols, driven by OpenAI's own client, with answers by a script."""

import json

import openai
import pytest
from fakes import EOS, FakePair, FakeTokenizer, FakeWorker, running
from tiny_pair import make_templated_pair

from dflash_mlx.server.failures import RequestError
from dflash_mlx.server.prompts import encode_chat

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "user", "content": "Hi"}]


def whole_and_streamed(server, **options):
    """The same request both ways; text, reasoning, calls, log-probabilities, ends and counts have to agree."""
    client = server.openai()
    whole = client.chat.completions.create(model="fake", messages=ASK, **options)
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=ASK, stream=True, stream_options={"include_usage": True}, **options
        )
    )
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        text = "".join(c.delta.content or "" for c in parts)
        assert text == (choice.message.content or "")
        reasoning = "".join(getattr(c.delta, "reasoning_content", None) or "" for c in parts)
        assert reasoning == (getattr(choice.message, "reasoning_content", None) or "")
        calls = [(t.index, t.function.name, t.function.arguments) for c in parts for t in c.delta.tool_calls or []]
        expected = [(i, t.function.name, t.function.arguments) for i, t in enumerate(choice.message.tool_calls or [])]
        assert calls == expected
        assert [c.finish_reason for c in parts if c.finish_reason] == [choice.finish_reason]
        if choice.logprobs is not None:
            assert [e for c in parts for e in (c.logprobs.content if c.logprobs else [])] == choice.logprobs.content
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].dflash["answers"][0]["acceptance"] == whole.dflash["answers"][0]["acceptance"]
    return whole


def test_an_answer():
    with running() as server:
        whole = whole_and_streamed(server)
        assert whole.choices[0].message.content == "Hello there, world."
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage.prompt_tokens == len('[user]Hi""\n')
        assert whole.usage.completion_tokens == len("Hello there, world.") + 1
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        assert whole.usage.prompt_tokens_details.cached_tokens == 2
        assert whole.dflash["answers"][0]["mode"] == "dflash"


def rounds_of(server, **extension):
    """The stream of an answer with the extension `dflash`; what its chunks say of their rounds."""
    options = {"model": "fake", "messages": ASK, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(server.openai().chat.completions.create(**options, extra_body={"dflash": extension}))
    return [chunk.dflash["round"] for chunk in chunks if "round" in (chunk.model_extra.get("dflash") or {})], chunks


def test_a_stream_says_what_each_round_brought():
    """Tokens add up to the usage, also of rounds that show nothing: a marker, the end of the answer."""
    pair = FakePair(tokenizer=FakeTokenizer(has_thinking=True))
    worker = FakeWorker(script=lambda job: "<think>Hm.</think>Hello.", size=4)
    with running(worker, pair=pair) as server:
        rounds, chunks = rounds_of(server, rounds=True)
        assert [r["tokens"] for r in rounds] == [4, 4, 4, 4, 4, 4, 1]
        assert sum(r["tokens"] for r in rounds) == chunks[-1].usage.completion_tokens
        acceptance = chunks[-1].dflash["answers"][0]["acceptance"]
        for name in ("drafted", "accepted"):
            assert sum(r[name] for r in rounds) == acceptance[name] > 0
        plain, _ = rounds_of(server, rounds=True, draft=False)
        assert [r["tokens"] for r in plain] == [r["tokens"] for r in rounds]
        assert {(r["drafted"], r["accepted"]) for r in plain} == {(0, 0)}
        assert rounds_of(server, rounds=False)[0] == rounds_of(server)[0] == []


def test_rounds_are_told_in_streams_only():
    with running() as server:
        client = server.openai().chat.completions.with_raw_response
        answer = client.create(model="fake", messages=ASK, extra_body={"dflash": {"rounds": True}})
        assert answer.headers["x-dflash-ignored"] == "dflash.rounds"
        with pytest.raises(openai.BadRequestError, match=r"dflash\.rounds should be true or false"):
            client.create(model="fake", messages=ASK, extra_body={"dflash": {"rounds": 3}})


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_stop_strings_end_text_and_logprobs(size):
    """Neither the text nor the log-probabilities reach into the stop string, however the rounds cut it."""
    with running(FakeWorker(size=size)) as server:
        whole = whole_and_streamed(server, stop=["re, w", "never"], logprobs=True, top_logprobs=2)
        choice = whole.choices[0]
        assert choice.message.content == "Hello the"
        assert "".join(entry.token for entry in choice.logprobs.content) == "Hello the"
        assert [top.token for top in choice.logprobs.content[0].top_logprobs] == ["a", "b"]
        assert whole.usage.completion_tokens == len("Hello there, w")


def test_logprobs_leave_out_the_end_of_sequence():
    with running() as server:
        choice = whole_and_streamed(server, logprobs=True).choices[0]
        assert "".join(bytes(e.bytes).decode() for e in choice.logprobs.content) == choice.message.content
        assert EOS not in [ord(e.token) for e in choice.logprobs.content]


def test_the_length_limit():
    with running() as server:
        for name in ("max_tokens", "max_completion_tokens"):
            whole = whole_and_streamed(server, **{name: 5})
            assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("Hello", "length")


def test_several_answers_have_seeds_of_their_own():
    with running(FakeWorker(script=lambda job: f"seed {job.params.seed}")) as server:
        whole = whole_and_streamed(server, n=3, seed=2**32 - 2, temperature=0.5)
        assert [c.message.content for c in whole.choices] == ["seed 4294967294", "seed 4294967295", "seed 0"]
        assert whole.usage.prompt_tokens == len('[user]Hi""\n'), "the prompt counts once"


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_tool_calls(size):
    text = f"Let me look.\n{CALL}\n{CALL.replace('Paris', 'Rome')}"
    pair = FakePair(FakeTokenizer(has_tool_calling=True))
    with running(FakeWorker(script=lambda job: text, size=size), pair=pair) as server:
        choice = whole_and_streamed(server, tools=[WEATHER]).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        assert [json.loads(c.function.arguments)["city"] for c in choice.message.tool_calls] == ["Paris", "Rome"]
        assert len({c.id for c in choice.message.tool_calls}) == 2
        assert server.tokenizer.rendered[-1]["tools"][0]["function"]["name"] == "weather"
        one = whole_and_streamed(server, tools=[WEATHER], parallel_tool_calls=False)
        assert [c.function.name for c in one.choices[0].message.tool_calls] == ["weather"]
        assert one.usage.completion_tokens == len(f"Let me look.\n{CALL}")
        none = whole_and_streamed(server, tools=[WEATHER], tool_choice="none").choices[0]
        assert (none.message.content, none.message.tool_calls) == (text, None)


def test_the_model_is_told_of_the_tools_that_are_allowed():
    rain = {"type": "function", "function": {"name": "rain"}}
    pair = FakePair(FakeTokenizer(has_tool_calling=True))
    for allowed in ([rain], [rain, WEATHER], []):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": allowed}}
        with running(pair=pair) as server:
            server.openai().chat.completions.create(
                model="fake", messages=ASK, tools=[WEATHER, rain], tool_choice=choice
            )
        told = [tool["function"]["name"] for tool in server.tokenizer.rendered[-1]["tools"] or []]
        assert set(told) == {tool["function"]["name"] for tool in allowed}


def test_a_call_that_cannot_be_read_is_shown():
    pair = FakePair(FakeTokenizer(has_tool_calling=True))
    with running(FakeWorker(script=lambda job: f"{CALL[:-30]} what?{CALL[-12:]}"), pair=pair) as server:
        choice = whole_and_streamed(server, tools=[WEATHER]).choices[0]
        assert choice.message.tool_calls is None
        assert choice.message.content == f"{CALL[:-30]} what?{CALL[-12:]}"
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_reasoning_is_split_off(size):
    pair = FakePair(FakeTokenizer(has_thinking=True))
    with running(FakeWorker(script=lambda job: "Hm, let me see.\n</think>\n\nHello.", size=size), pair=pair) as server:
        message = whole_and_streamed(server).choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm, let me see.", "Hello.")
        off = whole_and_streamed(server, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        assert not hasattr(off.choices[0].message, "reasoning_content"), "the template opened no reasoning"


def test_earlier_calls_and_reasoning_reach_the_template():
    pair = FakePair(FakeTokenizer(has_tool_calling=True))
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    with running(pair=pair) as server:
        server.openai().chat.completions.create(model="fake", messages=messages)
        seen = server.tokenizer.rendered[-1]["messages"]
        assert seen[0] == {"role": "system", "content": "Be brief."}
        assert seen[2]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
        assert seen[2]["reasoning_content"] == "hm"
        assert seen[3] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


def test_parameters_reach_the_worker():
    with running() as server:
        server.openai().chat.completions.create(
            model="fake",
            messages=ASK,
            temperature=0.7,
            top_p=0.9,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={"72": -3},
            extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "dflash": {"draft": False}},
        )
        [job] = server.worker.jobs
        found = (job.params.temperature, job.params.top_p, job.params.top_k, job.params.min_p)
        assert found == (0.7, 0.9, 7, 0.1)
        assert (job.params.presence_penalty, job.params.frequency_penalty) == (0.5, -0.5)
        assert (job.params.repetition_penalty, dict(job.params.logit_bias)) == (1.1, {72: -3.0})
        assert job.draft is False


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"store": True}, "store"),
        ({"tools": [WEATHER]}, "tools"),
        ({"functions": []}, "functions"),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 8}, "min_tokens"),
        ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids"),
        ({"extra_body": {"mirostat": 2}}, "mirostat"),
        ({"extra_body": {"skip_special_tokens": False}}, "skip_special_tokens"),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, "structured_outputs.regex"),
        ({"extra_body": {"guided_json": "{"}}, "guided_json"),
        ({"extra_body": {"guided_json": {}, "response_format": {"type": "json_object"}}}, "guided_json"),
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": False}}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(options, param):
    with running() as server, pytest.raises(openai.BadRequestError) as found:
        server.openai().chat.completions.create(**{"model": "fake", "messages": ASK, **options})
    assert found.value.param == param
    assert found.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"type": "function", "function": {"name": "other"}}, "not among the tools"),
        ("sometimes", "auto, none, required"),
        ({"type": "custom", "custom": {"name": "weather"}}, "type function"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "function", "name": "other"}]}}, "not among"),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "there are no tools"),
        ({"type": "allowed_tools", "mode": "sometimes"}, "one of auto, required"),
    ],
)
def test_calls_that_cannot_be_forced(choice, reason):
    pair = FakePair(FakeTokenizer(has_tool_calling=True))
    with running(pair=pair) as server, pytest.raises(openai.BadRequestError, match=reason):
        server.openai().chat.completions.create(model="fake", messages=ASK, tools=[WEATHER], tool_choice=choice)


def test_other_models_are_not_served():
    with running(names=("fake", "gpt-4o")) as server:
        client = server.openai()
        with pytest.raises(openai.NotFoundError) as found:
            client.chat.completions.create(model="other", messages=ASK)
        assert found.value.code == "model_not_found"
        assert client.chat.completions.create(model="gpt-4o", messages=ASK).model == "gpt-4o"
        assert [model.id for model in client.models.list()] == ["fake", "gpt-4o"]
        assert client.models.retrieve("fake").id == "fake"


def test_a_full_queue():
    with running(FakeWorker(room=1)) as server:
        with pytest.raises(openai.RateLimitError) as found:
            server.openai().chat.completions.create(model="fake", messages=ASK, n=2)
        assert found.value.response.headers["retry-after"] == "7"
        assert server.worker.cancelled == 1, "what was queued already goes again"


def test_failures_of_ours_keep_their_secrets(capfd):
    worker = FakeWorker(error=KeyError("secret"))
    with running(worker) as server:
        client = server.openai()
        with pytest.raises(openai.InternalServerError) as found:
            client.chat.completions.create(model="fake", messages=ASK)
        assert "secret" not in str(found.value)
        with pytest.raises(openai.APIError, match="failed"):
            list(client.chat.completions.create(model="fake", messages=ASK, stream=True))
    assert "secret" in capfd.readouterr().err


def test_completions():
    with running(FakeWorker(script=lambda job: "".join(map(chr, job.prompt)).upper())) as server:
        client = server.openai()
        whole = client.completions.create(model="fake", prompt=["one", [116, 119, 111]], n=2, logprobs=1, max_tokens=9)
        assert [c.text for c in whole.choices] == ["ONE", "ONE", "TWO", "TWO"]
        assert whole.choices[0].logprobs.tokens == ["O", "N", "E"]
        assert whole.choices[0].logprobs.text_offset == [0, 1, 2]
        assert whole.choices[0].logprobs.top_logprobs == [{"a": -1.0}] * 3
        assert whole.usage.prompt_tokens == 6
        chunks = list(client.completions.create(model="fake", prompt="a longer text than sixteen", stream=True))
        assert "".join(c.choices[0].text for c in chunks) == "A LONGER TEXT TH", "OpenAI's limit where none is given"
        assert chunks[-1].choices[0].finish_reason == "length"
        refused = [{"echo": 1}, {"max_tokens": -2}, {"best_of": 3}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [-1]}]
        for wrong in refused:
            with pytest.raises(openai.BadRequestError):
                client.completions.create(**{"model": "fake", "prompt": "x", **wrong})


def test_streamed_completions_end_with_the_usage_that_was_asked_for():
    with running() as server:
        client = server.openai()
        whole = client.completions.create(model="fake", prompt=["one", "three"], n=2)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.completions.create(model="fake", prompt=["one", "three"], n=2, **options)
        assert (last.choices, last.usage) == ([], whole.usage)
        assert last.dflash["answers"] == whole.dflash["answers"]
        assert all(chunk.usage is None for chunk in chunks)
        without = list(client.completions.create(model="fake", prompt="one", stream=True))
        assert all(chunk.choices and chunk.usage is None for chunk in without)


def test_a_prompt_counts_once_however_many_answers_it_gets():
    """Each prompt's tokens, and those of them that a cache held: 2 of each, by this worker."""
    with running() as server:
        chat = whole_and_streamed(server, n=3).usage
        prompt = len('[user]Hi""\n')
        assert (chat.prompt_tokens, chat.prompt_tokens_details.cached_tokens) == (prompt, 2)
        assert chat.completion_tokens == 3 * (len("Hello there, world.") + 1)
        texts = server.openai().completions.create(model="fake", prompt=["one", "three"], n=3, max_tokens=4).usage
        assert (texts.prompt_tokens, texts.prompt_tokens_details.cached_tokens) == (len("one" + "three"), 2 * 2)
        assert texts.completion_tokens == 2 * 3 * 4


STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "{% if loop.index0 and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_instructions_are_joined_where_the_template_wants_that():
    pair = make_templated_pair()
    roles = [("system", "A"), ("system", "B"), ("user", "C"), ("user", "D"), ("assistant", "E"), ("user", "F")]
    messages = [{"role": role, "content": content} for role, content in roles]
    loose = pair.tokenizer.decode(encode_chat(pair, messages, (), {}))
    assert loose == "<system>A\n<system>B\n<user>C\n<user>D\n<assistant>E\n<user>F\n<assistant>"
    pair.tokenizer._tokenizer.chat_template = STRICT
    strict = pair.tokenizer.decode(encode_chat(pair, messages, (), {}))
    assert strict == "<system>A\n\nB<user>C\n\nD<assistant>E<user>F<assistant>"
    with pytest.raises(RequestError, match="system first"):
        encode_chat(pair, [*messages, messages[4], messages[4]], (), {})
