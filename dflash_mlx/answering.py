"""Answers made together: prompts are read in chunks between the rounds of those that are running."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from dflash_mlx.answer import Answer, GenerationResponse
from dflash_mlx.decoding.batch import Batch
from dflash_mlx.decoding.decode import PREFILL_STEP
from dflash_mlx.decoding.engine import Engine
from dflash_mlx.decoding.fork import can_cut
from dflash_mlx.drafters.contract import Drafter
from dflash_mlx.pair import ModelPair
from dflash_mlx.policy.reading import ReadingTimes, Turns
from dflash_mlx.runtime import backend
from dflash_mlx.wired import wired

# What a turn brings to an answer: tokens, an error that ends it, or (done, total) of its prompt.
News = GenerationResponse | Exception | tuple[int, int]
# While answers are running, reading a prompt may take as long as a round, and up to so many rounds where others wait to
# begin, too: a pass over few tokens takes nearly as long as one over many.
_MOST_READING = 8.0
_SMALLEST_CHUNK = 8
# On CUDA, where the GPU waits for the computer, so many tokens take hardly longer than one.
_SMALLEST_CHUNK_ON_CUDA = 512
# Prompts that are read in one pass are filled up to the longest. That may make the pass this much longer, or more where
# two passes would still take longer.
_PADDING = 1.25
# Where every place is taken, prompts may wait this many rounds for others, to be read in one pass with them.
_MOST_WAITED = 16
# Rows that are longer than need be may take this share of the weights' bytes.
_MOST_PADDING = 0.5


class Answering:
    """Up to `most_lanes` answers of a pair at a time. A context manager: at its end what is unfinished is cancelled.

    draft, width: as for the answers that will be added; they say how shared rounds are made. For one thread.
    """

    def __init__(self, pair: ModelPair, *, draft: bool = True, width: int | None = None, most_lanes: int = 1) -> None:
        self.pair = pair
        self.most_lanes = most_lanes
        self._policy = pair.group_policy(width if draft else 0, most_lanes=most_lanes)
        self._engines: list[Engine] = []
        self._reading: deque[Answer] = deque()
        self._lanes: dict[object, Answer] = {}
        self._times = ReadingTimes()
        self._turns = Turns(self._times)
        self._waited = self._rounds_waited = 0
        self._held = ExitStack()

    def __enter__(self) -> "Answering":
        self._held.enter_context(wired(self.pair.target.model))
        return self

    def __exit__(self, *_: object) -> None:
        for answer in [*self._reading, *self._lanes.values()]:
            self.remove(answer)
        self._held.close()

    @property
    def count(self) -> int:
        """Answers in progress, those whose prompts are being read included."""
        return len(self._reading) + len(self._lanes)

    def add(self, answer: Answer) -> None:
        """Begin an answer: its prompt is read in the next turns."""
        answer.open()
        self._reading.append(answer)

    def remove(self, answer: Answer) -> None:
        """End an answer at once; its session holds what was committed."""
        if answer in self._reading:
            self._reading.remove(answer)
        if answer.lane is not None and answer.lane in self._lanes:
            del self._lanes[answer.lane]
            for engine in self._engines:
                engine.leave(answer.lane)
            answer.finish()

    def turn(self) -> list[tuple[Answer, News]]:
        """Read a part of the prompts, then make a round of every answer that is running."""
        started = time.perf_counter()
        news = self._read()
        read_at = time.perf_counter()
        for engine in self._engines:
            news += self._advance(engine)
        self._turns.observe(read_at - started, time.perf_counter() - read_at, running=bool(self._lanes))
        self._engines = [engine for engine in self._engines if engine.lanes]
        return news

    def _read(self) -> list[tuple[Answer, News]]:
        """Read short prompts together, and a chunk of each long one; only as much as running answers can wait for."""
        news: list[tuple[Answer, News]] = []
        if self._waits_for_more():
            return news
        running, turns, seconds = bool(self._lanes), len(self._reading), self._reading_seconds
        ends_at = time.perf_counter() + seconds
        while turns > 0 and not (running and news and time.perf_counter() >= ends_at):
            chunk = self._chunk(seconds) if running else PREFILL_STEP
            answers = self._next_to_read(turns, chunk)
            turns -= len(answers)
            before, started = sum(answer.unread for answer in answers), time.perf_counter()
            new = all(not answer.session.tokens for answer in answers)
            try:
                if self._in_rows(answers, chunk):
                    self._read_together(answers)
                else:
                    self._read_chunk(answers[0], chunk)
            except Exception as error:
                news += [(answer, error) for answer in answers]
                continue
            left = sum(answer.unread for answer in answers)
            if before - left >= _SMALLEST_CHUNK:
                if new and left == 0:
                    self._turns.arrived(before)
                else:
                    self._times.observe(before - left, time.perf_counter() - started, whole=False)
            news += [(answer, (len(answer.session.tokens) - answer.cached_tokens, before)) for answer in answers]
        return news

    def _waits_for_more(self) -> bool:
        """Whether new prompts should wait for others that will be read in the same pass with them.

        A pass has a fixed part, and all running answers wait for it. So it pays to wait until those who are to be read
        have lost as much time as the others would lose. Only while every place is taken: then an answer that ends
        soon makes place for another prompt.
        """
        self._waited += len(self._reading)
        self._rounds_waited = self._rounds_waited + 1 if self._reading else 0
        lost = self._waited * self._turns.round_seconds
        if (
            self._lanes
            and self.count == self.most_lanes
            and self._rounds_waited <= _MOST_WAITED
            and lost < len(self._lanes) * self._times.shared
            and all(self._fits_together(answer) for answer in self._reading)
        ):
            return True
        self._waited = self._rounds_waited = 0
        return False

    def _next_to_read(self, most: int, chunk: int) -> list[Answer]:
        """The next answer to read for and, where that is a short new prompt, others that fit into a chunk with it.

        The rows of a pass are all as long as the longest, so that prompts of about the same length are best.
        """
        first = self._reading.popleft()
        found, fed = [first], first.unread
        if not self._fits_together(first):
            return found
        seconds = self._times.seconds
        others = [a for a in self._reading if a.drafting == first.drafting and self._fits_together(a)]
        for other in sorted(others, key=lambda answer: abs(answer.unread - first.unread)):
            lengths = [answer.unread for answer in [*found, other]]
            together = max(lengths) * len(lengths)
            if len(found) == most or together > chunk:
                break
            is_even = together <= _PADDING * sum(lengths) + _SMALLEST_CHUNK
            if is_even or seconds(together) < seconds(fed) + seconds(other.unread):
                self._reading.remove(other)
                found, fed = [*found, other], together
        return found

    def _fits_together(self, answer: Answer) -> bool:
        """Whether a prompt can be read in one pass with others: nothing of it is known, and nothing is to be copied."""
        fresh = not answer.session.tokens and answer.unread > 0
        return fresh and self.pair.target.takes_rows() and (answer.on_prompt_read is None or can_cut(answer.session))

    def _in_rows(self, answers: Sequence[Answer], chunk: int) -> bool:
        """Whether to read prompts as rows of a batch: several always, and one where such passes are replayed."""
        first = answers[0]
        alone = self.pair.target.replays and self._fits_together(first) and first.unread <= chunk
        return len(answers) > 1 or alone

    def _read_together(self, answers: Sequence[Answer]) -> None:
        drafter = self._drafter_of(answers[0])
        batch = Batch.reading(self.pair.target, drafter, [answer.prompt for answer in answers])
        for answer in answers:
            answer.session.tokens = answer.prompt[:-1]
        lanes = [answer.begin() for answer in answers]
        batch.begin(lanes)
        self._engine_for(answers[0]).join_all(batch)
        self._lanes.update(zip(lanes, answers, strict=True))

    def _read_chunk(self, answer: Answer, chunk: int) -> None:
        if answer.unread:
            answer.read(chunk)
        if answer.unread:
            self._reading.append(answer)
            return
        lane = answer.begin()
        self._engine_for(answer).join(lane)
        self._lanes[lane] = answer

    @property
    def _reading_seconds(self) -> float:
        """How long running answers may wait in a turn for prompts to be read."""
        others = max(len(self._reading) - 1, 0)
        return min(1.0 + others / max(len(self._lanes), 1), _MOST_READING) * self._turns.round_seconds

    def _chunk(self, seconds: float) -> int:
        """Tokens of prompts to read at once while answers are running, in about that time."""
        if not self._times.known:
            return PREFILL_STEP
        return self._times.tokens_in(seconds, least=self._least_chunk, most=PREFILL_STEP)

    @property
    def _least_chunk(self) -> int:
        """The fewest tokens of a prompt that are worth a pass.

        A GPU whose passes are replayed with gain computes faster than they can be launched.
        """
        late = self.pair.target.replays and backend().kind == "cuda"
        return _SMALLEST_CHUNK_ON_CUDA if late else _SMALLEST_CHUNK

    def _drafter_of(self, answer: Answer) -> Drafter | None:
        return answer.session.drafter if answer.drafting else None

    def _engine_for(self, answer: Answer) -> Engine:
        """Answers with and without a drafter are made apart, and short ones apart from much longer ones.

        Each is made by itself where the target cannot do several.
        """
        target, drafter = self.pair.target, self._drafter_of(answer)
        for engine in self._engines:
            if target.takes_rows() and engine.drafter is drafter and self._suits(engine, len(answer.prompt)):
                return engine
        self._engines.append(Engine(target, drafter, policy=self._policy))
        return self._engines[-1]

    def _suits(self, engine: Engine, tokens: int) -> bool:
        """Whether an answer with this many tokens should share its rounds with an engine's.

        The rows of a batch are all as long as the longest. What is read and computed for that must be clearly less than
        the weights, which rounds of its own would read again.
        """
        lengths = [len(lane.session.tokens) for lane in engine.lanes]
        added = _padding([*lengths, tokens]) - _padding(lengths)
        return added * self.pair.target.position_bytes <= _MOST_PADDING * self.pair.target.weight_bytes

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


def _padding(lengths: Sequence[int]) -> int:
    """Positions that rows of these lengths have too many, when all are as long as the longest."""
    return len(lengths) * max(lengths, default=0) - sum(lengths)
