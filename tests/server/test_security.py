"""Who may ask: keys, Host and Origin, sizes and times; and what /health and /metrics tell."""

import asyncio
import contextlib
import json
import socket
import time

import httpx
import pytest
from fakes import FakePair, FakeTokenizer, FakeWorker, running

from dflash_mlx.server import run
from dflash_mlx.server.app import create_app
from dflash_mlx.server.health import STALLED_SECONDS
from dflash_mlx.server.security import Policy, is_loopback, own_names
from dflash_mlx.server.service import Limits, Service

BODY = {"messages": [{"role": "user", "content": "Hi"}]}
ASKED = {
    "/v1/chat/completions": BODY | {"max_tokens": 100},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": BODY | {"max_tokens": 100},
    "/v1/responses": {"input": "Hi"},
}
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/metrics"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("GET", "/nowhere"),
]


def test_every_route_but_health_needs_the_key():
    with running(policy=Policy(keys=("right", "also right"))) as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        wrong = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic right"}, {"x-api-key": "righ"}]
        for method, path in ROUTES:
            for headers in [*wrong, {"Authorization": "Bearer"}, {"x-api-key": ""}]:
                answer = client.request(method, path, headers=headers, json=BODY)
                assert answer.status_code == 401, (method, path, headers)
                error = answer.json()["error"]
                assert error["type"] == "authentication_error"
                assert ("type" in answer.json()) == path.startswith("/v1/messages"), "each protocol has its own shape"
        right = [{"Authorization": "Bearer right"}, {"x-api-key": "also right"}, {"Authorization": "bearer right"}]
        for headers in right:
            assert client.post("/v1/chat/completions", headers=headers, json=BODY).status_code == 200


def test_each_key_has_an_owner_of_its_own():
    with running(policy=Policy(keys=("one", "two"))) as server, httpx.Client(base_url=server.url) as client:
        for key in ("one", "two", "one"):
            client.post("/v1/chat/completions", headers={"x-api-key": key}, json=BODY)
        owners = [job.owner for job in server.worker.jobs]
        assert owners[0] == owners[2] != owners[1]
        assert not any("one" in owner or not owner for owner in owners), "the key itself goes no further"


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8080", True),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("app.localhost:3000", True),
        ("[::1]:8080", True),
        ("192.168.1.7", True),
        ("my-mac.local:8080", True),
        ("evil.example", False),
        ("evil.example:8080", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost@evil.example", False),
        ("", False),
        ("[::1", False),
        ("localhost:port", False),
    ],
)
def test_hosts(host, allowed):
    assert Policy(hosts=("my-mac.local",)).allows_host(host) is allowed


def test_a_rebound_name_is_refused():
    with running() as server, httpx.Client(base_url=server.url) as client:
        for path in ("/health", "/v1/models"):
            answer = client.get(path, headers={"Host": "evil.example"})
            assert answer.status_code == 403
            assert "--allowed-host evil.example" in answer.json()["error"]["message"]


def test_web_pages_need_permission():
    page = {"Origin": "http://page.example"}
    preflight = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    with running() as server, httpx.Client(base_url=server.url) as client:
        assert client.post("/v1/chat/completions", headers=page, json=BODY).status_code == 403
        assert client.options("/v1/chat/completions", headers=preflight).status_code == 403
        assert client.post("/v1/chat/completions", headers={"Origin": "null"}, json=BODY).status_code == 403
        own = client.post("/v1/chat/completions", headers={"Origin": server.url}, json=BODY)
        assert own.status_code == 200
        assert client.post("/v1/chat/completions", json=BODY).headers.get("access-control-allow-origin") is None
    policy = Policy(keys=("k",), origins=("http://page.example",))
    with running(policy=policy) as server, httpx.Client(base_url=server.url) as client:
        answer = client.options("/v1/chat/completions", headers=preflight)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        assert answer.headers["access-control-allow-headers"] == "content-type"
        answer = client.post("/v1/chat/completions", headers={**page, "x-api-key": "k"}, json=BODY)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "http://page.example")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        refused = client.post("/v1/chat/completions", headers=page, json=BODY)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://page.example")
        assert client.get("/v1/models", headers={"Origin": "http://other.example"}).status_code == 403


def test_bodies_have_a_size_a_type_and_a_time():
    limits = Limits(body_bytes=2000, body_seconds=0.3)
    with running(limits=limits) as server, httpx.Client(base_url=server.url) as client:
        large = {"messages": [{"role": "user", "content": "x" * 3000}]}
        assert client.post("/v1/chat/completions", json=large).status_code == 413

        def chunks():
            for _ in range(50):
                yield b"x" * 100

        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/chat/completions", content=chunks(), headers=headers).status_code == 413
        assert client.post("/v1/chat/completions", data={"a": "b"}).status_code == 415
        with socket.create_connection(("127.0.0.1", server.port)) as slow:
            slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            slow.settimeout(30)
            assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_headers_have_a_size_and_a_time(monkeypatch):
    monkeypatch.setattr(run, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(run, "IDLE_SECONDS", 0.3)
    with running() as server:
        for begin in (b"", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"):
            with socket.create_connection(("127.0.0.1", server.port)) as slow:
                slow.sendall(begin)
                slow.settimeout(30)
                while slow.recv(1000):
                    pass  # the server closes the connection; a timeout would fail the test
        with socket.create_connection(("127.0.0.1", server.port)) as large:
            large.settimeout(30)
            large.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 2 * run.HEADER_BYTES)
            assert large.recv(100).startswith(b"HTTP/1.1 4")
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_answers_have_a_time():
    with running(FakeWorker(delay=0.2), limits=Limits(answer_seconds=0.3)) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
        assert server.worker.cancelled == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_a_client_that_leaves_frees_its_slot(path, stream):
    body = {**ASKED[path], "stream": stream}
    with running(FakeWorker(script=lambda job: "word " * 60, size=1, delay=0.05)) as server:
        for count in range(1, 4):  # a race would not show each time
            with httpx.Client(timeout=httpx.Timeout(30, read=30 if stream else 0.4)) as client:
                if stream:
                    with client.stream("POST", server.url + path, json=body) as answer:
                        next(line for line in answer.iter_lines() if '"w"' in line)
                else:
                    with pytest.raises(httpx.ReadTimeout):
                        client.post(server.url + path, json=body)
            deadline = time.monotonic() + 30  # by then the answer would have ended, and not as cancelled
            while server.worker.running and time.monotonic() < deadline:
                time.sleep(0.01)
            assert (server.worker.cancelled, server.worker.running) == (count, 0)
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize("broken", [False, True], ids=["hangs up", "cannot be reached"])
@pytest.mark.parametrize("path", ASKED)
def test_a_client_that_leaves_before_the_first_event_frees_its_slot(path, broken):
    """The app alone, so that nothing is left to chance: the client goes as soon as its request is read, or not even the
    head of the answer can be sent."""
    worker = FakeWorker(script=lambda job: "word " * 60, size=1, delay=0.05)
    service = Service(pair=FakePair(), worker=worker, names=("fake",))  # type: ignore[arg-type]
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    arrived = iter([{"type": "http.request", "body": json.dumps({**ASKED[path], "stream": True}).encode()}])

    async def receive():
        return next(arrived, {"type": "http.disconnect"})

    async def send(message):
        if broken:
            raise OSError("the connection is lost")

    async def run():
        with contextlib.suppress(OSError):
            await create_app(service, Policy())(scope, receive, send)
        assert (len(worker.jobs), worker.cancelled) == (1, 1)
        deadline = time.monotonic() + 2
        while worker.running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert worker.running == 0

    asyncio.run(run())
    service.close()


def test_health_and_metrics():
    lines = []
    with running(access_log=lines.append) as server, httpx.Client(base_url=server.url) as client:
        found = client.get("/health").json()
        assert found == {
            "status": "ok",
            "ready": True,
            "model": "fake",
            "mode": "dflash",
            "seconds_since_progress": 0.0,
            "active": 0,
            "queued": 0,
        }
        client.post("/v1/chat/completions", json=BODY)
        client.get("/secret%0d%0apath")
        text = client.get("/metrics").text
        assert 'dflash_http_requests_total{route="/v1/chat/completions",status="200"} 1' in text
        assert 'dflash_http_requests_total{route="other",status="404"} 1' in text
        assert "dflash_first_token_seconds_count 1" in text
        assert 'dflash_accepted_total{position="2"} 1' in text
        assert "dflash_cache_hits_total 2" in text
        for line in text.splitlines():
            assert line.startswith("# ") or len(line.rsplit(" ", 1)) == 2
            assert line.startswith("# ") or float(line.rsplit(" ", 1)[1]) >= 0
        server.worker.stalled = STALLED_SECONDS + 1
        stuck = client.get("/health")
        assert (stuck.status_code, stuck.json()["status"]) == (503, "stalled")
    assert any('POST "/v1/chat/completions" 200' in line for line in lines)
    assert all("\n" not in line for line in lines)


def test_what_starlette_refuses_has_the_protocols_shape():
    with running() as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/nowhere").json()["error"]["type"] == "not_found_error"
        wrong = client.get("/v1/chat/completions")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert client.get("/v1/messages").json()["type"] == "error"


def test_addresses():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.7", "example.org")))
    assert own_names("127.0.0.1") == ("127.0.0.1",)
    assert socket.gethostname().lower() in own_names("0.0.0.0")


def test_a_model_without_a_template_takes_chats_but_no_tools():
    with running(pair=FakePair(FakeTokenizer(has_chat_template=False))) as server:
        assert httpx.post(f"{server.url}/v1/chat/completions", json=BODY).status_code == 200
        wrong = {**BODY, "chat_template_kwargs": {"enable_thinking": False}}
        assert httpx.post(f"{server.url}/v1/chat/completions", json=wrong).status_code == 400
