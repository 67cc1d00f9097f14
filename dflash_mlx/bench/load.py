"""Several streams of requests at the same time: tokens a second of all, time to the first token and between tokens."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, pairwise
from typing import Protocol

from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.bench.record import LoadRun
from dflash_mlx.generation import Prompt
from dflash_mlx.sampling import SamplingParams

# A stream alone answers this many prompts, so that its figure is not that of a single one.
FEWEST_REQUESTS = 4


@dataclass(frozen=True)
class Arrival:
    """A piece of the answer to request `index`, at a time of `time.perf_counter`.

    sent: when the request began; None where requests wait for a place in the same process.
    """

    index: int
    at: float
    tokens: int
    last: bool
    sent: float | None = None


class Crowd(Protocol):
    """A contestant that answers many prompts at the same time."""

    @property
    def name(self) -> str: ...

    def answer_many(self, prompts: Sequence[Prompt], params: SamplingParams, streams: int) -> Iterator[Arrival]: ...


def requests_for(prompts: Sequence[BenchPrompt], streams: int) -> list[str]:
    """What `streams` streams answer: the prompts in their order, from the beginning again where there are too few."""
    texts = [prompt.text for prompt in prompts if prompt.follows is None]
    return list(islice(cycle(texts), max(FEWEST_REQUESTS, streams)))


def run_load(contestant: Crowd, texts: Sequence[str], params: SamplingParams, *, streams: int) -> LoadRun:
    """Answer all requests, at most `streams` at the same time."""
    started = time.perf_counter()
    prompts = [[{"role": "user", "content": text}] for text in texts]
    arrivals = list(contestant.answer_many(prompts, params, streams))
    return summarize(contestant.name, arrivals, started=started, streams=streams)


def summarize(name: str, arrivals: Iterable[Arrival], *, started: float, streams: int) -> LoadRun:
    """Times of arrival become times of waiting.

    Where requests wait for a place, each begins when the one before it in its place has ended: the first `streams` of
    them at the start, then one at each end.
    """
    by_request: dict[int, list[Arrival]] = {}
    for arrival in arrivals:
        by_request.setdefault(arrival.index, []).append(arrival)
    ends = sorted(pieces[-1].at for pieces in by_request.values())
    first_s, gaps_s = [], []
    for index, pieces in sorted(by_request.items()):
        begun = pieces[0].sent
        if begun is None:
            begun = started if index < streams else ends[index - streams]
        first_s.append(pieces[0].at - begun)
        # Tokens that come together came with no time between them.
        for before, piece in pairwise(pieces):
            gaps_s += [piece.at - before.at] + [0.0] * (piece.tokens - 1) if piece.tokens else []
    return LoadRun(
        contestant=name,
        streams=streams,
        requests=len(by_request),
        tokens=sum(arrival.tokens for pieces in by_request.values() for arrival in pieces),
        seconds=ends[-1] - started if ends else 0.0,
        first_s=first_s,
        gaps_s=gaps_s,
    )
