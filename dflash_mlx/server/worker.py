"""The one thread that owns MLX: takes jobs from a queue and makes their answers together, in shared rounds."""

import copy
import math
import threading
import time

import mlx.core as mx

from dflash_mlx.answer import GenerationResponse, fitting_max_tokens, require_possible
from dflash_mlx.answering import Answering
from dflash_mlx.errors import PromptError
from dflash_mlx.pair import ModelPair, Report
from dflash_mlx.policy.group import worthwhile_lanes
from dflash_mlx.runtime import free_unused_memory
from dflash_mlx.server.fair_queue import FairQueue
from dflash_mlx.server.memory import MemoryBudget, total_need
from dflash_mlx.server.prefix_cache import PrefixCache
from dflash_mlx.server.running import Running
from dflash_mlx.server.status import Totals, WorkerStatus
from dflash_mlx.server.ticket import Job, QueueFullError, Ticket, TooLargeError, WorkerClosedError

__all__ = ["Job", "QueueFullError", "Ticket", "TooLargeError", "Worker", "WorkerClosedError", "WorkerStatus"]

# Answers at a time, unless the caller says otherwise: the most that are tried, and where they are made one by one.
_MOST_ACTIVE, _MOST_APART = 32, 4
# Where nothing runs, an answer may wait so many seconds for requests that are on their way: one pass reads all prompts.
_GATHERING = 0.05


class Worker:
    """Answers jobs from any thread or event loop; nothing else may touch the pair's models while it runs.

    draft=False refuses to draft at all. max_queue: jobs that may wait beside those in progress, of which there are
    at most max_active, by default as many as this machine gains by. cache_bytes: for the prefix cache, by default half
    of what the models leave over. memory_bytes: what models, caches and answers may take, by default most of the
    machine's memory. width: drafts a round; None chooses by measured speed. report(message, None) tells what is done
    before the first answer.
    """

    def __init__(
        self,
        pair: ModelPair,
        *,
        draft: bool = True,
        max_queue: int = 64,
        max_active: int | None = None,
        cache_bytes: int | None = None,
        memory_bytes: int | None = None,
        width: int | None = None,
        report: Report | None = None,
    ) -> None:
        self.pair = pair
        self._report = report
        self.draft = draft and pair.drafter is not None
        self.max_queue, self.width = max_queue, width
        self._max_active_wanted = max_active
        self.max_active = max_active or _MOST_ACTIVE
        self._answering: Answering | None = None
        self._memory = MemoryBudget(pair, memory_bytes)
        self._cache_bytes = cache_bytes
        self._cache = PrefixCache(0)
        # Guards what follows; waited on for something to do.
        self._changed = threading.Condition()
        self._queue: FairQueue[Ticket] = FairQueue()
        self._active: list[Running] = []
        self._expected = 0
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

    def expect(self, more: int) -> None:
        """Tell of so many requests that will soon submit jobs; of fewer, once they have, or will not."""
        with self._changed:
            self._expected += more
            self._changed.notify_all()

    def status(self) -> WorkerStatus:
        with self._changed:
            busy = bool(self._active) or len(self._queue) > 0
            return WorkerStatus(
                ready=self._ready and self._error is None and self._closing_at is None,
                mode=self.pair.method if self.draft else "plain",
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
        require_possible(self.pair, job.params, job.constraint)

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
            assert self._answering is not None
            with self._answering:
                while self._admit():
                    self._turn()
                self._stop_all()
        except BaseException as caught:  # A bug of ours: nobody may wait for ever because of it.
            error = caught
            raise
        finally:
            self._shut_down(error)

    def _prepare(self) -> None:
        together = self.pair.target.takes_rows()
        if self.draft and self.width is None:
            self.pair.round_costs(self._report)
        most = self._max_active_wanted or (_MOST_ACTIVE if together else _MOST_APART)
        self._answering = Answering(self.pair, draft=self.draft, width=self.width, most_lanes=most)
        if self._max_active_wanted is None and together and self.draft and self.width is None:
            most = worthwhile_lanes(self.pair.group_costs(most, self._report).plain)
        self._memory.measure(draft=self.draft)
        with self._changed:
            self.max_active = most
            self._cache.limit_bytes = self._memory.room // 2 if self._cache_bytes is None else self._cache_bytes
            self._ready = True
        if self._report is not None:
            self._report("ready to answer", None)

    def _admit(self) -> bool:
        """Start waiting jobs while there is room, and wait for one when there is nothing to do; False to stop."""
        refused: list[tuple[Ticket, TooLargeError]] = []
        with self._changed:
            while True:
                while len(self._active) < self.max_active and (ticket := self._queue.peek()) is not None:
                    drafts = self._drafts(ticket.job)
                    try:
                        self._memory.require_room(ticket.job, draft=drafts)
                    except TooLargeError as error:
                        self._totals.count_finish("refused")
                        refused.append((self._queue.pop(), error))
                        continue
                    need = self._memory.need(ticket.job, draft=drafts)
                    if total_need([need, *(r.need for r in self._active)]) > self._memory.room:
                        break  # It would fit alone: the next in turn waits for others to finish.
                    now = time.perf_counter()
                    ticket.queued_seconds = now - ticket.submitted_at
                    self._active.append(Running(ticket=self._queue.pop(), drafts=drafts, need=need, started_at=now))
                if refused or self._closing_at is not None:
                    break
                wait = self._seconds_to_gather() if self._active else None
                if wait == 0.0:
                    break
                self._changed.wait(wait)
            late = self._closing_at is not None and time.perf_counter() >= self._closing_at
            done = self._closing_at is not None and (late or not self._active)
        for ticket, refusal in refused:
            ticket.end(refusal)
        self._cache.shrink(self._memory.room - total_need(r.need for r in self._active))
        return not done

    def _seconds_to_gather(self) -> float:
        """How long the first answers still wait for requests that are on their way."""
        if (
            not self._expected
            or len(self._active) >= self.max_active
            or any(r.answer is not None for r in self._active)
        ):
            return 0.0
        waited = time.perf_counter() - min(running.ticket.submitted_at for running in self._active)
        return max(0.0, _GATHERING - waited)

    def _turn(self) -> None:
        """Begin what can begin, end what was cancelled, and make a round of every answer."""
        assert self._answering is not None
        for running in list(self._active):
            if running.ticket.cancelled:
                self._finish(running, "cancelled")
                running.ticket.end()
            elif running.answer is None:
                try:
                    self._start(running)
                except Exception as error:
                    self._fail(running, error)
        by_answer = {running.answer: running for running in self._active if running.answer is not None}
        found = self._answering.turn()
        lanes = sum(isinstance(news, GenerationResponse) for _, news in found)
        for answer, news in found:
            running = by_answer[answer]
            with self._changed:
                self._progress_at = time.perf_counter()
                if isinstance(news, GenerationResponse):
                    self._totals.count_round(news, lanes=lanes)
            if isinstance(news, Exception):
                self._fail(running, news)
            elif isinstance(news, GenerationResponse):
                self._hand_over(running, news)

    def _hand_over(self, running: Running, response: GenerationResponse) -> None:
        ticket = running.ticket
        now = time.perf_counter()
        if ticket.first_token_seconds is None:
            ticket.first_token_seconds = now - ticket.submitted_at
        else:
            with self._changed:
                self._totals.between_tokens.observe((now - running.newest_at) / len(response.token_ids))
        running.newest_at = now
        if response.finish_reason is not None:
            self._finish(running, response.finish_reason)
        ticket.put(response)

    def _fail(self, running: Running, error: Exception) -> None:
        self._finish(running, "error", keep=False)
        running.ticket.end(error)

    def _start(self, running: Running) -> None:
        """Score a chunk of the prompt where that was asked for; then begin the answer, unless waiting saves more."""
        scored = running.score(self.pair.target)
        with self._changed:
            self._progress_at = time.perf_counter()
        if scored:
            return
        if running.job.only_prompt:
            self._finish_prompt(running)
        elif not running.should_wait(self._cache, self._active):
            self._begin(running)

    def _finish_prompt(self, running: Running) -> None:
        """Nothing is to be written after this prompt."""
        count = len(running.job.prompt)
        with self._changed:
            self._totals.prompt_tokens += count
        self._finish(running, "length")
        running.ticket.put(
            GenerationResponse(text="", token_ids=[], prompt_tokens=count, mode="plain", finish_reason="length")
        )

    def _begin(self, running: Running) -> None:
        answer = running.begin(self.pair, self._cache, self._active, width=self.width)
        assert self._answering is not None
        self._answering.add(answer)
        with self._changed:
            self._totals.prompt_tokens += len(answer.prompt)
            self._totals.cached_tokens += answer.cached_tokens

    def _finish(self, running: Running, reason: str, *, keep: bool = True) -> None:
        """Take an answer out of the rounds; its session goes to the cache, unless it may be damaged."""
        assert self._answering is not None
        if running.answer is not None:
            self._answering.remove(running.answer)
            if keep:
                self._cache.put(running.job.owner, running.answer.session)
            running.answer = None
        with self._changed:
            self._active.remove(running)
            self._totals.count_finish(reason)
            self._job_seconds = 0.8 * self._job_seconds + 0.2 * (time.perf_counter() - running.started_at)
        free_unused_memory()

    def _stop_all(self) -> None:
        """The time to finish is over."""
        for running in list(self._active):
            self._finish(running, "cancelled", keep=False)
            running.ticket.end(WorkerClosedError())

    def _shut_down(self, error: BaseException | None) -> None:
        """End what is left, and free the memory."""
        with self._changed:
            if error is not None:
                self._error = f"{type(error).__name__}: {error}"
            waiting = self._queue.clear()
            left, self._active = self._active, []
        for ticket in [*(running.ticket for running in left), *waiting]:
            ticket.end(WorkerClosedError(self._error))
        self._cache.clear()
        free_unused_memory()


def _evaluate(pair: ModelPair) -> None:
    """Compute every array the models hold, those outside their parameters too (rotary tables, for instance)."""
    for model in (pair.target.model, *(pair.drafter.networks if pair.drafter is not None else ())):
        mx.eval([value for module in model.modules() for value in module.values() if isinstance(value, mx.array)])
