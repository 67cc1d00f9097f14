"""A server as a contestant, against one on loopback that speaks OpenAI's protocol."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dflash_mlx.bench.load import run_load
from dflash_mlx.bench.run import time_answer
from dflash_mlx.bench.server_client import Server, connect
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.sampling import SamplingParams


class Fake(ThreadingHTTPServer):
    """Streams `pieces`. asked: the bodies; keys: the Authorization headers."""

    models: list[str]
    pieces: list[dict[str, Any]]
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models, self.asked, self.keys = ["a-model"], [], []  # type: ignore[var-annotated]
        self.pieces = [content("one "), content("two"), {"choices": [], "usage": usage(5, 3)}]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def content(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": None} | more]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": 2}}


class _Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": name} for name in self.server.models]}))

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.keys.append(self.headers.get("Authorization"))
        events = [json.dumps(piece) for piece in self.server.pieces]
        self._send("".join(f"data: {event}\n\n" for event in events) + ": a comment\n\ndata: [DONE]\n\n")

    def _send(self, body: str) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def server_of(fake: Fake, **more: Any) -> Server:
    return connect(fake.url, model=None, encode=words, **more)


def test_an_answer_is_timed_and_counted_as_the_server_counts(fake: Fake) -> None:
    server = server_of(fake, key="secret")
    assert (server.model, server.url, server.local) == ("a-model", f"{fake.url}/v1", True)
    params = SamplingParams(max_tokens=9, temperature=0.0, top_k=4)
    run = time_answer(server, [{"role": "user", "content": "hi"}], params)
    assert (run.text, run.token_ids, run.ids_from_text) == ("one two", [3, 3], True)
    assert (run.prompt_tokens, run.cached_tokens, run.decode_tokens) == (5, 2, 2)
    assert 0 < run.first_s <= run.wall_s
    assert (run.acceptance, run.rounds, run.peak_memory_gb) == (None, [], None)
    [asked] = fake.asked
    assert asked["messages"] == [{"role": "user", "content": "hi"}]
    assert (asked["max_tokens"], asked["temperature"], asked["top_k"], asked["stream"]) == (9, 0.0, 4, True)
    assert "min_p" not in asked
    assert "seed" not in asked
    assert fake.keys == ["Bearer secret"]


def test_thoughts_are_a_part_of_the_answer(fake: Fake) -> None:
    fake.pieces = [{"choices": [{"delta": {"reasoning_content": "hm "}}]}, content("yes", finish_reason="length")]
    run = time_answer(server_of(fake), [{"role": "user", "content": "hi"}], SamplingParams())
    assert (run.text, run.finish_reason, run.token_ids) == ("hm yes", "length", [2, 3])


def test_streams_share_the_requests(fake: Fake) -> None:
    found = run_load(server_of(fake), [f"prompt {n}" for n in range(6)], SamplingParams(), streams=3)
    assert (found.streams, found.requests, found.tokens) == (3, 6, 18)
    assert len(found.first_s) == 6
    assert {body["messages"][0]["content"] for body in fake.asked} == {f"prompt {n}" for n in range(6)}


def test_what_goes_wrong_is_told_in_a_line(fake: Fake) -> None:
    server = server_of(fake)
    fake.pieces = [content("one"), {"error": {"message": "out of memory"}}]
    with pytest.raises(DFlashError, match=r"reports: .*out of memory"):
        list(server.answer([{"role": "user", "content": "hi"}], SamplingParams()))
    with pytest.raises(DFlashError, match="out of memory"):
        run_load(server, ["a", "b", "c", "d"], SamplingParams(), streams=2)
    fake.status = 503
    with pytest.raises(DFlashError, match="answered with status 503"):
        list(server.answer([{"role": "user", "content": "hi"}], SamplingParams()))
    with pytest.raises(UsageError, match="expected the address of a server"):
        connect("ftp://x", model="m", encode=words)
    with pytest.raises(DFlashError, match="Is the server running there"):
        connect("http://127.0.0.1:9", model=None, encode=words)


def test_several_models_need_a_name(fake: Fake) -> None:
    fake.models = ["a", "b"]
    with pytest.raises(UsageError, match=r"lists 2 models \(a, b\)\. Say which one with --against-model"):
        server_of(fake)
    assert server_of(fake, likely=("b",)).model == "b"
    fake.models = ["/models/b", "c"]
    assert server_of(fake, likely=("b",)).model == "/models/b"
    assert connect(fake.url.removeprefix("http://"), model="b", encode=words).model == "b"
