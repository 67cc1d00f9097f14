"""A Hugging Face Hub on loopback: the routes that the client uses, real small files, and faults on order."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


@dataclass
class FakeHub:
    """`repos`: "owner/name" -> file name -> bytes. Faults are used up as they happen, unless they say otherwise."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: dict[str, str] = field(default_factory=dict)  # of "main", COMMIT unless given
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    answers: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)  # regex on "METHOD path" -> for ever
    cuts: dict[str, list[int]] = field(default_factory=dict)  # file -> bytes to send before the line breaks, a GET each
    flips: dict[str, int] = field(default_factory=dict)  # file -> GETs that send a wrong byte
    hangs: dict[str, int] = field(default_factory=dict)  # file -> bytes after which GETs send nothing more, for ever
    seconds_a_chunk: float = 0.0
    log: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    url: str = ""
    stopped: threading.Event = field(default_factory=threading.Event)

    def commit(self, repo: str) -> str:
        return self.commits.get(repo, COMMIT)

    def gets(self, name: str) -> list[str | None]:
        """The Range of each GET of a file."""
        return [ranges for method, path, ranges in self.log if method == "GET" and path.endswith(f"/{name}")]

    def env(self, home: Path) -> dict[str, str]:
        """Environment that lets a process use this Hub, with its cache under `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "DFLASH_MLX_HOME": str(home / "dflash-mlx"),
            "HOME": str(home),
        }


@contextmanager
def serve() -> Iterator[FakeHub]:
    """A running Hub without models."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.stopped.set()
        server.shutdown()
        server.server_close()


def etag(name: str, content: bytes) -> str:
    """As the Hub has it: SHA-256 for large files, git's hash for small ones."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            hub.log.append((self.command, path, self.headers.get("Range")))
            for pattern, (status, headers) in list(hub.answers.items()):
                if re.search(pattern, f"{self.command} {path}"):
                    return self._send(status, headers)
            if api := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                return self._model_info(api[1], api[2] or "main")
            if file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self._file(file[1], file[2], file[3], body=body)
            return self._send(404, {})

        def _known(self, repo: str, revision: str) -> bool:
            if repo not in hub.repos:
                self._send(404, {"X-Error-Code": "RepoNotFound"})
            elif revision not in ("main", "v1", COMMIT, OLD_COMMIT):
                self._send(404, {"X-Error-Code": "RevisionNotFound"})
            else:
                return True
            return False

        def _model_info(self, repo: str, revision: str) -> None:
            if not self._known(repo, revision):
                return
            siblings = []
            for name, content in hub.repos[repo].items():
                lfs = {"sha256": etag(name, content), "size": len(content), "pointerSize": 100}
                entry = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
                siblings.append({**entry, "lfs": lfs} if name.endswith(".safetensors") else entry)
            info = {"id": repo, "modelId": repo, "sha": hub.commit(repo), "siblings": siblings, "tags": []}
            content = json.dumps({**info, "cardData": hub.cards.get(repo, {})}).encode()
            self._send(200, {"Content-Type": "application/json"}, content)

        def _file(self, repo: str, revision: str, name: str, *, body: bool) -> None:
            if not self._known(repo, revision):
                return
            if name not in hub.repos[repo]:
                self._send(404, {"X-Error-Code": "EntryNotFound"})
                return
            content = hub.repos[repo][name]
            mark = etag(name, content)
            headers = {"X-Repo-Commit": hub.commit(repo), "ETag": f'"{mark}"', "Accept-Ranges": "bytes"}
            headers |= {"X-Linked-Etag": f'"{mark}"', "X-Linked-Size": str(len(content))}
            start, status = 0, 200
            if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
                start, status = int(wanted[1]), 206
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            if not body:
                self._send(status, {**headers, "Content-Length": str(len(content) - start)})
                return
            if hub.flips.get(name, 0) > 0:
                hub.flips[name] -= 1
                content = content[:-1] + bytes([content[-1] ^ 1])
            self._stream(name, content[start:], {**headers, "Content-Length": str(len(content) - start)}, status)

        def _stream(self, name: str, content: bytes, headers: dict[str, str], status: int) -> None:
            """The body in small pieces, ended early where a cut or a hang was ordered."""
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            cut = hub.cuts[name].pop(0) if hub.cuts.get(name) else None
            end = min(x for x in (len(content), cut, hub.hangs.get(name)) if x is not None)
            for at in range(0, end, 4096):
                self.wfile.write(content[at : min(at + 4096, end)])
                self.wfile.flush()
                hub.stopped.wait(hub.seconds_a_chunk)
            if name in hub.hangs:
                hub.stopped.wait(30)
            if end < len(content):
                self.close_connection = True

        def _send(self, status: int, headers: dict[str, str], content: bytes = b"") -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def handle(self) -> None:
            with suppress(BrokenPipeError, ConnectionResetError):  # the client was killed, as tests do
                super().handle()

    return Handler
