"""Keys and tokens are in no log, no metric and no error, whatever a client sends and at whatever level is logged."""

import base64
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fake_hub
import httpx
import pytest
from test_security import ASKED, BODY, ROUTES
from tiny_folder import write_target

from dflash_mlx.server.security import Policy

KEY, OTHER_KEY, WRONG_KEY = "right-key-5f1d", "other-key-77ab", "wrong-key-c0de"
TOKEN = "hf_token0f0the0user"
BASIC = base64.b64encode(f"user:{KEY}".encode()).decode()
SECRETS = (KEY, OTHER_KEY, WRONG_KEY, TOKEN, BASIC, str(Policy(keys=(KEY,)).owner(KEY)))
MODEL = "me/tiny"

# The command as it is typed, but with all that libraries log, and with a route that fails unexpectedly.
PROGRAM = """
import logging, sys
logging.basicConfig(level=logging.DEBUG)
from dflash_mlx.cli.app import main
from dflash_mlx.server import app
async def broken(service, request):
    raise KeyError("a mistake of ours")
app.count_tokens = broken
sys.exit(main(sys.argv[1:]))
"""


@dataclass
class Serving:
    """A server in a process of its own. `seen`: all that clients were told."""

    process: "subprocess.Popen[bytes]"
    log: Path
    url: str = ""
    seen: list[str] = field(default_factory=list)
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=60))

    def wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"listening on (\S+)", self.text())):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.url = found[1]

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def ask(self, method: str, path: str, **request: object) -> int:
        answer = self.client.request(method, self.url + path, **request)  # type: ignore[arg-type]
        self.seen.append(f"{answer.headers} {answer.text}")
        return answer.status_code

    def send(self, raw: bytes) -> None:
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                self.seen.append(piece.decode("latin-1"))


def start(tmp_path: Path, model: str, hub: fake_hub.FakeHub) -> Serving:
    log = tmp_path / "log"
    words = ["serve", "--model", model, "--no-draft", "--port", "0", "--access-log", "--api-key", KEY, "--debug"]
    secrets = {"HF_TOKEN": TOKEN, "HF_DEBUG": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words, "--api-key", OTHER_KEY],
            env={**os.environ, **hub.env(tmp_path / "home"), **secrets},
            stdout=out,
            stderr=out,
        )
    return Serving(process, log)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[fake_hub.FakeHub]:
    folder = write_target(tmp_path / "target")
    with fake_hub.serve() as found:
        found.repos[MODEL] = {path.name: path.read_bytes() for path in folder.iterdir()}
        yield found


@pytest.fixture
def serving(tmp_path: Path, hub: fake_hub.FakeHub) -> Iterator[Serving]:
    found = start(tmp_path, MODEL, hub)
    try:
        found.wait_until_it_listens()
        yield found
    finally:
        found.client.close()
        found.process.kill()
        found.process.wait()


def check(text: str) -> None:
    found = [(secret, text[max(0, at - 200) : at + 80]) for secret in SECRETS if (at := text.find(secret)) >= 0]
    assert not found


def test_no_secret_is_told_or_logged(serving: Serving) -> None:
    named = [{"Authorization": "Bearer {}"}, {"x-api-key": "{}"}]
    elsewhere = [{"Cookie": "key={}"}, {"Referer": "http://localhost/?key={}"}, {"User-Agent": "{}"}, {"X-Key": "{}"}]
    wrong = [{"Authorization": "{}"}, {"Authorization": f"Basic {BASIC}"}, {"Proxy-Authorization": "Bearer {}"}]
    codes = set()
    for method, path in ROUTES:
        body = {**ASKED.get(path, BODY), "max_tokens": 2, "max_output_tokens": 2} if method == "POST" else None
        for key in (KEY, OTHER_KEY, WRONG_KEY):
            for headers in (*named, *elsewhere, *wrong):
                filled = {name: value.format(key) for name, value in headers.items()}
                codes.add(serving.ask(method, path, headers=filled, json=body))
            codes.add(serving.ask(method, path, params={"api_key": key, "key": key}, json=body))
            right = {"Authorization": f"Bearer {key}", "x-api-key": key}
            for content in ({"api_key": key}, {"messages": 1, "api_key": key}, [key]):
                codes.add(serving.ask(method, path, params={"key": key}, headers=right, json=content))
            codes.add(serving.ask(method, path, headers=right, content=f'{{"api_key": "{key}"'))
    assert codes >= {200, 400, 401, 404, 500}
    for line in (b"Bad Header", b"Content-Length: -1", b"Host: evil.example", b"Origin: http://evil.example"):
        serving.send(
            b"POST /v1/messages HTTP/1.1\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n" + line + b"\r\n\r\n"
        )
    assert serving.ask("GET", "/metrics", headers={"x-api-key": KEY}) == 200
    assert serving.ask("GET", "/health", headers={"x-api-key": KEY}) == 200
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(60) == 0
    text = serving.text()
    check(text)
    check("\n".join(serving.seen))
    assert "a mistake of ours" in text, "errors are logged"
    assert 'POST "/v1/chat/completions" 401' in text
    assert "DEBUG" in text
    assert MODEL in text


def test_no_secret_is_in_the_line_of_a_failed_start(tmp_path: Path, hub: fake_hub.FakeHub) -> None:
    hub.answers["GET /api/models/me/gated"] = (403, {"X-Error-Code": "GatedRepo"})
    for model in ("me/none", "me/gated"):
        failed = start(tmp_path, model, hub)
        assert failed.process.wait(120) == 1
        assert "error: " in failed.text()
        check(failed.text())
