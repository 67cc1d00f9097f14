"""OpenAI's responses protocol, driven by OpenAI's own client, with answers by a script."""

import openai
import pytest
from fakes import FakePair, FakeTokenizer, FakeWorker, running

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}
IDS = {"id", "call_id"}


def whole_and_streamed(server, **options):
    """The same request both ways; items are what their deltas add up to, and the events are in order."""
    options = {"model": "fake", "input": "Hi", **options}
    whole = server.openai().responses.create(**options)
    events = list(server.openai().responses.create(stream=True, **options))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1].response
    assert [item.model_dump(exclude=IDS) for item in final.output] == [
        item.model_dump(exclude=IDS) for item in whole.output
    ]
    assert (final.status, final.usage) == (whole.status, whole.usage)
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert deltas == whole.output_text
    done = [e.item.model_dump() for e in events if e.type == "response.output_item.done"]
    assert done == [item.model_dump() for item in final.output]
    return whole


def test_an_answer():
    with running() as server:
        whole = whole_and_streamed(server, instructions="Be brief.")
        assert (whole.output_text, whole.status) == ("Hello there, world.", "completed")
        prompt = '[system]Be brief.""\n[user]Hi""\n'
        assert (whole.usage.input_tokens, whole.usage.input_tokens_details.cached_tokens) == (len(prompt), 2)
        assert whole.usage.output_tokens == len("Hello there, world.") + 1
        cut = whole_and_streamed(server, max_output_tokens=5)
        assert (cut.output_text, cut.status, cut.incomplete_details.reason) == (
            "Hello",
            "incomplete",
            "max_output_tokens",
        )


def test_logprobs():
    with running() as server:
        whole = whole_and_streamed(server, include=["message.output_text.logprobs"], top_logprobs=1)
        logprobs = whole.output[0].content[0].logprobs
        assert "".join(entry.token for entry in logprobs) == whole.output_text
        assert [top.token for top in logprobs[0].top_logprobs] == ["a"]


@pytest.mark.parametrize("size", [1, 6, 1000])
def test_reasoning_and_calls(size):
    text = f"Where?\n</think>\n\nI look.\n{CALL}"
    pair = FakePair(FakeTokenizer(has_thinking=True, has_tool_calling=True))
    with running(FakeWorker(script=lambda job: text, size=size), pair=pair) as server:
        whole = whole_and_streamed(server, tools=[WEATHER])
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        assert whole.output[0].content[0].text == "Where?"
        assert whole.output_text == "I look."
        call = whole.output[2]
        assert (call.name, call.arguments) == ("weather", '{"city": "Paris"}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        conversation = [{"role": "user", "content": "Hi"}, *whole.output, result]
        server.openai().responses.create(model="fake", input=conversation, tools=[WEATHER])
        seen = server.tokenizer.rendered[-1]["messages"]
        assert [m["role"] for m in seen] == ["user", "assistant", "tool"]
        assert (seen[1]["reasoning_content"], seen[1]["content"]) == ("Where?", "I look.")
        assert seen[1]["tool_calls"][0]["id"] == seen[2]["tool_call_id"] == call.call_id


@pytest.mark.parametrize(
    "options",
    [
        {"previous_response_id": "resp_1"},
        {"store": True},
        {"background": True},
        {"include": ["file_search_call.results"]},
        {"truncation": "auto"},
        {"input": []},
        {"top_logprobs": 2},
    ],
)
def test_what_needs_a_memory_is_refused(options):
    with running() as server, pytest.raises(openai.BadRequestError):
        server.openai().responses.create(**{"model": "fake", "input": "Hi", **options})


def test_a_failure_while_streaming(capfd):
    with running(FakeWorker(error=KeyError("secret"))) as server:
        events = list(server.openai().responses.create(model="fake", input="Hi", stream=True))
        assert events[-1].type == "response.failed"
        assert events[-1].response.error.code == "server_error"
    capfd.readouterr()
