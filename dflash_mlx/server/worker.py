"""The one thread that owns MLX: takes jobs from a queue and makes their answers in turn, a round of each at a time."""

import copy
import math
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.decoding.fork import can_cut, fork
from dflash_mlx.decoding.session import Session, common_prefix
from dflash_mlx.errors import PromptError, UsageError
from dflash_mlx.generation import GenerationResponse, fitting_max_tokens, generate_steps
from dflash_mlx.pair import ModelPair
from dflash_mlx.server.fair_queue import FairQueue
from dflash_mlx.server.memory import MemoryBudget, Need, total_need
from dflash_mlx.server.prefix_cache import PrefixCache
from dflash_mlx.server.status import Totals, WorkerStatus
from dflash_mlx.server.ticket import Job, QueueFullError, Ticket, TooLargeError, WorkerClosedError

__all__ = ["Job", "QueueFullError", "Ticket", "TooLargeError", "Worker", "WorkerClosedError", "WorkerStatus"]

# A prompt that another answer is just reading is waited for if that saves this many tokens.
_WORTH_WAITING = 64


@dataclass(eq=False)
class _Running:
    """A job whose answer is being made."""

    ticket: Ticket
    need: Need
    started_at: float
    session: Session | None = None
    steps: Generator[GenerationResponse | None, None, None] | None = None
    prefilling: bool = True

    @property
    def job(self) -> Job:
        return self.ticket.job


class Worker:
    """Answers jobs from any thread or event loop; nothing else may touch the pair's models while it runs.

    draft=False refuses to draft at all. max_queue: jobs that may wait beside those in progress, of which there are
    at most max_active. cache_bytes: for the prefix cache, by default half of what the models leave over. memory_bytes:
    what models, caches and answers may take, by default most of the machine's memory. width: drafts a round; None
    chooses by measured speed.
    """

    def __init__(
        self,
        pair: ModelPair,
        *,
        draft: bool = True,
        max_queue: int = 64,
        max_active: int = 4,
        cache_bytes: int | None = None,
        memory_bytes: int | None = None,
        width: int | None = None,
    ) -> None:
        self.pair = pair
        self.draft = draft and pair.drafter is not None
        self.max_queue, self.max_active, self.width = max_queue, max_active, width
        self._memory = MemoryBudget(pair, memory_bytes)
        self._cache_bytes = cache_bytes
        self._cache = PrefixCache(0)
        # Guards what follows; waited on for something to do.
        self._changed = threading.Condition()
        self._queue: FairQueue[Ticket] = FairQueue()
        self._active: list[_Running] = []
        self._totals = Totals()
        self._ready = False
        self._closing_at: float | None = None
        self._error: str | None = None
        self._progress_at = time.perf_counter()
        self._job_seconds = 1.0
        self._thread = threading.Thread(target=self._run, name="dflash-worker", daemon=True)
        # What is lazy so far belongs to this thread's streams, and no other thread could compute it.
        _evaluate(pair)

    def start(self) -> None:
        """Begin to work. Jobs may be submitted at once; `status().ready` tells when the models have run first."""
        self._thread.start()

    def close(self, timeout: float = 5.0) -> None:
        """Take no more jobs, let those in progress finish for up to `timeout` seconds, and cancel the rest."""
        with self._changed:
            if self._closing_at is None:
                self._closing_at = time.perf_counter() + timeout
            waiting = self._queue.clear()
            self._changed.notify_all()
        for ticket in waiting:
            ticket.end(WorkerClosedError())
        if self._thread.is_alive():
            # A round or a chunk may still be under way when the time is up; a stuck device is not waited for.
            self._thread.join(timeout + 30.0)

    def submit(self, job: Job) -> Ticket:
        """Queue a job. Raises PromptError, UsageError, TooLargeError, QueueFullError or WorkerClosedError at once."""
        self._check(job)
        ticket = Ticket(job, self._cancel)
        with self._changed:
            if self._ready:
                self._memory.require_room(job, draft=self._drafts(job))
            if self._closing_at is not None or self._error is not None:
                raise WorkerClosedError(self._error)
            waiting = len(self._queue) + len(self._active) - self.max_active
            if waiting >= self.max_queue:
                raise QueueFullError(len(self._queue), self._seconds_until_room())
            if not self._active and not len(self._queue):
                self._progress_at = time.perf_counter()
            self._queue.push(job.owner, ticket)
            self._changed.notify_all()
        return ticket

    def status(self) -> WorkerStatus:
        with self._changed:
            busy = bool(self._active) or len(self._queue) > 0
            return WorkerStatus(
                ready=self._ready and self._error is None and self._closing_at is None,
                mode="dflash" if self.draft else "plain",
                active=len(self._active),
                queued=len(self._queue),
                seconds_since_progress=time.perf_counter() - self._progress_at if busy else 0.0,
                totals=copy.deepcopy(self._totals),
                cache=self._cache.status(),
                memory_active=mx.get_active_memory(),
                memory_peak=mx.get_peak_memory(),
                memory_limit=self._memory.limit,
                error=self._error,
            )

    # Called by anyone, with or without the lock.

    def _check(self, job: Job) -> None:
        fitting_max_tokens(self.pair, len(job.prompt), job.params.max_tokens)
        size = self.pair.target.vocab_size
        wrong = next((token for token in job.prompt if not 0 <= token < size), None)
        if wrong is not None:
            raise PromptError(f"token ids should be from 0 to {size - 1} for this model; the prompt has {wrong}.")
        wrong = next((token for token in job.params.logit_bias if not 0 <= token < size), None)
        if wrong is not None:
            raise UsageError(f"logit_bias should name token ids from 0 to {size - 1}; got {wrong}.")

    def _drafts(self, job: Job) -> bool:
        return self.draft and job.draft

    def _seconds_until_room(self) -> int:
        return min(60, max(1, math.ceil(self._job_seconds * len(self._queue) / (2 * self.max_active))))

    def _cancel(self, ticket: Ticket) -> None:
        with self._changed:
            waiting = self._queue.remove(ticket.job.owner, ticket)
            if waiting:
                self._totals.count_finish("cancelled")
        if waiting:
            ticket.end()

    # The worker's thread.

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._prepare()
            while self._admit():
                for running in list(self._active):
                    self._advance(running)
        except BaseException as caught:  # A bug of ours: nobody may wait for ever because of it.
            error = caught
            raise
        finally:
            self._shut_down(error)

    def _prepare(self) -> None:
        if self.draft and self.width is None:
            self.pair.round_costs()
        self._memory.measure(draft=self.draft)
        with self._changed:
            self._cache.limit_bytes = self._memory.room // 2 if self._cache_bytes is None else self._cache_bytes
            self._ready = True

    def _admit(self) -> bool:
        """Start waiting jobs while there is room, and wait for one when there is nothing to do; False to stop."""
        refused: list[tuple[Ticket, TooLargeError]] = []
        with self._changed:
            while True:
                while len(self._active) < self.max_active and (ticket := self._queue.peek()) is not None:
                    try:
                        self._memory.require_room(ticket.job, draft=self._drafts(ticket.job))
                    except TooLargeError as error:
                        self._totals.count_finish("refused")
                        refused.append((self._queue.pop(), error))
                        continue
                    need = self._memory.need(ticket.job, draft=self._drafts(ticket.job))
                    if total_need([need, *(r.need for r in self._active)]) > self._memory.room:
                        break  # It would fit alone: the next in turn waits for others to finish.
                    now = time.perf_counter()
                    ticket.queued_seconds = now - ticket.submitted_at
                    self._active.append(_Running(self._queue.pop(), need, now))
                if self._active or refused or self._closing_at is not None:
                    break
                self._changed.wait()
            late = self._closing_at is not None and time.perf_counter() >= self._closing_at
            done = self._closing_at is not None and (late or not self._active)
        for ticket, refusal in refused:
            ticket.end(refusal)
        self._cache.shrink(self._memory.room - total_need(r.need for r in self._active))
        return not done

    def _advance(self, running: _Running) -> None:
        """A round or a prefill chunk of one answer."""
        ticket = running.ticket
        if ticket.cancelled:
            self._finish(running, "cancelled")
            ticket.end()
            return
        try:
            if running.steps is None:
                if self._should_wait(running):
                    return
                self._begin(running)
            assert running.steps is not None
            response = next(running.steps)
        except Exception as error:
            self._finish(running, "error", keep=False)
            ticket.end(error)
            return
        with self._changed:
            self._progress_at = time.perf_counter()
            if response is not None:
                self._totals.count_round(response)
        if response is None:
            self._keep_snapshot(running)
            return
        if running.prefilling:
            running.prefilling = False
            ticket.first_token_seconds = time.perf_counter() - ticket.submitted_at
        if response.finish_reason is not None:
            self._finish(running, response.finish_reason)
        ticket.put(response)

    def _begin(self, running: _Running) -> None:
        """Find the session that saves most, and make the answer ready to go."""
        job, draft = running.job, self._drafts(running.job)
        running.session = self._cache.take(
            job.owner,
            job.prompt,
            lambda: self.pair.new_session(draft=draft),
            draft=draft,
            active=[r.session for r in self._relatives(running) if r.session is not None],
        )
        running.steps = generate_steps(
            self.pair,
            job.prompt,
            job.params,
            session=running.session,
            draft=draft,
            width=self.width,
            constraint=job.constraint,
        )
        cached = min(common_prefix(running.session.tokens, job.prompt), len(job.prompt) - 1)
        with self._changed:
            self._totals.prompt_tokens += len(job.prompt)
            self._totals.cached_tokens += cached

    def _relatives(self, running: _Running) -> list[_Running]:
        """Other answers in progress whose caches this one may use."""
        return [
            other
            for other in self._active
            if other is not running
            and other.steps is not None
            and other.job.owner == running.job.owner
            and self._drafts(other.job) == self._drafts(running.job)
        ]

    def _should_wait(self, running: _Running) -> bool:
        """Whether much of this prompt is just being read for another answer, and can be copied when that is done."""
        prompt = running.job.prompt
        known = self._cache.known(running.job.owner, prompt, draft=self._drafts(running.job))
        return any(
            other.prefilling
            and other.session is not None
            and can_cut(other.session)
            and min(common_prefix(other.job.prompt, prompt), len(prompt) - 1)
            > _WORTH_WAITING + max(known, common_prefix(other.session.tokens, prompt))
            for other in self._relatives(running)
        )

    def _keep_snapshot(self, running: _Running) -> None:
        """Caches that cannot go back are copied where the prompt ends, so that a changed answer can start there."""
        session = running.session
        assert session is not None
        if len(session.tokens) == len(running.job.prompt) - 1 and not can_cut(session):
            self._cache.put(running.job.owner, fork(session, len(session.tokens)))

    def _finish(self, running: _Running, reason: str, *, keep: bool = True) -> None:
        """Take an answer out of the rounds; its session goes to the cache, unless it may be damaged."""
        if running.steps is not None:
            try:
                running.steps.close()
            except Exception:
                keep = False
        if keep and running.session is not None:
            self._cache.put(running.job.owner, running.session)
        running.session = running.steps = None
        with self._changed:
            self._active.remove(running)
            self._totals.count_finish(reason)
            self._job_seconds = 0.8 * self._job_seconds + 0.2 * (time.perf_counter() - running.started_at)
        mx.clear_cache()

    def _shut_down(self, error: BaseException | None) -> None:
        """End what is left, and free the memory."""
        with self._changed:
            if error is not None:
                self._error = f"{type(error).__name__}: {error}"
            waiting = self._queue.clear()
        for running in list(self._active):
            self._finish(running, "cancelled" if error is None else "error", keep=False)
            running.ticket.end(WorkerClosedError(self._error))
        for ticket in waiting:
            ticket.end(WorkerClosedError(self._error))
        self._cache.clear()
        mx.clear_cache()


def _evaluate(pair: ModelPair) -> None:
    """Compute every array the models hold, those outside their parameters too (rotary tables, for instance)."""
    for model in (pair.target.model, pair.drafter):
        if model is not None:
            mx.eval([value for module in model.modules() for value in module.values() if isinstance(value, mx.array)])
