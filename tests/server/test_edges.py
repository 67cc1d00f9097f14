"""What stands around an answer: ids, the first page, old HTTP, and errors in the words that clients look for."""

import socket

import anthropic
import httpx
import openai
import pytest
from fakes import CONTEXT, FakePair, FakeTokenizer, FakeWorker, running

from dflash_mlx.server.security import Policy

ASK = [{"role": "user", "content": "Hi"}]
LONG = [{"role": "user", "content": "x" * CONTEXT}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_that_is_too_small(stream):
    """OpenAI's code and words, Anthropic's words: clients shorten a conversation when they see them."""
    with running() as server:
        client = server.openai()
        tokens = len(f'[user]{LONG[0]["content"]}""\n')
        for ask in (
            lambda: client.chat.completions.create(model="fake", messages=LONG, stream=stream),
            lambda: client.completions.create(model="fake", prompt="x" * tokens, stream=stream),
            lambda: client.responses.create(model="fake", input=LONG, stream=stream),
        ):
            with pytest.raises(openai.BadRequestError, match=f"maximum context length is {CONTEXT} tokens") as found:
                ask()
            assert (found.value.code, found.value.type) == ("context_length_exceeded", "invalid_request_error")
        with pytest.raises(anthropic.BadRequestError) as other:
            server.anthropic().messages.create(model="fake", max_tokens=9, messages=LONG, stream=stream)
        error = {"type": "invalid_request_error", "message": f"prompt is too long: {tokens} tokens > {CONTEXT} maximum"}
        assert other.value.body["error"] == error


def test_the_first_page():
    with running(policy=Policy(keys=("k",))) as server:
        assert httpx.head(server.url).status_code == 401
        answer = httpx.head(server.url, headers={"Authorization": "Bearer k"})
        assert (answer.status_code, answer.content) == (200, b"")
        assert "dflash-mlx" in httpx.get(server.url, headers={"x-api-key": "k"}).text


def test_every_answer_has_an_id():
    """The client's own where it can stand in a header; also on refusals and streams."""
    with running(policy=Policy(keys=("k",))) as server, httpx.Client(base_url=server.url) as client:
        key = {"x-api-key": "k"}
        found = []
        for path, body in (
            ("/v1/chat/completions", {"messages": ASK}),
            ("/v1/chat/completions", {"messages": ASK, "stream": True}),
            ("/v1/chat/completions", {"messages": []}),
            ("/nowhere", {}),
        ):
            answer = client.post(path, json=body, headers=key)
            found.append(answer.headers["x-request-id"])
            assert answer.headers["request-id"] == found[-1]
            named = client.post(path, json=body, headers={**key, "x-request-id": "mine-1"})
            assert named.headers["x-request-id"] == "mine-1"
        found.append(client.get("/v1/models").headers["x-request-id"])
        assert len(set(found)) == 5
        for bad in ("x" * 200, "two words"):
            assert client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"].startswith("req_")
        with pytest.raises(anthropic.AuthenticationError) as refused:
            server.anthropic().messages.create(model="fake", max_tokens=9, messages=ASK)
        assert refused.value.request_id.startswith("req_")


def test_calls_have_ids_in_each_protocols_form():
    pair = FakePair(FakeTokenizer(has_tool_calling=True))
    function = {"name": "weather", "parameters": {"type": "object"}}
    with running(FakeWorker(script=lambda job: CALL), pair=pair) as server:
        client = server.openai()
        chat = client.chat.completions.create(
            model="fake", messages=ASK, tools=[{"type": "function", "function": function}]
        )
        assert chat.choices[0].message.tool_calls[0].id.startswith("call_")
        response = client.responses.create(model="fake", input="Hi", tools=[{"type": "function", **function}])
        assert response.output[0].call_id.startswith("call_")
        tool = {"name": "weather", "input_schema": {"type": "object"}}
        message = server.anthropic().messages.create(model="fake", max_tokens=99, messages=ASK, tools=[tool])
        assert message.content[0].id.startswith("toolu_")


def raw(server, text: str) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(text.replace("\n", "\r\n").encode())
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_old_http_needs_no_host():
    """From this machine, and without an Origin; the key is needed as ever, and a wrong Host stays wrong."""
    with running(policy=Policy(keys=("k",))) as server:
        key = "Authorization: Bearer k\n"
        assert b" 200 " in raw(server, f"GET /v1/models HTTP/1.0\n{key}\n").splitlines()[0]
        assert b" 401 " in raw(server, "GET /v1/models HTTP/1.0\n\n").splitlines()[0]
        assert b" 403 " in raw(server, f"GET /v1/models HTTP/1.0\n{key}Host: evil.example\n\n").splitlines()[0]
        assert b" 403 " in raw(server, f"GET /v1/models HTTP/1.0\n{key}Origin: http://evil.example\n\n").splitlines()[0]
        assert b" 400 " in raw(server, f"GET /v1/models HTTP/1.1\n{key}\n").splitlines()[0]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed", "/api/embeddings", "/v1/nothing"])
def test_what_is_not_there_is_named(path):
    with running() as server:
        answer = httpx.post(f"{server.url}{path}", json={"model": "fake", "input": "Hi", "prompt": "Hi"})
    assert answer.status_code == 404
    assert ("makes no embeddings" in answer.text) == ("embed" in path)
    assert "docs/server.md" in answer.text
