"""What the worker has done and is doing, for /health and /metrics."""

from dataclasses import dataclass, field

from dflash_mlx.answer import GenerationResponse
from dflash_mlx.server.metrics import BETWEEN_TOKENS, Histogram


@dataclass(kw_only=True)
class Totals:
    """Counts since the start. `finished` is by reason: stop, length, cancelled, error, refused."""

    finished: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    # Rounds that verified, and that kept, the draft at position 1, 2, ...
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    # By how many answers shared the round: drafts verified, and kept.
    drafted_by_load: dict[int, int] = field(default_factory=dict)
    accepted_by_load: dict[int, int] = field(default_factory=dict)
    between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS))
    # Of the newest round.
    lanes: int = 0
    width: int = 0

    def count_finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def count_round(self, response: GenerationResponse, *, lanes: int = 1) -> None:
        """What a round brought to one of the `lanes` answers that shared it."""
        self.rounds += 1
        self.lanes, self.width = lanes, response.width or 0
        self.drafted_by_load[lanes] = self.drafted_by_load.get(lanes, 0) + (response.width or 0)
        self.accepted_by_load[lanes] = self.accepted_by_load.get(lanes, 0) + (response.num_accepted or 0)
        self.generated_tokens += len(response.token_ids)
        accepted = response.num_accepted or 0
        self.drafted += response.width or 0
        self.accepted += accepted
        _count_positions(self.drafted_by_position, response.depth or 0)
        _count_positions(self.accepted_by_position, accepted)


def _count_positions(counts: list[int], upto: int) -> None:
    counts.extend([0] * (upto - len(counts)))
    for i in range(upto):
        counts[i] += 1


@dataclass(frozen=True, kw_only=True)
class CacheStatus:
    """The prefix cache: what it holds, and how requests fared with it."""

    entries: int
    bytes: int
    limit_bytes: int
    hits: int
    misses: int
    evictions: int


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """A look at the worker from outside.

    seconds_since_progress: since the decode loop last moved, while there is work; 0 when idle. Memory is MLX's, in
    bytes; `memory_limit` is what models, caches and answers may take together. error: why the worker stopped.
    """

    ready: bool
    mode: str
    active: int
    queued: int
    seconds_since_progress: float
    totals: Totals
    cache: CacheStatus
    memory_active: int
    memory_peak: int
    memory_limit: int
    error: str | None = None
