"""Hostile input: bodies that are nearly right, and bytes that are nearly HTTP. No 5xx, no hang, and the server goes on.

FUZZ_EXAMPLES=5000 in the environment tries that many of each instead of the usual few.
"""

import copy
import json
import socket
from typing import Any

import httpx
import pytest
from fakes import running
from fuzzing import NUMBERS, fuzz, paths_in
from hypothesis import given
from hypothesis import strategies as st
from tiny_pair import make_templated_pair

from dflash_mlx.server.parameters import Defaults
from dflash_mlx.server.service import Limits
from dflash_mlx.server.worker import Worker

FUZZ = fuzz(150)

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "x", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
        {"role": "user", "content": "hi", "name": "n"},
    ],
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "seed": 1,
    "n": 2,
    "stop": ["a", "b"],
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"3": 1},
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": True},
    "dflash": {"draft": True},
    "user": "u",
    "metadata": {},
}
COMPLETION = {
    "model": "tiny",
    "prompt": ["abc", [1, 2, 3]],
    "max_tokens": 4,
    "logprobs": 2,
    "stop": "z",
    "stream": False,
    "n": 2,
    "best_of": 2,
    "echo": False,
    "suffix": "",
    "temperature": 1,
}
MESSAGE = {
    "model": "tiny",
    "max_tokens": 4,
    "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "y", "is_error": True}]},
    ],
    "stop_sequences": ["a"],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
    "stream": True,
}
RESPONSE = {
    "model": "tiny",
    "instructions": "S",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "y"},
    ],
    "max_output_tokens": 4,
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
    "store": False,
    "stream": True,
}
OLLAMA = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi", "images": []},
        {"role": "assistant", "content": "", "thinking": "t", "tool_calls": [CALL]},
        {"role": "tool", "content": "y", "tool_name": "f"},
    ],
    "options": {"num_predict": 3, "temperature": 0.5, "top_k": 4, "seed": 1, "stop": ["a"], "repeat_penalty": 1.1},
    "tools": [TOOL],
    "think": False,
    "format": "",
    "keep_alive": "5m",
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", 1]}, "b": {"type": "string", "pattern": "^[a-z]{1,3}$", "maxLength": 5}},
    "required": ["a"],
    "$defs": {"c": {"type": "array", "items": {"$ref": "#/$defs/c"}}},
    "additionalProperties": {"$ref": "#/$defs/c"},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
SHORT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", SHORT),
    ("/v1/chat/completions", {**SHORT, "response_format": FORMAT}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "response_format": {"type": "json_object"}}),
    ("/v1/completions", COMPLETION),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", SHORT),
    ("/v1/messages/count_tokens", MESSAGE),
    ("/v1/responses", RESPONSE),
    ("/api/chat", OLLAMA),
    ("/api/generate", {"prompt": "x", "raw": True, "options": {"num_predict": 3}, "stream": False}),
    ("/api/show", {"model": "tiny"}),
    ("/tokenize", {"content": "abc", "with_pieces": True}),
    ("/tokenize", {"messages": SHORT["messages"], "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
]
WORDS = st.sampled_from(
    ["", "a", "auto", "none", "user", "assistant", "text", "function", "type", "object", "$ref", "\ud800", "\0"]
)
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=8)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def server():
    pair = make_templated_pair()
    worker = Worker(pair, max_queue=200, width=3)
    limits = Limits(body_bytes=100_000, body_seconds=1.0, answer_seconds=20.0)
    with running(worker, pair=pair, names=("tiny",), limits=limits) as found:
        found.service.defaults = Defaults(max_tokens=5)
        yield found


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, timeout=30) as found:
        yield found


@st.composite
def requests(draw: Any) -> tuple[str, str]:
    """A route and a body: a good one with a few things changed, left out or added."""
    route, body = draw(st.sampled_from(BODIES))
    holder = {"body": copy.deepcopy(body)}
    for _ in range(draw(st.integers(0, 4))):
        path = draw(st.sampled_from(paths_in(holder)[1:] or [("body",)]))
        place: Any = holder
        for key in path[:-1]:
            place = place[key]
        action = draw(st.sampled_from(["change", "change", "drop", "add"]))
        if action == "drop" and len(path) > 1:
            del place[path[-1]]
        elif action == "add" and isinstance(place[path[-1]], dict):
            place[path[-1]][draw(WORDS)] = draw(VALUES)
        else:
            place[path[-1]] = draw(VALUES)
        holder.setdefault("body", {})
    return route, json.dumps(holder["body"])


@FUZZ
@given(request=requests())
def test_bodies(client: httpx.Client, request: tuple[str, str]) -> None:
    route, body = request
    answer = client.post(route, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404), (route, body, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error if route.startswith("/api/") else error["message"]
    elif answer.headers["content-type"] == "application/x-ndjson":
        assert '"error":' not in answer.text, (route, body, answer.text)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert '"error":{' not in answer.text, (route, body, answer.text)
    else:
        assert "error" not in answer.json() or answer.json()["error"] is None


HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
PIECES = [
    b"\r\n",
    b"\0",
    b": ",
    b"\xff\xfe",
    b"HTTP/9.9",
    b"Host: evil\r\n",
    b"Origin: null\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Content-Length: 9999999999999\r\n",
    b"Content-Length: -1\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\n",
    b"Connection: close\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"x" * 70_000,
]
JUNK = st.binary(max_size=12) | st.sampled_from(PIECES)


@st.composite
def nearly_http(draw: Any) -> bytes:
    """A request with bytes put in, taken out or replaced."""
    body = json.dumps(draw(st.sampled_from([SHORT, {}, [], "x"]))).encode()
    raw = HEAD % len(body) + body
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(raw)))
        end = min(len(raw), start + draw(st.sampled_from([0, 0, 1, 5, 1000])))
        raw = raw[:start] + draw(JUNK) + raw[end:]
    return raw


@FUZZ
@given(raw=nearly_http())
def test_bytes(server: Any, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        answer = b""
        try:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                answer += chunk
        except TimeoutError:
            raise
        except OSError:
            pass  # it may refuse and close before it has read everything
    for line in answer.split(b"\r\n"):
        if line.startswith(b"HTTP/"):
            assert line[:10] in (b"HTTP/1.1 1", b"HTTP/1.1 2", b"HTTP/1.1 4"), (raw, answer)


def test_it_still_answers(client: httpx.Client) -> None:
    """Runs last: after all that, a plain request is answered, and nothing is left running."""
    assert client.post("/v1/chat/completions", json=SHORT).status_code == 200
    found = client.get("/health").json()
    assert (found["status"], found["active"], found["queued"]) == ("ok", 0, 0)
