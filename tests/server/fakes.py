"""A worker that answers by a script, and a tokenizer whose tokens are characters: the protocols without a model."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
from mlx_lm.tool_parsers.json_tools import parse_tool_call

from dflash_mlx.decoding.logprobs import TokenLogprob
from dflash_mlx.decoding.stats import Acceptance
from dflash_mlx.errors import ContextError, PromptError
from dflash_mlx.generation import GenerationResponse
from dflash_mlx.server.app import create_app
from dflash_mlx.server.run import address_of, make_server, open_socket
from dflash_mlx.server.security import Policy
from dflash_mlx.server.service import Limits, Service
from dflash_mlx.server.status import CacheStatus, Totals, WorkerStatus
from dflash_mlx.server.worker import Job, QueueFullError, Ticket

EOS = 0
CONTEXT = 20_000


class Characters:
    """A detokenizer of one character a token."""

    def __init__(self) -> None:
        self.text, self._given = "", 0

    def add_token(self, token: int) -> None:
        self.text += chr(token)

    def finalize(self) -> None:
        pass

    @property
    def last_segment(self) -> str:
        segment, self._given = self.text[self._given :], len(self.text)
        return segment


@dataclass
class FakeTokenizer:
    has_thinking: bool = False
    has_tool_calling: bool = False
    has_chat_template: bool = True
    think_start: str = "<think>"
    think_end: str = "</think>"
    tool_call_start: str = "<tool_call>"
    tool_call_end: str = "</tool_call>"
    rendered: list[dict[str, Any]] = field(default_factory=list)

    def tool_parser(self, text: str, tools: Any) -> Any:
        return parse_tool_call(text, tools)

    @property
    def detokenizer(self) -> Characters:
        return Characters()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(token) for token in tokens)

    def get_vocab(self) -> dict[str, int]:
        return {}

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        enable_thinking: bool = True,
        **variables: Any,
    ) -> list[int]:
        self.rendered.append({"messages": messages, "tools": tools, **variables, "continue": continue_final_message})
        self.rendered[-1]["opened"] = add_generation_prompt
        if any(message["content"] == "refuse me" for message in messages):
            raise ValueError("roles must alternate")
        text = "".join(f"[{m['role']}]{m['content']}{json.dumps(m.get('tool_calls', ''))}\n" for m in messages)
        opened = add_generation_prompt and self.has_thinking and enable_thinking
        return self.encode(text + ("<think>\n" if opened else ""))


@dataclass
class FakePair:
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    name: str = "fake"
    target: Any = field(default_factory=lambda: SimpleNamespace(vocab_size=0x110000))
    eos_ids: frozenset[int] = frozenset({EOS})
    context_length: int = CONTEXT

    def encode_prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.tokenizer.encode("\n".join(m["content"] for m in messages))


@dataclass
class FakeWorker:
    """Answers with what `script` says, `size` characters a round, `delay` seconds apart, as the real one would."""

    script: Callable[[Job], str] = lambda job: "Hello there, world."
    size: int = 3
    delay: float = 0.0
    room: int = 1000
    error: Exception | None = None
    stalled: float = 0.0
    mode: str = "dflash"
    ready: bool = True
    jobs: list[Job] = field(default_factory=list)
    cancelled: int = 0
    running: int = 0
    expected: int = 0

    def start(self) -> None:
        pass

    def close(self, timeout: float = 5.0) -> None:
        pass

    def expect(self, more: int) -> None:
        self.expected += more
        assert self.expected >= 0

    def submit(self, job: Job) -> Ticket:
        if not job.prompt:
            raise PromptError("the prompt is empty; give at least one token of text.")
        if len(job.prompt) >= CONTEXT:
            raise ContextError(len(job.prompt), CONTEXT)
        if self.running >= self.room:
            raise QueueFullError(self.running, 7)
        self.jobs.append(job)
        self.running += 1
        ticket = Ticket(job, self._cancel)
        task = asyncio.get_running_loop().create_task(self._run(ticket))
        task.add_done_callback(lambda _: setattr(self, "running", self.running - 1))
        return ticket

    def _cancel(self, ticket: Ticket) -> None:
        self.cancelled += 1
        ticket.end()

    async def _run(self, ticket: Ticket) -> None:
        job = ticket.job
        text, finish, end = cut(self.script(job), job)
        ticket.queued_seconds = ticket.first_token_seconds = 0.01
        acceptance = Acceptance()
        tokens = [*map(ord, text + end), *([EOS] if finish == "stop" and not end else [])]
        starts = range(0, len(tokens), self.size)
        for start in starts:
            await asyncio.sleep(self.delay)
            if ticket.cancelled:
                return
            if self.error is not None and start:
                ticket.end(self.error)
                return
            some = tokens[start : start + self.size]
            acceptance.record(width=len(some), depth=len(some), num_accepted=len(some) - 1, tokens=len(some))
            top = tuple((ord(c), -1.0 - i) for i, c in enumerate("abc"))[: job.params.top_logprobs or 0]
            ticket.put(
                GenerationResponse(
                    text=text[start : start + self.size],
                    token_ids=some,
                    prompt_tokens=len(job.prompt),
                    mode="dflash" if job.draft else "plain",
                    cached_tokens=2,
                    generation_tokens=start + len(some),
                    generation_tps=50.0,
                    finish_reason=finish if start == starts[-1] else None,
                    acceptance=acceptance if job.draft else None,
                    num_accepted=len(some) - 1 if job.draft else None,
                    width=len(some) if job.draft else None,
                    depth=len(some) if job.draft else None,
                    logprobs=[TokenLogprob(t, -0.5, top) for t in some] if job.params.top_logprobs is not None else [],
                )
            )

    def status(self) -> WorkerStatus:
        cache = CacheStatus(entries=1, bytes=10, limit_bytes=100, hits=2, misses=3, evictions=4)
        totals = Totals(finished={"stop": 5}, drafted_by_position=[8, 6], accepted_by_position=[4, 1])
        return WorkerStatus(
            ready=self.ready,
            mode=self.mode,
            active=self.running,
            queued=0,
            seconds_since_progress=self.stalled,
            totals=totals,
            cache=cache,
            memory_active=1,
            memory_peak=2,
            memory_limit=3,
        )


def cut(text: str, job: Job) -> tuple[str, str, str]:
    """What an answer shows of a text, why it ends, and the stop string that ended it."""
    found = [(at, stop) for stop in job.params.stop if (at := text.find(stop)) >= 0]
    limit = job.params.max_tokens
    if found and (end := min(found))[0] + len(end[1]) <= limit:
        return text[: end[0]], "stop", end[1]
    return (text, "stop", "") if len(text) < limit else (text[:limit], "length", "")


@dataclass
class Running:
    """A server on loopback, in a thread."""

    url: str
    service: Service
    worker: Any
    port: int
    server: Any
    clients: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def openai(self, key: str = "none") -> openai.OpenAI:
        """A client that is closed with the server."""
        return self.clients.enter_context(openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0))

    def anthropic(self) -> anthropic.Anthropic:
        return self.clients.enter_context(anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0))

    @property
    def tokenizer(self) -> FakeTokenizer:
        return self.service.pair.tokenizer  # type: ignore[return-value]


@contextlib.contextmanager
def running(
    worker: Any = None,
    *,
    pair: Any = None,
    policy: Policy | None = None,
    limits: Limits | None = None,
    names: tuple[str, ...] = ("fake",),
    access_log: Callable[[str], None] | None = None,
) -> Iterator[Running]:
    """A real uvicorn on a free port of the loopback interface."""
    worker = worker or FakeWorker()
    service = Service(pair=pair or FakePair(), worker=worker, names=names, limits=limits or Limits())
    listener = open_socket("127.0.0.1", 0)
    ready = threading.Event()
    app = create_app(service, policy or Policy(), access_log=access_log)
    server = make_server(app, on_ready=ready.set, on_end=lambda: worker.close(0.2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    address, port = address_of(listener), listener.getsockname()[1]
    thread.start()
    assert ready.wait(60)
    found = Running(address, service, worker, port, server)
    try:
        yield found
    finally:
        found.clients.close()
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        assert not getattr(worker, "expected", 0), "each request has come to its end"
