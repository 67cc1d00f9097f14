"""Timed answers, the contestants in turns. Everything in this project that measures answers runs them here."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from statistics import mean
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.bench.record import PromptResult, Round, Run
from dflash_mlx.generation import GenerationResponse, Prompt
from dflash_mlx.sampling import SamplingParams

Clock = Callable[[], float]
T = TypeVar("T")

_FIRST_USE = 4  # tokens of an answer that has everything made ready


class Contestant(Protocol):
    """Something that answers prompts."""

    @property
    def name(self) -> str: ...

    def answer(self, prompt: Prompt, params: SamplingParams) -> Iterator[GenerationResponse]:
        """A response for each piece of the answer, as from `generation.stream_generate`."""
        ...


class Meter(Protocol):
    """Measures the energy of what runs inside it; `joules` is None where this machine does not tell."""

    joules: float | None

    def __call__(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Setting:
    """One point of a sweep: what is asked for, and how many tokens of context come before each prompt."""

    name: str
    params: SamplingParams
    context: int = 0


@dataclass(frozen=True)
class Job:
    """One run that is to be made."""

    result: PromptResult
    setting: Setting
    contestant: str
    turn: int


class TimedAnswer:
    """An answer to a prompt, from an empty cache, that is timed while it goes on."""

    def __init__(
        self,
        contestant: Contestant,
        prompt: Prompt,
        params: SamplingParams,
        *,
        meter: Meter | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.contestant, self._meter, self._clock = contestant, meter, clock
        self._asked = prompt, params
        self._responses: Iterator[GenerationResponse] | None = None
        # What has come, and after how many seconds, of those that it has gone on for.
        self._heard: list[tuple[float, GenerationResponse]] = []
        self._spent = 0.0
        self._joules: float | None = None
        self.ended = False

    def go_on(self, tokens: int | None = None) -> None:
        """Go on to the end, or for as many tokens at least; then nothing of it is left on the device to be computed."""
        with self._meter() if self._meter else nullcontext():
            started, gained = self._clock() - self._spent, 0
            if self._responses is None:
                self._responses = iter(self.contestant.answer(*self._asked))
            for response in self._responses:
                self._heard.append((self._clock() - started, response))
                gained += len(response.token_ids)
                if tokens is not None and gained >= tokens and response.finish_reason is None:
                    mx.synchronize()
                    break
            else:
                self.ended = True
            self._spent = self._clock() - started
        if self._meter is not None and self._meter.joules is not None:
            self._joules = (self._joules or 0.0) + self._meter.joules

    def run(self) -> Run:
        """The answer, once it has ended."""
        assert self._heard, "an answer ends with a response"
        (first_s, first), (wall_s, last) = self._heard[0], self._heard[-1]
        responses = [response for _, response in self._heard]
        token_ids = [token for response in responses for token in response.token_ids]
        rounds = [_round(r, at - before) for (before, _), (at, r) in pairwise(self._heard) if r.token_ids]
        first_ids = len(first.token_ids)
        return Run(
            contestant=self.contestant.name,
            token_ids=token_ids,
            text="".join(response.text for response in responses),
            finish_reason=last.finish_reason,
            prompt_tokens=last.prompt_tokens,
            cached_tokens=last.cached_tokens,
            first_s=first_s,
            wall_s=wall_s,
            decode_tokens=max(0, (last.generation_tokens or len(token_ids)) - max(1, first_ids)),
            peak_memory_gb=last.peak_memory_gb or None,
            joules=self._joules,
            acceptance=_acceptance(last),
            rounds=rounds if last.acceptance is not None else [],
            notices=[response.notice for response in responses if response.notice],
            ids_from_text=not first_ids and bool(token_ids),
        )


def time_answer(
    contestant: Contestant,
    prompt: Prompt,
    params: SamplingParams,
    *,
    meter: Meter | None = None,
    clock: Clock = time.perf_counter,
) -> Run:
    """One timed answer to a prompt, from an empty cache, without a pause."""
    answer = TimedAnswer(contestant, prompt, params, meter=meter, clock=clock)
    answer.go_on()
    return answer.run()


def _round(response: GenerationResponse, since_last: float) -> Round:
    return Round(
        ms=(since_last if response.round_s is None else response.round_s) * 1000,
        width=response.width or 0,
        depth=response.depth or 0,
        kept=response.num_accepted or 0,
        tokens=len(response.token_ids),
    )


def _acceptance(response: GenerationResponse) -> dict[str, Any] | None:
    if response.acceptance is None:
        return None
    return {**response.acceptance.to_json(), "tokens": response.acceptance.tokens}


def order(names: Sequence[T], turn: int) -> list[T]:
    """Who runs in a turn, in which order: each is the first one equally often, and every second turn goes backwards.

    So none comes before another more often than after it: whoever meets new shapes first may have to compile for them.
    """
    first = turn // 2 % len(names)
    found = [*names[first:], *names[:first]]
    return found[::-1] if turn % 2 else found


def plan(
    prompts: Sequence[BenchPrompt], settings: Sequence[Setting], names: Sequence[str], *, repeat: int = 1
) -> list[Job]:
    """All runs in their order.

    The contestants take turns (`order`), so that a machine that grows warm slows all alike.
    """
    results = [(PromptResult(prompt=p, setting=s.name), s) for s in settings for p in prompts]
    return [
        Job(result, setting, name, turn)
        for turn in range(repeat)
        for index, (result, setting) in enumerate(results)
        for name in order(names, turn + index)
    ]


def run_jobs(
    jobs: Sequence[Job],
    contestants: Mapping[str, Contestant],
    *,
    turns: int | None = None,
    pad: Callable[[str, int], str] | None = None,
    before: Callable[[], None] | None = None,
    meter: Meter | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[tuple[Job, Run]]:
    """Make the runs, filling the jobs' results; yields after each. What was filled in before an interruption stays.

    A prompt that follows another is asked after the baseline's answer to that one, so that all read the same text.
    turns: answers to a prompt that can be left for a while (`Local.pauses`) take turns of so many tokens. pad(text,
    tokens): the text with so much context before it. before: called before each run, or before those that take turns.
    """
    baseline = next(iter(contestants))
    talks: dict[tuple[str, str], list[dict[str, str]]] = {}
    found = {(job.result.setting, job.result.prompt.name): job.result for job in jobs}
    for together in _together(jobs, contestants, turns):
        if before is not None:
            before()
        # They have the prompt and the setting in common.
        job = together[0]
        prompt = job.result.prompt
        key = (job.setting.name, prompt.name)
        if key not in talks:
            text = pad(prompt.text, job.setting.context) if pad and job.setting.context else prompt.text
            earlier: list[dict[str, str]] = []
            if prompt.follows is not None:
                answered = found[job.setting.name, prompt.follows]
                earlier = [
                    *talks[job.setting.name, prompt.follows],
                    {"role": "assistant", "content": answered.of(baseline)[0].text},
                ]
            talks[key] = [*earlier, {"role": "user", "content": text}]
        answers = []
        for job in together:
            contestant = contestants[job.contestant]
            # This machine's energy is not that of a server elsewhere.
            own_meter = meter if getattr(contestant, "local", True) else None
            answers.append(TimedAnswer(contestant, talks[key], job.setting.params, meter=own_meter, clock=clock))
        _take_turns(answers, turns if len(answers) > 1 else None)
        for job, answer in zip(together, answers, strict=True):
            run = answer.run()
            job.result.runs.append(run)
            yield job, run


def _together(jobs: Sequence[Job], contestants: Mapping[str, Contestant], turns: int | None) -> Iterator[Sequence[Job]]:
    """The jobs in their order, those that take turns together."""
    for _, group in groupby(jobs, key=lambda job: (id(job.result), job.turn)):
        of_prompt = list(group)
        taking = [job for job in of_prompt if turns and getattr(contestants[job.contestant], "pauses", False)]
        for job in of_prompt:
            if taking and job is taking[0]:
                yield taking
            elif not any(job is other for other in taking):
                yield [job]


def _take_turns(answers: Sequence[TimedAnswer], tokens: int | None) -> None:
    """Let all answers go on to their ends, each for so many tokens at a time."""
    going, turn = list(answers), 0
    while going:
        for answer in order(going, turn):
            answer.go_on(tokens)
        going, turn = [answer for answer in going if not answer.ended], turn + 1


def warm_up(
    contestants: Mapping[str, Contestant], text: str, params: SamplingParams, *, max_tokens: int
) -> dict[str, float]:
    """Answers of each that do not count: kernels are compiled, weights read and costs measured on first use.

    Returns by name the seconds of the last one, which is as fast as those to come.
    """
    seconds = {}
    for name, contestant in contestants.items():
        for tokens in (_FIRST_USE, max_tokens):
            started = time.perf_counter()
            short = replace(params, max_tokens=min(tokens, params.max_tokens))
            time_answer(contestant, [{"role": "user", "content": text}], short)
            seconds[name] = time.perf_counter() - started
    return seconds


def seconds_left(took: Mapping[str, Sequence[float]], left: "Counter[str]") -> float | None:
    """How long the runs that are left will take, from those that are finished; None before the first one.

    took and left: by contestant. One that has not run yet is taken to be as slow as the others are on average.
    """
    every = [seconds for runs in took.values() for seconds in runs]
    if not every:
        return None
    return sum(count * mean(took.get(name) or every) for name, count in left.items())
