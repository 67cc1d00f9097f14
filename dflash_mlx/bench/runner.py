"""Run prompts plainly and with drafting, taking turns, and keep what each run took."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, Protocol

from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.generation import GenerationResponse, stream_generate
from dflash_mlx.pair import ModelPair
from dflash_mlx.sampling import SamplingParams

Mode = Literal["plain", "drafted"]


class Stream(Protocol):
    """What `stream_generate` looks like to the benchmark."""

    def __call__(
        self, pair: ModelPair, prompt: str, params: SamplingParams, *, draft: bool
    ) -> Iterator[GenerationResponse]: ...


@dataclass(frozen=True, kw_only=True)
class Run:
    """One answer. `first_s` is the time to the first token, `wall_s` to the last one, both in seconds."""

    mode: Mode
    token_ids: list[int]
    finish_reason: str | None
    prompt_tokens: int
    first_s: float
    wall_s: float
    # Tokens that came after the first response; decoding speed counts these over the time after it.
    decode_tokens: int
    peak_memory_gb: float
    acceptance: dict[str, Any] | None
    notices: list[str]

    @property
    def decode_s(self) -> float:
        return self.wall_s - self.first_s

    @property
    def decode_tps(self) -> float | None:
        """Tokens a second after the first; None for an answer of one response."""
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s > 0 else None


@dataclass(kw_only=True)
class PromptResult:
    """The runs of one prompt, and what they come to."""

    prompt: BenchPrompt
    runs: list[Run] = field(default_factory=list)

    def of(self, mode: Mode) -> list[Run]:
        return [run for run in self.runs if run.mode == mode]

    def tps(self, mode: Mode) -> float | None:
        """Median decoding speed over the repeats."""
        return _median(run.decode_tps for run in self.of(mode))

    def first_s(self, mode: Mode) -> float | None:
        """Median time to the first token over the repeats."""
        return _median(run.first_s for run in self.of(mode))

    @property
    def speedup(self) -> float | None:
        plain, drafted = self.tps("plain"), self.tps("drafted")
        return drafted / plain if plain and drafted else None

    def acceptance(self, key: Literal["mean_acceptance_length", "acceptance_rate"]) -> float | None:
        """Median over the repeats in which a draft was verified."""
        counts = [run.acceptance for run in self.of("drafted") if run.acceptance and run.acceptance["rounds"]]
        return _median(float(count[key]) for count in counts)

    @property
    def first_difference(self) -> int | None:
        """The earliest index at which a drafted answer leaves its repeat's plain one; None: all are identical."""
        pairs = zip(self.of("plain"), self.of("drafted"), strict=False)
        differences = [first_difference(plain.token_ids, drafted.token_ids) for plain, drafted in pairs]
        return min((at for at in differences if at is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        compared = bool(self.of("plain") and self.of("drafted"))
        return {
            "name": self.prompt.name,
            "category": self.prompt.category,
            "prompt": self.prompt.text,
            "plain_tps": self.tps("plain"),
            "drafted_tps": self.tps("drafted"),
            "speedup": self.speedup,
            "mean_acceptance_length": self.acceptance("mean_acceptance_length"),
            "acceptance_rate": self.acceptance("acceptance_rate"),
            "identical": self.first_difference is None if compared else None,
            "first_difference": self.first_difference,
            "runs": [{**asdict(run), "decode_s": run.decode_s, "decode_tps": run.decode_tps} for run in self.runs],
        }


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two token lists differ, the shorter one's length included; None if they are equal."""
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return at
    return None if len(a) == len(b) else min(len(a), len(b))


def run_prompt(
    pair: ModelPair,
    prompt: BenchPrompt,
    params: SamplingParams,
    *,
    mode: Mode,
    stream: Stream = stream_generate,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """One timed answer to a prompt, from an empty cache."""
    token_ids: list[int] = []
    notices: list[str] = []
    first_s, first_tokens = 0.0, 0
    response: GenerationResponse | None = None
    started = clock()
    for response in stream(pair, prompt.text, params, draft=mode == "drafted"):
        now = clock() - started
        if not token_ids:
            first_s, first_tokens = now, len(response.token_ids)
        token_ids += response.token_ids
        if response.notice:
            notices.append(response.notice)
    assert response is not None, "a stream ends with a response"
    return Run(
        mode=mode,
        token_ids=token_ids,
        finish_reason=response.finish_reason,
        prompt_tokens=response.prompt_tokens,
        first_s=first_s,
        wall_s=now,
        decode_tokens=len(token_ids) - first_tokens,
        peak_memory_gb=response.peak_memory_gb,
        acceptance=response.acceptance.to_json() if response.acceptance else None,
        notices=notices,
    )


def run_bench(
    pair: ModelPair,
    results: Sequence[PromptResult],
    params: SamplingParams,
    *,
    repeat: int = 1,
    draft: bool = True,
    stream: Stream = stream_generate,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[PromptResult, Run]]:
    """Run every prompt `repeat` times in each mode, filling `results`; yields after each run.

    The modes take turns, and so does which of them goes first: a machine that grows warm slows both alike. What was
    filled in before an interruption stays usable. draft=False runs the plain mode only.
    """
    for turn in range(repeat):
        for index, result in enumerate(results):
            for mode in order(turn + index, draft=draft):
                run = run_prompt(pair, result.prompt, params, mode=mode, stream=stream, clock=clock)
                result.runs.append(run)
                yield result, run


def order(turn: int, *, draft: bool = True) -> tuple[Mode, ...]:
    """Which modes a turn runs, in which order."""
    if not draft:
        return ("plain",)
    return ("plain", "drafted") if turn % 2 == 0 else ("drafted", "plain")


def warm_up(
    pair: ModelPair,
    prompt: BenchPrompt,
    params: SamplingParams,
    *,
    draft: bool = True,
    stream: Stream = stream_generate,
) -> None:
    """An answer in each mode that does not count: kernels are compiled and weights read on first use."""
    for mode in order(0, draft=draft):
        run_prompt(pair, prompt, params, mode=mode, stream=stream)


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
