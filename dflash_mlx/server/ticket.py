"""What is asked of the worker, and what the asker holds while it is made: `Job` and `Ticket`."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from dflash_mlx.decoding.constraint import Constraint
from dflash_mlx.errors import DFlashError
from dflash_mlx.generation import GenerationResponse
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.scoring import ScoredToken


class QueueFullError(DFlashError):
    """Too many requests are waiting; `retry_after` is a guess, in whole seconds, of when there will be room."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after} s.")
        self.retry_after = retry_after


class TooLargeError(DFlashError):
    """A request that would not fit in memory. Nothing was started."""


class WorkerClosedError(DFlashError):
    """The server is shutting down, or its worker has failed."""

    def __init__(self, failure: str | None = None) -> None:
        super().__init__(
            f"the server's worker has failed ({failure}); restart the server."
            if failure
            else "the server is shutting down; try again later."
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One answer to make: prompt is token ids; caches are never shared between owners.

    continues: the answer goes on in the prompt's text, so that a space at its beginning is shown. prompt_logprobs: how
    many alternatives to report with the log-probability of each token of the prompt; None: report nothing.
    only_prompt: nothing is to be written.
    """

    prompt: list[int]
    params: SamplingParams
    draft: bool = True
    constraint: Constraint | None = None
    owner: str = ""
    continues: bool = False
    prompt_logprobs: int | None = None
    only_prompt: bool = False


class Ticket:
    """The answer to a job as it is made: an async iterator of responses, one a round, the last with a finish_reason.

    The worker's thread puts responses in; any event loop takes them out. An error of the job is raised in their place.
    Those of a prompt that was to be scored are in `prompt_logprobs` before the first response comes: of all its tokens
    but the first.
    """

    def __init__(self, job: Job, on_cancel: Callable[["Ticket"], None]) -> None:
        self.job = job
        self.submitted_at = time.perf_counter()
        self.queued_seconds: float | None = None
        self.first_token_seconds: float | None = None
        self.prompt_logprobs: list[ScoredToken] = []
        self._on_cancel = on_cancel
        self._lock = threading.Lock()
        self._items: deque[GenerationResponse] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._cancelled = False
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def __aiter__(self) -> "Ticket":
        return self

    async def __anext__(self) -> GenerationResponse:
        """The next response. For one consumer at a time."""
        while True:
            with self._lock:
                if self._items:
                    return self._items.popleft()
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                if self._ended:
                    raise StopAsyncIteration
                loop = asyncio.get_running_loop()
                future = loop.create_future()
                self._waiter = (loop, future)
            await future

    def cancel(self) -> None:
        """Stop at the next round or prefill chunk. From any thread, any number of times, also after the end."""
        with self._lock:
            if self._ended or self._cancelled:
                return
            self._cancelled = True
        self._on_cancel(self)

    async def aclose(self) -> None:
        self.cancel()

    # The worker's side.

    def put(self, response: GenerationResponse) -> None:
        """Hand over a response; the one with a finish_reason is the last."""
        with self._lock:
            if not self._ended:
                self._items.append(response)
                self._ended = response.finish_reason is not None
            self._wake()

    def end(self, error: BaseException | None = None) -> None:
        """No more will come, and why."""
        with self._lock:
            if not self._ended:
                self._ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        """Let the consumer look again. Called with the lock held."""
        if self._waiter is None:
            return
        (loop, future), self._waiter = self._waiter, None
        with contextlib.suppress(RuntimeError):  # Raised by a closed loop: then nobody is left to tell.
            loop.call_soon_threadsafe(_set_done, future)


def _set_done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
