"""Ollama's protocol over HTTP, with answers by a script, and by tiny models against OpenAI's protocol."""

import json

import httpx
import pytest
from fakes import FakePair, FakeTokenizer, FakeWorker, running
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from tiny_pair import make_templated_pair

from dflash_mlx.server.security import Policy
from dflash_mlx.server.worker import Worker

ASK = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json={"model": "fake", **body}, timeout=60)


def whole_and_streamed(server, path, **body):
    """The same request both ways; the lines together have to be the whole answer."""
    whole = post(server, path, stream=False, **body).json()
    streamed = post(server, path, **body)
    assert streamed.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    said = [line.get("message", line) for line in lines]
    expected = whole.get("message", whole)
    for name in ("content", "response", "thinking"):
        assert "".join(one.get(name, "") for one in said) == expected.get(name, "")
    calls = [call["function"] for one in said for call in one.get("tool_calls", [])]
    assert calls == [call["function"] for call in expected.get("tool_calls", [])]
    for name in ("done_reason", "prompt_eval_count", "eval_count"):
        assert lines[-1][name] == whole[name]
    return whole


def test_a_chat():
    with running() as server:
        whole = whole_and_streamed(server, "/api/chat", messages=ASK)
        assert whole["message"] == {"role": "assistant", "content": "Hello there, world."}
        assert (whole["model"], whole["done"], whole["done_reason"]) == ("fake", True, "stop")
        assert (whole["prompt_eval_count"], whole["eval_count"]) == (
            len('[user]Hi""\n'),
            len("Hello there, world.") + 1,
        )
        cut = whole_and_streamed(server, "/api/chat", messages=ASK, options={"num_predict": 5})
        assert (cut["message"]["content"], cut["done_reason"]) == ("Hello", "length")


def test_a_prompt():
    with running() as server:
        whole = whole_and_streamed(server, "/api/generate", prompt="Hi", system="Be brief.")
        assert whole["response"] == "Hello there, world."
        assert [m["content"] for m in server.tokenizer.rendered[-1]["messages"]] == ["Be brief.", "Hi"]
        whole_and_streamed(server, "/api/generate", prompt="Hi", raw=True)
        job = server.worker.jobs[-1]
        assert (job.prompt, job.continues) == ([ord("H"), ord("i")], True)


@pytest.mark.parametrize("size", [1, 1000])
def test_thinking_and_tools(size):
    pair = FakePair(FakeTokenizer(has_thinking=True, has_tool_calling=True))
    worker = FakeWorker(script=lambda job: f"Hm.\n</think>\n\nI look.\n{CALL}", size=size)
    with running(worker, pair=pair) as server:
        message = whole_and_streamed(server, "/api/chat", messages=ASK, tools=[WEATHER])["message"]
        assert (message["thinking"], message["content"]) == ("Hm.", "I look.")
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
        asked = {"function": {"name": "weather", "arguments": {"city": "Paris"}}}
        earlier = [
            {"role": "assistant", "content": "", "tool_calls": [asked, asked]},
            {"role": "tool", "content": "sunny", "tool_name": "weather"},
            {"role": "tool", "content": "rainy"},
        ]
        post(server, "/api/chat", messages=[*ASK, *earlier], think=False)
        seen = server.tokenizer.rendered[-1]["messages"]
        assert [call["id"] for call in seen[1]["tool_calls"]] == [m["tool_call_id"] for m in seen[2:]]
        assert seen[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}


def test_options_reach_the_worker():
    options = {
        "temperature": 0.7,
        "top_k": 7,
        "top_p": 0.9,
        "seed": 3,
        "stop": ["x"],
        "repeat_penalty": 1.25,
        "num_ctx": 4096,
        "mirostat": 0,
    }
    with running() as server:
        answer = post(server, "/api/chat", messages=ASK, options=options, keep_alive="5m")
        assert answer.headers["x-dflash-ignored"] == "options.num_ctx, keep_alive"
        params = server.worker.jobs[0].params
        assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.7, 7, 0.9, 3)
        assert (params.stop, params.repetition_penalty) == (("x",), 1.25)
        for unlimited in (-1, -2):
            post(server, "/api/chat", messages=ASK, options={"num_predict": unlimited})
            assert server.worker.jobs[-1].params.max_tokens == server.service.defaults.max_tokens


@pytest.mark.parametrize("form", ["json", {"type": "object"}])
def test_formats(form, monkeypatch):
    with running() as server:
        asked = []

        async def constraint(schema):
            asked.append(schema)

        monkeypatch.setattr(server.service, "constraint", constraint)
        assert post(server, "/api/chat", messages=ASK, format=form).status_code == 200
        assert post(server, "/api/generate", prompt="x", raw=True, format=form).status_code == 200
        assert asked == [None if form == "json" else form] * 2


def test_models():
    with running(names=("fake", "demo")) as server:
        listed = httpx.get(f"{server.url}/api/tags").json()["models"]
        assert [model["name"] for model in listed] == ["fake", "demo"]
        assert httpx.get(f"{server.url}/api/version").json()["version"].count(".") == 2
        loaded = httpx.get(f"{server.url}/api/ps").json()["models"]
        assert [model["name"] for model in loaded] == ["fake", "demo"]
        assert loaded[0]["context_length"] == 20_000
        shown = post(server, "/api/show", model="demo:latest").json()
        assert (shown["capabilities"], shown["model_info"]["mlx.context_length"]) == (["completion"], 20_000)
        assert post(server, "/api/chat", model="demo:latest", messages=ASK, stream=False).json()["model"] == "demo"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/chat", {"messages": ASK, "model": "other"}, 404),
        ("/api/show", {"model": "other"}, 404),
        ("/api/chat", {"messages": 3}, 400),
        ("/api/chat", {}, 400),
        ("/api/chat", {"messages": [], "model": "other"}, 404),
        ("/api/chat", {"messages": [{"role": "king", "content": "x"}]}, 400),
        ("/api/chat", {"messages": [{**ASK[0], "images": ["x"]}]}, 400),
        ("/api/chat", {"messages": ASK, "options": {"num_predict": 0}}, 400),
        ("/api/chat", {"messages": ASK, "options": {"mirostat": 2}}, 400),
        ("/api/chat", {"messages": ASK, "format": "xml"}, 400),
        ("/api/chat", {"messages": ASK, "tools": [WEATHER]}, 400),
        ("/api/generate", {"prompt": 3}, 400),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, 400),
        ("/api/generate", {"prompt": "x", "context": [1]}, 400),
        ("/api/generate", {"prompt": "x" * 20_000, "raw": True}, 400),
    ],
)
def test_what_cannot_be_done_is_refused(path, body, status):
    with running() as server:
        answer = post(server, path, **body)
        assert answer.status_code == status
        assert isinstance(answer.json()["error"], str)


def test_a_failure_while_streaming(capfd):
    with running(FakeWorker(error=KeyError("secret"))) as server:
        last = post(server, "/api/chat", messages=ASK).text.splitlines()[-1]
        assert "failed" in json.loads(last)["error"]
        assert "secret" not in last
    capfd.readouterr()


def test_a_request_without_words_finds_the_model_loaded():
    with running() as server:
        for path, body in (("/api/chat", {"messages": []}), ("/api/generate", {"prompt": ""}), ("/api/generate", {})):
            found = post(server, path, **body).json()
            assert (found["done"], found["done_reason"]) == (True, "load")
        assert server.worker.jobs == []


@pytest.mark.parametrize("path", ["tags", "ps", "version"])
def test_the_key_is_needed(path):
    with running(policy=Policy(keys=("k",))) as server:
        assert httpx.get(f"{server.url}/api/{path}").status_code == 401
        assert httpx.get(f"{server.url}/api/{path}", headers={"Authorization": "Bearer k"}).status_code == 200
        assert post(server, "/api/chat", messages=ASK).json().keys() == {"error"}


def test_answers_are_those_of_the_other_protocols():
    pair = make_templated_pair(BPEStreamingDetokenizer)
    with running(Worker(pair, width=3), pair=pair) as server:
        client = server.openai()
        chat = client.chat.completions.create(model="fake", messages=ASK, max_tokens=12)
        found = post(server, "/api/chat", messages=ASK, stream=False, options={"num_predict": 12}).json()
        assert found["message"]["content"] == chat.choices[0].message.content
        text = client.completions.create(model="fake", prompt="abc", max_tokens=12).choices[0].text
        body = {"prompt": "abc", "raw": True, "stream": False, "options": {"num_predict": 12}}
        assert post(server, "/api/generate", **body).json()["response"] == text


def test_log_probabilities_are_those_of_the_other_protocols():
    """In whole answers and, put together, in the lines of a stream."""
    pair = make_templated_pair(BPEStreamingDetokenizer)
    with running(Worker(pair, width=3), pair=pair) as server:
        asked = {"messages": ASK, "logprobs": True, "top_logprobs": 2}
        chat = server.openai().chat.completions.create(model="fake", max_tokens=12, **asked)
        expected = [entry.model_dump() for entry in chat.choices[0].logprobs.content]
        asked["options"] = {"num_predict": 12}
        whole = post(server, "/api/chat", stream=False, **asked).json()["logprobs"]
        lines = [json.loads(line) for line in post(server, "/api/chat", **asked).text.splitlines()]
        streamed = [entry for line in lines for entry in line.get("logprobs", [])]
        for found in (whole, streamed):
            assert [entry["token"] for entry in found] == [entry["token"] for entry in expected]
            assert [len(entry["top_logprobs"]) for entry in found] == [2] * len(expected)
            for mine, theirs in zip(found, expected, strict=True):
                assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)
        asked["logprobs"] = False
        assert post(server, "/api/chat", **asked).status_code == 400
