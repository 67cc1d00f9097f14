"""What a benchmark keeps: runs, the prompts they answer, and the document that is written to results.json."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import mean
from typing import Any

from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.bench.statistics import middle

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Round:
    """One response of an answer: a round of `width` drafts, `depth` of which could be kept and `kept` were.

    A width of 0 is a plain step. ms: what it took, or since the response before it where that is not known.
    """

    ms: float
    width: int
    depth: int
    kept: int
    tokens: int

    def to_json(self) -> list[float]:
        return [round(self.ms, 3), self.width, self.depth, self.kept, self.tokens]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One answer of one contestant. `first_s` is the time to the first token, `wall_s` to the last one, in seconds.

    decode_tokens: those that came after the first response; decoding speed counts these over the time after it.
    rounds: of all responses after the first; empty where nothing is known about them. cached_tokens: of the prompt,
    were in memory already. None where something was not measured.
    """

    contestant: str
    token_ids: list[int]
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_s: float
    wall_s: float
    decode_tokens: int
    peak_memory_gb: float | None = None
    joules: float | None = None
    acceptance: dict[str, Any] | None = None
    rounds: list[Round] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    # The ids are a tokenizer's reading of the text: a server gives no ids.
    ids_from_text: bool = False

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def decode_s(self) -> float:
        return self.wall_s - self.first_s

    @property
    def decode_tps(self) -> float | None:
        """Tokens a second after the first; None for an answer of one response."""
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s > 0 else None

    @property
    def answer_tps(self) -> float | None:
        """Tokens a second from the request to the last token."""
        return self.tokens / self.wall_s if self.tokens and self.wall_s > 0 else None

    @property
    def prefill_tps(self) -> float | None:
        """Tokens of the prompt that were read each second before the first token came.

        None where most of them were in memory: then reading is the smaller part of that time.
        """
        read = self.prompt_tokens - self.cached_tokens
        return read / self.first_s if read > self.cached_tokens and self.first_s > 0 else None

    def to_json(self) -> dict[str, Any]:
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        known["rounds"] = [r.to_json() for r in self.rounds]
        return {**known, "decode_s": self.decode_s, "decode_tps": self.decode_tps}


@dataclass(kw_only=True)
class PromptResult:
    """The runs of one prompt in one setting, such as "temperature=0.7"; the setting is empty without a sweep."""

    prompt: BenchPrompt
    setting: str = ""
    runs: list[Run] = field(default_factory=list)

    def of(self, contestant: str) -> list[Run]:
        return [run for run in self.runs if run.contestant == contestant]

    def tps(self, contestant: str) -> float | None:
        """Median decoding speed over the repeats."""
        return middle(run.decode_tps for run in self.of(contestant))

    def speedup(self, contestant: str, baseline: str) -> float | None:
        """Of decoding, after the first token."""
        return ratio(self.tps(baseline), self.tps(contestant))

    def answer_speedup(self, contestant: str, baseline: str) -> float | None:
        """Of whole answers, from the request to the last token."""
        speeds = (middle(run.answer_tps for run in self.of(name)) for name in (baseline, contestant))
        return ratio(*speeds)

    def acceptance(self, contestant: str, key: str) -> float | None:
        """Median over the repeats in which a draft was verified."""
        counts = [run.acceptance for run in self.of(contestant) if run.acceptance and run.acceptance["rounds"]]
        return middle(float(count[key]) for count in counts)

    def plain_round_ms(self, contestant: str) -> float | None:
        """Milliseconds of a round without drafts, each of which gives a token: median over the repeats."""
        return middle(1000 / tps for run in self.of(contestant) if (tps := run.decode_tps))

    def drafted_round_ms(self, contestant: str) -> float | None:
        """Milliseconds of a round that verified drafts, on average: median over the repeats."""
        drafted = [[r.ms for r in run.rounds if r.width] for run in self.of(contestant)]
        return middle(mean(times) for times in drafted if times)

    def first_difference(self, contestant: str, baseline: str) -> int | None:
        """The earliest index at which an answer leaves its repeat's baseline; None: all are identical."""
        pairs = zip(self.of(baseline), self.of(contestant), strict=False)
        differences = [_difference(one, other) for one, other in pairs]
        return min((at for at in differences if at is not None), default=None)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.prompt.name,
            "category": self.prompt.category,
            "prompt": self.prompt.text,
            "follows": self.prompt.follows,
            "setting": self.setting,
            "runs": [run.to_json() for run in self.runs],
        }


@dataclass(frozen=True, kw_only=True)
class LoadRun:
    """Several streams of requests at the same time. first_s: of each request; gaps_s: between its later responses."""

    contestant: str
    streams: int
    requests: int
    tokens: int
    seconds: float
    first_s: list[float]
    gaps_s: list[float]

    @property
    def tps(self) -> float:
        """Tokens a second of all streams together, the time for reading prompts included."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "first_s": [round(s, 5) for s in self.first_s],
            "gaps_s": [round(s, 5) for s in self.gaps_s],
            "tps": self.tps,
        }


@dataclass(kw_only=True)
class Results:
    """Everything that was measured. facts: about the machine, the pair and the request.

    contestants: name -> what it is; the first is the baseline. main: the one that the report is about. comparable: by
    setting, those whose tokens should be the baseline's.
    """

    facts: dict[str, Any]
    contestants: dict[str, str]
    main: str
    comparable: dict[str, list[str]] = field(default_factory=dict)
    prompts: list[PromptResult] = field(default_factory=list)
    load: list[LoadRun] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        return next(iter(self.contestants))

    @property
    def others(self) -> list[str]:
        """All contestants but the baseline."""
        return list(self.contestants)[1:]

    @property
    def settings(self) -> list[str]:
        return list(dict.fromkeys(result.setting for result in self.prompts))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **self.facts,
            "contestants": self.contestants,
            "main": self.main,
            "comparable": self.comparable,
            "measured": self.machine,
            "prompts": [result.to_json() for result in self.prompts],
            "load": [run.to_json() for run in self.load],
        }


def _difference(one: Run, other: Run) -> int | None:
    """Where a server gives text alone, the same text is the same answer: it has no end token to compare."""
    if (one.ids_from_text or other.ids_from_text) and one.text.strip() == other.text.strip():
        return None
    return first_difference(one.token_ids, other.token_ids)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two token lists differ, the shorter one's length included; None if they are equal."""
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return at
    return None if len(a) == len(b) else min(len(a), len(b))


def ratio(below: float | None, above: float | None) -> float | None:
    """above / below, None where one of them is unknown or nothing."""
    return above / below if above and below else None
