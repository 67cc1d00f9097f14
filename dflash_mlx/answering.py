"""Answers made together: prompts are read in chunks between the rounds of those that are running."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

from dflash_mlx.answer import Answer, GenerationResponse
from dflash_mlx.decoding.engine import PREFILL_STEP, Engine
from dflash_mlx.pair import ModelPair
from dflash_mlx.wired import wired

# What a turn brings to an answer: tokens, an error that ends it, or (done, total) of its prompt.
News = GenerationResponse | Exception | tuple[int, int]
# Reading prompts may take so many times as long as a round, while answers are running: their tokens then come at most
# this much later.
_READING = 1.5
_SMALLEST_CHUNK = 16


class Answering:
    """Up to `most_lanes` answers of a pair at a time. A context manager: at its end what is unfinished is cancelled.

    draft, width: as for the answers that will be added; they say how shared rounds are made. For one thread.
    """

    def __init__(self, pair: ModelPair, *, draft: bool = True, width: int | None = None, most_lanes: int = 1) -> None:
        self.pair = pair
        self.most_lanes = most_lanes
        self._policy = pair.group_policy(width if draft else 0, most_lanes=most_lanes)
        self._engines: list[Engine] = []
        self._reading: deque[tuple[Answer, Iterator[tuple[int, int]]]] = deque()
        self._lanes: dict[object, Answer] = {}
        self._round_seconds = 0.0
        self._seconds_a_token = 0.0
        self._held = ExitStack()

    def __enter__(self) -> "Answering":
        self._held.enter_context(wired(self.pair.target.model))
        return self

    def __exit__(self, *_: object) -> None:
        for answer in [*(answer for answer, _ in self._reading), *self._lanes.values()]:
            self.remove(answer)
        self._held.close()

    @property
    def count(self) -> int:
        """Answers in progress, those whose prompts are being read included."""
        return len(self._reading) + len(self._lanes)

    def add(self, answer: Answer) -> None:
        """Begin an answer: its prompt is read in the next turns."""
        self._reading.append((answer, answer.read(chunk=self._chunk)))

    def remove(self, answer: Answer) -> None:
        """End an answer at once; its session holds what was committed."""
        self._reading = deque(entry for entry in self._reading if entry[0] is not answer)
        if answer.lane is not None and answer.lane in self._lanes:
            del self._lanes[answer.lane]
            for engine in self._engines:
                engine.leave(answer.lane)
            answer.finish()

    def turn(self) -> list[tuple[Answer, News]]:
        """Read a part of the prompts, then make a round of every answer that is running."""
        news = self._read()
        started = time.perf_counter()
        for engine in self._engines:
            news += self._advance(engine)
        if self._lanes:
            spent = time.perf_counter() - started
            self._round_seconds = 0.7 * self._round_seconds + 0.3 * spent if self._round_seconds else spent
        self._engines = [engine for engine in self._engines if engine.lanes]
        return news

    def _read(self) -> list[tuple[Answer, News]]:
        """A chunk of each prompt in turn; while answers are running, only for as long as they can wait."""
        news: list[tuple[Answer, News]] = []
        ends_at = time.perf_counter() + _READING * self._round_seconds
        running = bool(self._lanes)
        for _ in range(len(self._reading)):
            if running and news and time.perf_counter() >= ends_at:
                break
            answer, chunks = self._reading.popleft()
            before, started = len(answer.session.tokens), time.perf_counter()
            try:
                done = next(chunks, None)
                if done is None:
                    self._start(answer)
                    continue
            except Exception as error:
                news.append((answer, error))
                continue
            self._time_reading(len(answer.session.tokens) - before, time.perf_counter() - started)
            news.append((answer, done))
            if done[0] < done[1]:
                self._reading.append((answer, chunks))
            else:
                # Nothing is left to read: this makes the lane.
                next(chunks, None)
                self._start(answer)
        return news

    def _chunk(self) -> int:
        """Tokens of a prompt to read at once."""
        if not self._lanes or not self._seconds_a_token:
            return PREFILL_STEP
        return max(_SMALLEST_CHUNK, int(_READING * self._round_seconds / self._seconds_a_token))

    def _time_reading(self, tokens: int, seconds: float) -> None:
        if tokens >= _SMALLEST_CHUNK:
            pace = seconds / tokens
            self._seconds_a_token = 0.5 * (self._seconds_a_token + pace) if self._seconds_a_token else pace

    def _start(self, answer: Answer) -> None:
        assert answer.lane is not None
        self._engine_for(answer).join(answer.lane)
        self._lanes[answer.lane] = answer

    def _engine_for(self, answer: Answer) -> Engine:
        """Answers with and without a drafter are made apart, and each by itself where the target cannot do several."""
        target, drafter = self.pair.target, answer.session.drafter if answer.drafting else None
        for engine in self._engines:
            if target.takes_rows() and engine.drafter is drafter:
                return engine
        self._engines.append(Engine(target, drafter, policy=self._policy))
        return self._engines[-1]

    def _advance(self, engine: Engine) -> list[tuple[Answer, News]]:
        lanes = engine.lanes
        try:
            results = engine.advance()
        except Exception as error:  # of the models: none of these answers can go on
            return [(self._lanes.pop(lane), error) for lane in lanes]
        news: list[tuple[Answer, News]] = []
        for lane, step in results:
            answer = self._lanes[lane]
            try:
                found = step if isinstance(step, Exception) else answer.add(step)
            except Exception as error:  # the others go on
                found = error
            news.append((answer, found))
            if isinstance(found, Exception) or found.finish_reason is not None:
                self.remove(answer)
        return news
