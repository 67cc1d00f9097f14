"""How much memory answers take, and how much there is for them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dflash_mlx.caches.own import arrays_of
from dflash_mlx.caches.rows import room_for
from dflash_mlx.decoding.decode import PREFILL_STEP
from dflash_mlx.generation import fitting_max_tokens
from dflash_mlx.pair import ModelPair
from dflash_mlx.runtime import backend, free_unused_memory
from dflash_mlx.scoring import SCORED_AT_ONCE
from dflash_mlx.server.ticket import Job, TooLargeError

# The share of the machine's memory that models, caches and answers may take: the system and other programs need some.
_SHARES = {"metal": 0.75, "cuda": 0.9, "cpu": 0.75}
_PROBE_TOKENS = 32


@dataclass(frozen=True)
class Need:
    """Bytes of one answer: its caches at their longest, and what a forward needs on top while it runs."""

    caches: int
    work: int


@dataclass(frozen=True)
class SessionSize:
    """How a session's memory grows: `fixed` bytes, and for each layer's cache (bytes a position, most positions)."""

    fixed: int
    growing: tuple[tuple[int, int | None], ...]

    def bytes(self, tokens: int) -> int:
        steps = room_for(tokens)
        return self.fixed + sum(rate * (steps if most is None else min(steps, most)) for rate, most in self.growing)


class MemoryBudget:
    """What the models leave over for caches and answers, `room` bytes, and what answers need of it.

    `limit` is for all of it together, by default most of the machine's memory.
    """

    def __init__(self, pair: ModelPair, limit: int | None = None) -> None:
        self.pair = pair
        self.limit = default_limit() if limit is None else limit
        self.room = 0
        self._sizes: dict[bool, SessionSize] = {}

    def measure(self, *, draft: bool) -> None:
        """Look at the loaded models, running them. Answers may be drafted if `draft` says so."""
        self._sizes = {drafted: measure_session(self.pair, draft=drafted) for drafted in {False, draft}}
        free_unused_memory()
        self.room = self.limit - mx.get_active_memory()

    def need(self, job: Job, *, draft: bool) -> Need:
        prompt = len(job.prompt)
        tokens = prompt + fitting_max_tokens(self.pair, prompt, job.params.max_tokens)
        work = work_bytes(self.pair, prompt)
        if job.prompt_logprobs is not None:
            work += 4 * min(prompt, SCORED_AT_ONCE) * self.pair.target.vocab_size * 4
        return Need(self._sizes[draft].bytes(tokens + self.pair.block_size), work)

    def require_room(self, job: Job, *, draft: bool) -> None:
        """Raises TooLargeError for a job that would not fit even if nothing else were kept."""
        need = total_need([self.need(job, draft=draft)])
        if need > self.room:
            raise TooLargeError(
                f"this request needs {need / 1e9:.2f} GB for a prompt of {len(job.prompt)} tokens and up to "
                f"{job.params.max_tokens} tokens of answer, and the server has {max(self.room, 0) / 1e9:.2f} GB for "
                "that; shorten the prompt or ask for fewer tokens."
            )


def total_need(needs: Iterable[Need]) -> int:
    """Bytes of answers under way together: rows of one batch are all as long as the longest, and one forward runs."""
    needs = list(needs)
    longest = max((need.caches for need in needs), default=0)
    return len(needs) * longest + max((need.work for need in needs), default=0)


def default_limit() -> int:
    """Bytes that this machine can give to models, caches and answers."""
    machine = backend()
    limit = int(_SHARES[machine.kind] * machine.memory_bytes)
    if machine.kind == "metal":
        limit = min(limit, int(mx.device_info()["max_recommended_working_set_size"]))
    return limit


def measure_session(pair: ModelPair, *, draft: bool) -> SessionSize:
    """Feed a few tokens and look at the caches. Runs the models, which also warms them up."""
    session = pair.new_session(draft=draft)
    session.feed([1] * _PROBE_TOKENS)
    caches = [*session.target_cache, *session.draft_cache]
    mx.eval(arrays_of(caches))
    return session_size(caches, in_rows=pair.target.takes_rows())


def session_size(caches: list[Any], *, in_rows: bool) -> SessionSize:
    """What caches that hold something say about their growth: those with keys grow by the position.

    in_rows: answers are made in the rows of a batch.
    """
    fixed, growing = 0, []
    for cache in _flat(caches):
        size = sum(array.nbytes for array in arrays_of(cache))
        keys = getattr(cache, "keys", None)
        if keys is None:
            fixed += size
        else:
            positions = (keys if isinstance(keys, mx.array) else keys[0]).shape[-2]
            window = None if in_rows else getattr(cache, "max_size", None)
            # A window holds the newest chunk besides; in a batch it is a mask over all positions.
            growing.append((size // positions, window + PREFILL_STEP if window else None))
    return SessionSize(fixed, tuple(growing))


def work_bytes(pair: ModelPair, tokens: int) -> int:
    """Roughly what a forward needs beside weights and caches, at its largest: a prefill chunk, a block's logits."""
    target, size = pair.target, 4
    chunk = min(tokens, PREFILL_STEP)
    hidden = target.hidden_size
    inner = int(target.text_config("intermediate_size") or 4 * hidden)
    activations = chunk * (8 * hidden + 3 * inner) * size
    logits = 4 * pair.block_size * target.vocab_size * size
    # On a CPU, MLX's attention writes all its scores out.
    heads = int(target.text_config("num_attention_heads") or 1)
    scores = 2 * heads * chunk * tokens * size if backend().kind == "cpu" else 0
    return activations + logits + scores


def _flat(caches: Iterable[Any]) -> list[Any]:
    """Layers' caches, of which some models have several to a layer (mlx-lm's CacheList)."""
    return [flat for cache in caches for flat in (_flat(cache.caches) if hasattr(cache, "caches") else [cache])]
