"""Timed answers, the contestants in turns. Everything in this project that measures answers runs them here."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Protocol

from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.bench.record import PromptResult, Round, Run
from dflash_mlx.generation import GenerationResponse, Prompt
from dflash_mlx.sampling import SamplingParams

Clock = Callable[[], float]

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


def time_answer(
    contestant: Contestant,
    prompt: Prompt,
    params: SamplingParams,
    *,
    meter: Meter | None = None,
    clock: Clock = time.perf_counter,
) -> Run:
    """One timed answer to a prompt, from an empty cache."""
    token_ids: list[int] = []
    notices: list[str] = []
    rounds: list[Round] = []
    text = ""
    first_s: float | None = None
    first_ids, last, now = 0, 0.0, 0.0
    response: GenerationResponse | None = None
    with meter() if meter else nullcontext():
        started = clock()
        for response in contestant.answer(prompt, params):
            now = clock() - started
            if first_s is None:
                first_s, first_ids = now, len(response.token_ids)
            elif response.token_ids:
                rounds.append(_round(response, now - last))
            last = now
            token_ids += response.token_ids
            text += response.text
            if response.notice:
                notices.append(response.notice)
    assert response is not None, "an answer ends with a response"
    return Run(
        contestant=contestant.name,
        token_ids=token_ids,
        text=text,
        finish_reason=response.finish_reason,
        prompt_tokens=response.prompt_tokens,
        cached_tokens=response.cached_tokens,
        first_s=first_s or 0.0,
        wall_s=now,
        decode_tokens=max(0, (response.generation_tokens or len(token_ids)) - max(1, first_ids)),
        peak_memory_gb=response.peak_memory_gb or None,
        joules=meter.joules if meter else None,
        acceptance=_acceptance(response),
        rounds=rounds if response.acceptance is not None else [],
        notices=notices,
        ids_from_text=not first_ids and bool(token_ids),
    )


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


def order(names: Sequence[str], turn: int) -> list[str]:
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
    pad: Callable[[str, int], str] | None = None,
    before: Callable[[], None] | None = None,
    meter: Meter | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[tuple[Job, Run]]:
    """Make the runs, filling the jobs' results; yields after each. What was filled in before an interruption stays.

    A prompt that follows another is asked after the baseline's answer to that one, so that all read the same text.
    pad(text, tokens): the text with so much context before it. before: called before each run.
    """
    baseline = next(iter(contestants))
    talks: dict[tuple[str, str], list[dict[str, str]]] = {}
    found = {(job.result.setting, job.result.prompt.name): job.result for job in jobs}
    for job in jobs:
        if before is not None:
            before()
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
        contestant = contestants[job.contestant]
        # This machine's energy is not that of a server elsewhere.
        own_meter = meter if getattr(contestant, "local", True) else None
        run = time_answer(contestant, talks[key], job.setting.params, meter=own_meter, clock=clock)
        job.result.runs.append(run)
        yield job, run


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
