"""What /health and /metrics say."""

from typing import Any

from dflash_mlx.server.metrics import counter, gauge, histogram
from dflash_mlx.server.service import Service

# A decode loop that has work and has not moved for so long is taken for stuck. A round takes seconds at most; the first
# use of a pair may measure and compile for longer.
STALLED_SECONDS = 120.0


def health_report(service: Service) -> dict[str, Any]:
    """`status` is "ok", "stalled" (work, but no progress) or "down"."""
    found = service.worker.status()
    stalled = found.seconds_since_progress > STALLED_SECONDS
    return {
        "status": "down" if not found.ready else "stalled" if stalled else "ok",
        "ready": found.ready,
        "model": service.names[0],
        "mode": found.mode,
        "seconds_since_progress": round(found.seconds_since_progress, 3),
        "active": found.active,
        "queued": found.queued,
    }


def metrics_text(service: Service) -> str:
    """Prometheus' text format."""
    http, found = service.metrics, service.worker.status()
    totals, cache = found.totals, found.cache
    by_load = {str(answers): count for answers, count in totals.drafted_by_load.items()}
    kept_by_load = {str(answers): count for answers, count in totals.accepted_by_load.items()}
    lines = [
        *counter("dflash_http_requests_total", "HTTP requests by route and status.", http.requests),
        *histogram("dflash_http_request_seconds", "Time from request to end of response.", http.request_seconds),
        *histogram("dflash_queued_seconds", "Time an answer waited for its turn.", http.queued_seconds),
        *histogram(
            "dflash_first_token_seconds", "Time from request to an answer's first token.", http.first_token_seconds
        ),
        *histogram("dflash_answer_tokens_per_second", "Speed of an answer.", http.tokens_a_second),
        *gauge("dflash_ready", "1 when answers can be made.", float(found.ready)),
        *gauge("dflash_drafting", "1 when a drafter is in use.", float(found.mode != "plain")),
        *gauge("dflash_active_answers", "Answers being made.", found.active),
        *gauge("dflash_queued_answers", "Answers waiting.", found.queued),
        *gauge(
            "dflash_seconds_since_progress",
            "Since the decode loop last moved, while there is work.",
            found.seconds_since_progress,
        ),
        *_labelled("dflash_answers_total", "Answers by how they ended.", "finish_reason", totals.finished),
        *_total("dflash_prompt_tokens_total", "Tokens of prompts.", totals.prompt_tokens),
        *_total("dflash_cached_tokens_total", "Tokens of prompts that were not computed again.", totals.cached_tokens),
        *_total("dflash_generated_tokens_total", "Tokens written.", totals.generated_tokens),
        *_total("dflash_rounds_total", "Passes of the target.", totals.rounds),
        *_total("dflash_drafted_tokens_total", "Drafts verified.", totals.drafted),
        *_total("dflash_accepted_tokens_total", "Drafts kept.", totals.accepted),
        *_positions("dflash_drafted_total", "Rounds that verified this draft position.", totals.drafted_by_position),
        *_positions("dflash_accepted_total", "Rounds that kept this draft position.", totals.accepted_by_position),
        *_labelled(
            "dflash_drafted_by_load_total", "Drafts verified, by answers that shared a round.", "answers", by_load
        ),
        *_labelled(
            "dflash_accepted_by_load_total", "Drafts kept, by answers that shared a round.", "answers", kept_by_load
        ),
        *gauge("dflash_round_answers", "Answers that shared the newest round.", totals.lanes),
        *gauge("dflash_round_width", "Drafts of each answer in the newest round.", totals.width),
        *histogram(
            "dflash_between_tokens_seconds", "Time from one token of an answer to the next.", totals.between_tokens
        ),
        *gauge("dflash_cache_entries", "Prefixes in the cache.", cache.entries),
        *gauge("dflash_cache_bytes", "Memory the prefix cache takes.", cache.bytes),
        *gauge("dflash_cache_limit_bytes", "Memory the prefix cache may take.", cache.limit_bytes),
        *_total("dflash_cache_hits_total", "Prompts that began with a cached prefix.", cache.hits),
        *_total("dflash_cache_misses_total", "Prompts that did not.", cache.misses),
        *_total("dflash_cache_evictions_total", "Prefixes that made room.", cache.evictions),
        *gauge("dflash_memory_active_bytes", "Memory MLX uses.", found.memory_active),
        *gauge("dflash_memory_peak_bytes", "The most it has used.", found.memory_peak),
        *gauge("dflash_memory_limit_bytes", "What models, caches and answers may take.", found.memory_limit),
    ]
    return "\n".join(lines) + "\n"


def _total(name: str, meaning: str, value: int) -> list[str]:
    return counter(name, meaning, {(): value})


def _labelled(name: str, meaning: str, label: str, values: dict[str, int]) -> list[str]:
    return counter(name, meaning, {((label, key),): value for key, value in values.items()})


def _positions(name: str, meaning: str, values: list[int]) -> list[str]:
    return counter(name, meaning, {(("position", str(i)),): value for i, value in enumerate(values, start=1)})
