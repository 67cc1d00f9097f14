"""Anthropic's protocol, driven by Anthropic's own client, with answers by a script."""

import anthropic
import pytest
from fakes import FakePair, FakeTokenizer, FakeWorker, running

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = {"name": "weather", "description": "How it is", "input_schema": {"type": "object", "properties": {}}}
ASK = [{"role": "user", "content": "Hi"}]


def whole_and_streamed(server, **options):
    """The same request both ways; the client's own accumulation of the events has to be the whole message."""
    options = {"model": "fake", "max_tokens": 1000, "messages": ASK, **options}
    whole = server.anthropic().messages.create(**options)
    with server.anthropic().messages.stream(**options) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
        block.model_dump(exclude={"id"}) for block in whole.content
    ]
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert (streamed.usage.input_tokens, streamed.usage.output_tokens) == (
        whole.usage.input_tokens,
        whole.usage.output_tokens,
    )
    assert events[0].type == "message_start"
    return whole


def test_an_answer():
    with running() as server:
        whole = whole_and_streamed(server, system="Be brief.", extra_body={"top_k": 3})
        assert [(b.type, b.text) for b in whole.content] == [("text", "Hello there, world.")]
        assert (whole.role, whole.stop_reason) == ("assistant", "end_turn")
        prompt = '[system]Be brief.""\n[user]Hi""\n'
        assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (len(prompt) - 2, 2)
        assert whole.usage.output_tokens == len("Hello there, world.") + 1
        assert whole.dflash["answers"][0]["mode"] == "dflash"
        assert server.worker.jobs[0].params.top_k == 3


def test_limits_and_stop_sequences():
    with running() as server:
        cut = whole_and_streamed(server, max_tokens=5)
        assert (cut.content[0].text, cut.stop_reason) == ("Hello", "max_tokens")
        stopped = whole_and_streamed(server, stop_sequences=["never", ", w"])
        assert (stopped.content[0].text, stopped.stop_reason) == ("Hello there", "stop_sequence")
        assert stopped.stop_sequence == ", w"


@pytest.mark.parametrize("size", [1, 6, 1000])
def test_thinking_and_tools(size):
    text = f"Where?\n</think>\n\nI look.\n{CALL}\n{CALL.replace('Paris', 'Rome')}"
    pair = FakePair(FakeTokenizer(has_thinking=True, has_tool_calling=True))
    with running(FakeWorker(script=lambda job: text, size=size), pair=pair) as server:
        whole = whole_and_streamed(server, tools=[WEATHER])
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert whole.content[0].thinking == "Where?"
        assert whole.content[1].text == "I look."
        assert [block.input for block in whole.content[2:]] == [{"city": "Paris"}, {"city": "Rome"}]
        assert whole.stop_reason == "tool_use"
        single = {"type": "auto", "disable_parallel_tool_use": True}
        one = whole_and_streamed(server, tools=[WEATHER], tool_choice=single)
        assert [block.type for block in one.content] == ["thinking", "text", "tool_use"]
        assert server.tokenizer.rendered[-1]["tools"][0]["function"]["parameters"] == WEATHER["input_schema"]


def test_a_conversation_with_tools_reaches_the_template():
    pair = FakePair(FakeTokenizer(has_thinking=True, has_tool_calling=True))
    conversation = [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    with running(pair=pair) as server:
        server.anthropic().messages.create(model="fake", max_tokens=9, messages=conversation)
        seen = server.tokenizer.rendered[-1]["messages"]
        assert [m["role"] for m in seen] == ["user", "assistant", "tool", "user"]
        assert seen[1]["reasoning_content"] == "hm"
        assert seen[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
        assert (seen[2]["content"], seen[3]["content"]) == ("sunny", "Well?")


def test_a_begun_answer_is_continued():
    with running() as server:
        begun = [*ASK, {"role": "assistant", "content": "Well"}]
        server.anthropic().messages.create(model="fake", max_tokens=9, messages=begun)
        assert server.tokenizer.rendered[-1]["continue"] is True


def test_counting_tokens():
    with running() as server:
        client = server.anthropic()
        counted = client.messages.count_tokens(model="fake", messages=ASK, system="Be brief.")
        made = client.messages.create(model="fake", max_tokens=9, messages=ASK, system="Be brief.")
        assert counted.input_tokens == made.usage.input_tokens + made.usage.cache_read_input_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"extra_body": {"temperature": 1.5}},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [WEATHER]},
    ],
)
def test_what_cannot_be_done_is_refused(options):
    with running() as server, pytest.raises(anthropic.BadRequestError) as found:
        server.anthropic().messages.create(**{"model": "fake", "max_tokens": 9, "messages": ASK, **options})
    assert found.value.body["type"] == "error"
    assert found.value.body["error"]["type"] == "invalid_request_error"


def test_errors_have_their_own_kinds():
    with running(FakeWorker(room=0)) as server:
        with pytest.raises(anthropic.RateLimitError) as full:
            server.anthropic().messages.create(model="fake", max_tokens=9, messages=ASK)
        assert full.value.response.headers["retry-after"] == "7"
        with pytest.raises(anthropic.NotFoundError):
            server.anthropic().messages.create(model="other", max_tokens=9, messages=ASK)
