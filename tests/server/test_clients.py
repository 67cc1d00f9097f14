"""What real clients send beyond the protocols: done, or ignored by name, with answers by a script."""

import json

import httpx
import openai
import pytest
from fakes import EOS, FakeWorker, running

ASK = [{"role": "user", "content": "Hi"}]
BEGUN = [*ASK, {"role": "assistant", "content": "Well"}]
BODIES = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": ASK, "max_tokens": 50},
}


def post(server, path, **more):
    return httpx.post(f"{server.url}{path}", json={**BODIES[path], **more}, timeout=60)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_named(path, stream, capfd):
    """In a header of each answer, and once in the log; known ones without effect are not."""
    with running() as server:
        for _ in range(2):
            answer = post(server, path, colour="red", keep_alive="5m", metadata={}, nothing=None, stream=stream)
            assert answer.status_code == 200
            assert answer.headers["x-dflash-ignored"] == "colour, keep_alive"
        assert "x-dflash-ignored" not in post(server, path, metadata={}, stream=stream).headers
    logged = capfd.readouterr().err
    assert logged.count("colour") == 1
    assert f"warning: ignored in a request to {path}: colour, keep_alive\n" in logged


def test_inner_fields_are_named_with_their_place():
    with running() as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = post(server, "/v1/chat/completions", stream=True, stream_options=options)
        assert answer.headers["x-dflash-ignored"] == "stream_options.continuous_usage_stats"
        message = {**ASK[0], "colour": "red"}
        answer = post(server, "/v1/chat/completions", messages=[message])
        assert answer.headers["x-dflash-ignored"] == "messages[0].colour"


def test_names_cannot_break_headers_or_the_log(capfd):
    """Line breaks and other letters are written in percents, and there is an end to their number and length."""
    with running() as server:
        answer = post(server, "/v1/chat/completions", **{"a\r\nx: y\u00e9": 1})
        assert answer.headers["x-dflash-ignored"] == "a%0D%0Ax%3A%20y%C3%A9"
        body = json.dumps({"tokens": [], "a": [], "": []})
        answer = httpx.post(f"{server.url}/detokenize", content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.headers["x-dflash-ignored"]) == (200, 'a, ""')
        many = post(server, "/v1/chat/completions", **{f"field{i}{'x' * 200}": i for i in range(500)})
        assert len(many.headers["x-dflash-ignored"]) < 4000
        for batch in range(40):
            post(server, "/v1/chat/completions", **{f"other{batch}.{i}": i for i in range(32)})
    logged = capfd.readouterr().err
    assert all(line.startswith("warning: ignored in a request to /") for line in logged.splitlines())
    assert logged.count("other") <= 1000


def test_harmless_values_of_what_cannot_be_done():
    with running() as server:
        harmless = {"mirostat": 0, "typical_p": 1.0, "xtc_probability": 0.0, "use_beam_search": False}
        answer = post(server, "/v1/chat/completions", **harmless)
        assert (answer.status_code, "x-dflash-ignored" in answer.headers) == (200, False)


@pytest.mark.parametrize("path", BODIES)
def test_parameters_of_other_servers_reach_the_worker(path):
    with running() as server:
        more = {"ignore_eos": True, "min_tokens": 3, "stop_token_ids": [72, 73, 72], "repeat_penalty": 1.25}
        assert post(server, path, **more).headers.get("x-dflash-ignored") is None
        params = server.worker.jobs[0].params
        assert (params.ignore_eos, params.min_tokens, params.stop_token_ids) == (True, 3, (72, 73))
        assert params.repetition_penalty == 1.25
        post(server, path, repeat_penalty=1.25, repetition_penalty=1.5)
        assert server.worker.jobs[1].params.repetition_penalty == 1.5


def test_tokens_that_end_the_answer_have_no_logprobs():
    """The script's answer ends with an exclamation mark; told that this is a stop token, nothing is said of it."""
    with running(FakeWorker(script=lambda job: "Hello")) as server:
        body = {"logprobs": True, "max_tokens": 50, "stop_token_ids": [ord("o")]}
        entries = post(server, "/v1/chat/completions", **body).json()["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [*"Hell"]
        assert EOS not in [ord(entry["token"]) for entry in entries]


def test_a_limit_of_minus_one_is_the_default():
    with running() as server:
        default = server.service.defaults.max_tokens
        for path, name in (
            ("/v1/chat/completions", "max_tokens"),
            ("/v1/chat/completions", "max_completion_tokens"),
            ("/v1/completions", "max_tokens"),
            ("/v1/responses", "max_output_tokens"),
        ):
            assert post(server, path, **{name: -1}).status_code == 200
            assert server.worker.jobs[-1].params.max_tokens == default
            assert post(server, path, **{name: -2}).status_code == 400


def test_where_the_prompt_ends():
    with running() as server:
        post(server, "/v1/chat/completions")
        ask = {"messages": BEGUN, "continue_final_message": True}
        post(server, "/v1/chat/completions", **ask)
        post(server, "/v1/chat/completions", **ask, add_generation_prompt=False)
        post(server, "/v1/chat/completions", add_generation_prompt=False)
        found = [(r["continue"], r["opened"]) for r in server.tokenizer.rendered]
        assert found == [(False, True), (True, False), (True, False), (False, False)]
        assert [job.continues for job in server.worker.jobs] == [False, True, True, False]
        assert post(server, "/v1/chat/completions", **ask, add_generation_prompt=True).status_code == 400
        post(server, "/v1/messages", messages=BEGUN)
        assert server.worker.jobs[-1].continues


def test_thinking_at_the_top_of_a_request():
    with running() as server:
        assert post(server, "/v1/chat/completions", enable_thinking="yes").status_code == 400
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            assert "x-dflash-ignored" not in post(server, path, enable_thinking=False).headers


@pytest.mark.parametrize(
    "form",
    [
        {"guided_json": {"type": "integer"}},
        {"guided_json": json.dumps({"type": "integer"})},
        {"structured_outputs": {"json": {"type": "integer"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_schema_in_other_words(form, path, monkeypatch):
    with running() as server:
        asked = []

        async def constraint(schema):
            asked.append(schema)

        monkeypatch.setattr(server.service, "constraint", constraint)
        assert post(server, path, **form).status_code == 200
        assert asked == [{"type": "integer"}]
        assert post(server, path, structured_outputs={"json_object": True}).status_code == 200
        assert asked[1:] == [None]


def test_tools_of_openai_are_left_out():
    """As its Codex CLI sends them, with the data of the client."""
    tools = [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}, {"type": "web_search"}]
    with running() as server:
        answer = post(server, "/v1/responses", tools=tools, client_metadata={"a": "b"}, tool_choice="auto", store=False)
        assert answer.status_code == 200
        assert answer.headers["x-dflash-ignored"] == "tools[0].type.namespace, tools[1].type.web_search"
        assert server.tokenizer.rendered[-1]["tools"] is None
        with pytest.raises(openai.BadRequestError):
            server.openai().responses.create(model="fake", input="Hi", tools=[{"name": "f"}])


def test_input_items_of_other_kinds():
    """What OpenAI's tools did is left out by name; what would be missing from the conversation is refused."""
    with running() as server:
        items = [{"type": "web_search_call", "id": "w", "status": "completed"}, {"role": "user", "content": "Hi"}]
        answer = post(server, "/v1/responses", input=items)
        assert answer.headers["x-dflash-ignored"] == "input[0].type.web_search_call"
        assert [message["content"] for message in server.tokenizer.rendered[-1]["messages"]] == ["Hi"]
        for kind in ("item_reference", "custom_tool_call_output", "nonsense"):
            refused = post(server, "/v1/responses", input=[*items, {"type": kind, "id": "x"}])
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[2].type")
            assert kind in refused.json()["error"]["message"]
