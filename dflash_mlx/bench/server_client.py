"""A server with OpenAI's protocol as a contestant: mlx_lm.server, LM Studio, Ollama, vLLM, or this project's own."""

import http.client
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dflash_mlx.bench.load import Arrival
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.generation import GenerationResponse, Prompt
from dflash_mlx.sampling import SamplingParams

_SECONDS = 600.0  # without a word from the server
_NAME_IT = "Say which one with --against-model NAME; mlx_lm.server calls the one it was started with default_model."
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class _Piece:
    """A piece of a streamed answer. The last one may carry the totals."""

    text: str
    finish_reason: str | None
    usage: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server. encode: the pair's tokenizer, by which its texts are compared with other contestants' tokens.

    url: up to and with /v1. model: as the server calls it.
    """

    name: str
    url: str
    model: str
    encode: Callable[[str], list[int]]
    key: str | None = None

    @property
    def words(self) -> str:
        return f"the server at {self.url}, model {self.model}; its text is compared by this pair's tokenizer"

    @property
    def local(self) -> bool:
        """Whether it runs on this machine, so that this machine's energy is its own."""
        return urlsplit(self.url).hostname in _LOOPBACK

    def answer(self, prompt: Prompt, params: SamplingParams) -> Iterator[GenerationResponse]:
        text, finish = "", None
        usage: dict[str, Any] = {}
        for piece in self._pieces(prompt, params):
            finish = piece.finish_reason or finish
            usage = piece.usage or usage
            if piece.text:
                text += piece.text
                yield GenerationResponse(text=piece.text, token_ids=[], prompt_tokens=0, mode="plain")
        token_ids = self.encode(text)
        details = usage.get("prompt_tokens_details") or {}
        yield GenerationResponse(
            text="",
            token_ids=token_ids,
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            cached_tokens=int(details.get("cached_tokens") or 0),
            mode="plain",
            generation_tokens=int(usage.get("completion_tokens") or len(token_ids)),
            finish_reason="length" if finish == "length" else "stop",
        )

    def answer_many(self, prompts: Sequence[Prompt], params: SamplingParams, streams: int) -> Iterator[Arrival]:
        """Each stream sends its next request when its last one has been answered."""
        waiting: queue.Queue[int] = queue.Queue()
        for index in range(len(prompts)):
            waiting.put(index)
        found: queue.Queue[Arrival | Exception | None] = queue.Queue()
        threads = [
            threading.Thread(target=self._stream, args=(prompts, params, waiting, found), daemon=True)
            for _ in range(streams)
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            while (item := found.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item

    def _stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        waiting: "queue.Queue[int]",
        found: "queue.Queue[Arrival | Exception | None]",
    ) -> None:
        try:
            while True:
                try:
                    index = waiting.get_nowait()
                except queue.Empty:
                    break
                sent, tokens, usage = time.perf_counter(), 0, 0
                for piece in self._pieces(prompts[index], params):
                    usage = int((piece.usage or {}).get("completion_tokens") or usage)
                    if piece.text:
                        count = max(1, len(self.encode(piece.text)))
                        tokens += count
                        found.put(Arrival(index, time.perf_counter(), count, False, sent))
                # Pieces are counted by a tokenizer that may cut them otherwise; the server's own count is right.
                found.put(Arrival(index, time.perf_counter(), usage - tokens if usage else 0, True, sent))
        except Exception as error:
            found.put(error)
        found.put(None)

    def _pieces(self, prompt: Prompt, params: SamplingParams) -> Iterator[_Piece]:
        body = {
            "model": self.model,
            "messages": prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # Not of OpenAI's protocol, so left out where they say nothing.
        extra = {"top_k": params.top_k or None, "min_p": params.min_p or None, "seed": params.seed}
        body |= {name: value for name, value in extra.items() if value is not None}
        connection, answer = _request(self.url, "POST", "/chat/completions", body=body, key=self.key)
        try:
            yield from map(_piece, _events(answer, self.url))
        except (OSError, http.client.HTTPException) as error:
            raise DFlashError(f"{self.url} stopped answering: {error!r}. Is the server still running?") from error
        finally:
            connection.close()


def connect(
    url: str,
    *,
    model: str | None,
    encode: Callable[[str], list[int]],
    key: str | None = None,
    likely: Sequence[str] = (),
) -> Server:
    """The server at `url`, and the model that it serves. Raises UsageError and DFlashError.

    likely: names by which the model is taken from several.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--against {url}: expected the address of a server, such as http://127.0.0.1:8080.")
    path = parts.path.rstrip("/")
    base = f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else path + '/v1'}"
    return Server(name=parts.netloc, url=base, model=model or _its_model(base, key, likely), encode=encode, key=key)


def _its_model(url: str, key: str | None, likely: Sequence[str]) -> str:
    """The one that the server lists, or the one of several that is likely meant."""
    connection, answer = _request(url, "GET", "/models", key=key)
    try:
        listed = json.loads(answer.read())
        names = [str(entry["id"]) for entry in listed["data"]]
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise DFlashError(f"{url}/models should list models; {error!r}. {_NAME_IT}") from error
    finally:
        connection.close()
    meant = [name for name in names if name.rstrip("/").rpartition("/")[2] in likely]
    if len(names) != 1 and not meant:
        found = ", ".join(names[:8]) if names else "none"
        raise UsageError(f"{url} lists {len(names)} models ({found}). {_NAME_IT}")
    return (meant or names)[0]


def _request(
    url: str, method: str, path: str, *, body: Any = None, key: str | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """An answer with status 200. Raises DFlashError with what the server says otherwise."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=_SECONDS)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request(method, parts.path + path, json.dumps(body) if body is not None else None, headers)
        answer = connection.getresponse()
        if answer.status == 200:
            return connection, answer
        said = answer.read(2000).decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        hint = _NAME_IT if path == "/models" and not isinstance(error, ConnectionRefusedError) else ""
        raise DFlashError(f"no answer from {url}{path}: {error}. {hint or 'Is the server running there?'}") from error
    connection.close()
    raise DFlashError(f"{url}{path} answered with status {answer.status}: {' '.join(said.split())[:300]}")


def _events(answer: http.client.HTTPResponse, url: str) -> Iterator[Any]:
    """The objects of a stream of server-sent events."""
    while line := answer.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise DFlashError(f"{url} sent what is no JSON: {data[:80]!r}") from error
        if isinstance(event, dict) and event.get("error"):
            raise DFlashError(f"{url} reports: {str(event['error'])[:300]}")
        yield event


def _piece(event: Any) -> _Piece:
    choices = event.get("choices") or [{}]
    delta = choices[0].get("delta") or {}
    # Thinking models send their thoughts under a name of their own; they take as long as other text.
    text = "".join(str(delta.get(part) or "") for part in ("reasoning_content", "reasoning", "content"))
    return _Piece(text, choices[0].get("finish_reason"), event.get("usage"))
