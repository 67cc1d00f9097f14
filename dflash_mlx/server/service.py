"""What all routes share: the pair, its worker, who may ask, the defaults, the figures."""

import asyncio
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dflash_mlx.decoding.constraint import Constraint, grammar_constraint, json_constraint
from dflash_mlx.pair import ModelPair
from dflash_mlx.server.answers import Answers, Order, submit
from dflash_mlx.server.failures import RequestError, failure
from dflash_mlx.server.fields import Fields, parse_object
from dflash_mlx.server.metrics import Metrics
from dflash_mlx.server.parameters import Defaults
from dflash_mlx.server.streaming import ClientGoneError
from dflash_mlx.server.vocabulary import Vocabulary
from dflash_mlx.server.worker import Worker

T = TypeVar("T")

IGNORED_HEADER = "x-dflash-ignored"
_IGNORED, _EXPECTED = "dflash.ignored", "dflash.expected"  # in a request's scope
_MOST_WARNED = 1000  # names that the log has; clients can make up any number


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on a request, in bytes and seconds; `answer_seconds` 0 is no bound."""

    body_bytes: int = 8 * 2**20
    body_seconds: float = 30.0
    answer_seconds: float = 3600.0


@dataclass
class Service:
    """The server's state. `names` are the model names a request may use, the first of them its own."""

    pair: ModelPair
    worker: Worker
    names: tuple[str, ...]
    defaults: Defaults = field(default_factory=Defaults)
    limits: Limits = field(default_factory=Limits)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.vocabulary = Vocabulary(self.pair.tokenizer)
        self.eos_ids = self.pair.eos_ids
        self._warned: set[str] = set()
        # One thread: tokenizers are not made for several at once, and a long text must not hold up the others' streams.
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dflash-tokenizing")

    def close(self) -> None:
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    @property
    def vocab_size(self) -> int:
        return int(self.pair.target.vocab_size)

    async def tokenizing(self, work: Callable[[], T]) -> T:
        """Run what uses the tokenizer or builds grammars, away from the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    async def constraint(self, schema: dict[str, Any] | None) -> Constraint:
        return await self.tokenizing(lambda: json_constraint(self.pair, schema))

    async def grammar(self, lark: str) -> Constraint:
        return await self.tokenizing(lambda: grammar_constraint(self.pair, lark))

    def check_model(self, name: str | None) -> str:
        """The model name to answer with. Only what was loaded at the start is ever served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise RequestError(
                f"the model {name[:120]!r} is not served here; this server has {self.names[0]!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name

    def submit(self, order: Order, request: Request) -> Answers:
        answers = submit(
            self.worker,
            order,
            owner=request.scope.get("dflash.owner", ""),
            vocabulary=self.vocabulary,
            eos_ids=self.eos_ids,
            timeout=self.limits.answer_seconds,
        )
        self.settle(request)
        return answers

    def settle(self, request: Request) -> None:
        """The worker need not expect this request any more: it has submitted its jobs, or has none."""
        if request.scope.pop(_EXPECTED, False):
            self.worker.expect(-1)

    def report(self, error: BaseException) -> None:
        """Write an unexpected error to the server's log; clients do not see what it says."""
        if failure(error).status == 500:
            print("error: a request failed unexpectedly:", file=sys.stderr)
            traceback.print_exception(error, file=sys.stderr)

    def observe(self, answers: Answers) -> None:
        """Count finished answers."""
        for answer in answers.all:
            ticket = answer.ticket
            if ticket.queued_seconds is not None:
                self.metrics.queued_seconds.observe(ticket.queued_seconds)
            if ticket.first_token_seconds is not None:
                self.metrics.first_token_seconds.observe(ticket.first_token_seconds)
            if answer.last is not None and answer.last.generation_tps > 0:
                self.metrics.tokens_a_second.observe(answer.last.generation_tps)

    async def read_fields(self, request: Request) -> Fields:
        """The request's JSON object; what it ignores is kept for `add_ignored`. Raises RequestError."""
        fields = Fields(await self.read_json(request))
        request.scope[_IGNORED] = fields.ignored
        request.scope[_EXPECTED] = True
        self.worker.expect(1)
        return fields

    def add_ignored(self, response: Response, request: Request) -> None:
        """Say in a header, and once in the log, which parts of a request changed nothing."""
        # A header must not end with a comma, as it would after a name without letters.
        names = [quote(name[:80], safe="._[]-") or '""' for name in request.scope.get(_IGNORED, ())]
        if not names:
            return
        response.headers[IGNORED_HEADER] = ", ".join(names)
        new = [name for name in names if name not in self._warned][: _MOST_WARNED - len(self._warned)]
        self._warned.update(new)
        if new:
            print(f"warning: ignored in a request to {request.scope['path']}: {', '.join(new)}", file=sys.stderr)

    async def read_json(self, request: Request) -> dict[str, Any]:
        """The request's JSON object, within the limits of size and time. Raises RequestError."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise RequestError(f"the content type should be application/json; got {kind[:60]!r}.", status=415)
        limit = self.limits.body_bytes
        too_large = RequestError(f"the body is larger than {limit} bytes; send less.", status=413)
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise too_large

        async def read() -> bytes:
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
            return bytes(body)

        try:
            body = await asyncio.wait_for(read(), self.limits.body_seconds)
        except ClientDisconnect:
            raise ClientGoneError from None
        except asyncio.TimeoutError:
            raise RequestError("the body did not arrive in time.", status=408) from None
        return parse_object(body)


def served_name(pair: ModelPair) -> str:
    """The name clients see: a folder's path stays here, only its last part is shown."""
    return Path(pair.name).name if Path(pair.name).exists() else pair.name
