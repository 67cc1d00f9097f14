"""Running a request's jobs: tickets in, pieces of answers out, as they come."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.decoding.constraint import Constraint
from dflash_mlx.decoding.logprobs import TokenLogprob
from dflash_mlx.detokenizing import decoded
from dflash_mlx.generation import GenerationResponse
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.server.channels import CONTENT, REASONING, TOOL, Part, Splitter, Transitions
from dflash_mlx.server.failures import RequestError
from dflash_mlx.server.parameters import seeded
from dflash_mlx.server.tools import Offer, ToolCall, parse_calls
from dflash_mlx.server.vocabulary import Vocabulary
from dflash_mlx.server.worker import Job, Ticket, Worker, WorkerClosedError


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a request asks of the worker, whatever its protocol."""

    prompts: list[list[int]]
    params: SamplingParams
    n: int = 1
    draft: bool = True
    constraint: Constraint | None = None
    transitions: Transitions = field(default_factory=dict)
    state: str = CONTENT
    offer: Offer = field(default_factory=Offer)
    stops: tuple[str, ...] = ()  # those of params.stop that the client asked for
    continues: bool = False  # the answer goes on in the prompt's text: a space at its beginning is shown
    prompt_logprobs: int | None = None  # alternatives to report for each token of the prompt
    only_prompt: bool = False  # nothing is to be written


@dataclass(frozen=True)
class Said:
    """A stretch of text: `kind` is "normal" or "reasoning"."""

    kind: str
    text: str


@dataclass
class Piece:
    """What a round added to the answer `index`. `finish` is set on the last: "stop", "length" or "tool_calls"."""

    index: int
    said: list[Said | ToolCall]
    response: GenerationResponse
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    stop_string: str | None = None


@dataclass
class Answer:
    """One answer as it grows."""

    order: Order
    vocabulary: Vocabulary
    eos_ids: set[int]  # tokens that have no text: those that end the answer, too
    splitter: Splitter
    ticket: Ticket
    calls: int = 0
    tool_text: str = ""
    token_ids: list[int] = field(default_factory=list)
    text: str = ""  # all of it, markers included
    last: GenerationResponse | None = None
    # Log-probabilities of text that is not shown yet: it may become a stop string, which has none.
    held_logprobs: list[tuple[int, TokenLogprob]] = field(default_factory=list)
    bytes_seen: int = 0

    def add(self, index: int, response: GenerationResponse) -> Piece:
        self.last = response
        self.token_ids += response.token_ids
        self.text += response.text
        parts = self.splitter.feed(response.text)
        finish, stop_string = None, None
        if response.finish_reason is not None:
            stop_string = self._stop_string(response)
            parts += self.splitter.finish()
        said = [thing for part in parts for thing in self._said(part)]
        if response.finish_reason is not None:
            if self.splitter.state == TOOL:
                said += self._close_tool(ended=stop_string or "")
            calls = response.finish_reason == "stop" and self.calls > 0
            finish = "tool_calls" if calls else str(response.finish_reason)
        logprobs = self._logprobs(response, stop_string)
        asked_for = stop_string if stop_string in self.order.stops else None
        return Piece(index, said, response, logprobs, finish, asked_for)

    def _logprobs(self, response: GenerationResponse, stop_string: str | None) -> list[TokenLogprob]:
        """Those of the tokens whose text is shown; an end-of-sequence token and a stop string's tokens have none."""
        if not response.logprobs:
            return []
        for entry in response.logprobs:
            if entry.token_id not in self.eos_ids:
                if not self.order.continues and not self.bytes_seen and not self.held_logprobs:
                    self.bytes_seen = -self.vocabulary.dropped_at_start(entry.token_id)
                self.held_logprobs.append((self.bytes_seen, entry))
                self.bytes_seen += len(self.vocabulary.bytes_of(entry.token_id))
        if response.finish_reason is not None and stop_string is None:
            shown = len(self.held_logprobs)
        else:
            end = len(self.text.encode())
            shown = sum(start < end for start, _ in self.held_logprobs)
        ready, self.held_logprobs = self.held_logprobs[:shown], self.held_logprobs[shown:]
        return [entry for _, entry in ready]

    def _said(self, part: Part) -> list[Said | ToolCall]:
        if part.state != TOOL:
            return [Said(REASONING if part.state == REASONING else CONTENT, part.text)] if part.text else []
        self.tool_text += part.text
        return self._close_tool(ended=part.ended) if part.ended else []

    def _close_tool(self, *, ended: str) -> list[Said | ToolCall]:
        """The calls in a finished tool text; text that is no call is shown as the model wrote it."""
        text, self.tool_text = self.tool_text, ""
        calls = parse_calls(text, self.order.offer, self.vocabulary.tokenizer)
        if calls is None:
            return [Said(CONTENT, f"{self.vocabulary.tokenizer.tool_call_start}{text}{ended}")]
        kept = calls if self.order.offer.parallel else calls[: max(0, 1 - self.calls)]
        self.calls += len(kept)
        return list(kept)

    def _stop_string(self, response: GenerationResponse) -> str | None:
        """Which stop string ended the answer: what its tokens spell after the text that was shown."""
        stops = self.order.params.stop
        if response.finish_reason != "stop" or not stops or self.token_ids[-1] in self.eos_ids:
            return None
        texts = [token for token in self.token_ids if token not in self.eos_ids]
        whole = decoded(self.vocabulary.tokenizer, texts, continues=self.order.continues)
        rest = whole[len(self.text) :]
        return next((stop for stop in stops if rest.startswith(stop)), stops[0])


@dataclass
class Answers:
    """The answers to an order. Iterate over the pieces; `close` cancels what is unfinished."""

    order: Order
    all: list[Answer]
    seconds: float  # they may take; 0 is no limit

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises what a job raised, and RequestError when the time is over."""
        queue: asyncio.Queue[tuple[int, GenerationResponse | Exception]] = asyncio.Queue()
        readers = [asyncio.create_task(_read(i, answer.ticket, queue)) for i, answer in enumerate(self.all)]
        open_answers = len(self.all)
        # Not asyncio.wait_for: before Python 3.12 it can lose the cancellation that a client's leaving is.
        over = RequestError("the time for a request is over; ask for less.", status=408, code="timeout")
        timer = (
            asyncio.get_running_loop().call_later(self.seconds, queue.put_nowait, (0, over)) if self.seconds else None
        )
        try:
            while open_answers:
                index, found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                piece = self.all[index].add(index, found)
                open_answers -= piece.finish is not None
                yield piece
        finally:
            if timer is not None:
                timer.cancel()
            for reader in readers:
                reader.cancel()
            self.close()

    def close(self) -> None:
        for answer in self.all:
            if answer.last is None or answer.last.finish_reason is None:
                answer.ticket.cancel()

    @property
    def finished(self) -> bool:
        return all(answer.last is not None and answer.last.finish_reason is not None for answer in self.all)

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt once, however many answers it got."""
        return sum(answer.last.prompt_tokens for answer in self.all[:: self.order.n] if answer.last)

    @property
    def cached_tokens(self) -> int:
        return sum(answer.last.cached_tokens for answer in self.all[:: self.order.n] if answer.last)

    @property
    def completion_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.all)

    def statistics(self) -> dict[str, Any]:
        """The extension field `dflash`: how each answer went."""
        return {"answers": [_statistics(answer) for answer in self.all if answer.last]}


async def _read(index: int, ticket: Ticket, queue: "asyncio.Queue[Any]") -> None:
    try:
        async for response in ticket:
            queue.put_nowait((index, response))
            if response.finish_reason is not None:
                return
        raise WorkerClosedError(None)
    except Exception as error:
        queue.put_nowait((index, error))


def _statistics(answer: Answer) -> dict[str, Any]:
    assert answer.last is not None
    whole = answer.last.to_json()
    names = ("mode", "cached_tokens", "generation_tokens", "prompt_tps", "generation_tps", "acceptance")
    ticket = answer.ticket
    times = {"queued_seconds": ticket.queued_seconds, "first_token_seconds": ticket.first_token_seconds}
    rounded = {name: None if value is None else round(value, 4) for name, value in times.items()}
    return {**{name: whole[name] for name in names}, **rounded}


def submit(
    worker: Worker, order: Order, *, owner: str, vocabulary: Vocabulary, eos_ids: set[int], timeout: float
) -> Answers:
    """Start an order's jobs: all of them or, when the worker refuses one, none. Raises what the worker raises."""
    answers = Answers(order, [], timeout)
    try:
        for prompt in order.prompts:
            for index in range(order.n):
                job = Job(
                    prompt=prompt,
                    params=seeded(order.params, index),
                    draft=order.draft,
                    constraint=order.constraint,
                    owner=owner,
                    continues=order.continues,
                    prompt_logprobs=order.prompt_logprobs,
                    only_prompt=order.only_prompt,
                )
                ticket = worker.submit(job)
                splitter = Splitter(order.transitions, order.state)
                answers.all.append(Answer(order, vocabulary, eos_ids | order.params.ends(eos_ids), splitter, ticket))
    except BaseException:
        answers.close()
        raise
    return answers
