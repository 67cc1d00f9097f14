"""One answer by itself: its prompt is read, then an engine with a single lane makes its rounds. Token ids only."""

from collections.abc import Callable, Generator, Iterator

from dflash_mlx.decoding.accept import Strategy
from dflash_mlx.decoding.constraint import Guide
from dflash_mlx.decoding.engine import Engine
from dflash_mlx.decoding.lane import Lane, Step
from dflash_mlx.decoding.policies import WidthPolicy
from dflash_mlx.decoding.session import Session
from dflash_mlx.runtime import free_unused_memory
from dflash_mlx.sampling import LogitsProcessor

# Tokens of a prompt that are fed at once, as mlx-lm does it.
PREFILL_STEP = 2048


def decode(
    session: Session,
    prompt: list[int],
    *,
    strategy: Strategy,
    policy: WidthPolicy,
    max_tokens: int,
    eos_ids: set[int],
    processors: list[LogitsProcessor] | None = None,
    guide: Guide | None = None,
    top_logprobs: int | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Generator[Step, None, None]:
    """Continue `prompt`, of which the session may already hold a prefix: an engine with a single lane.

    Yields a Step a round; the last one has a finish_reason and ends with an end-of-sequence token or at
    `max_tokens`. What was yielded is committed, so a consumer may stop after any step and use the session
    again. `on_prefill(done, total)` is called after each prefill chunk; it may raise to cancel.
    """
    session.settle()
    prefill(session, prompt[:-1], on_prefill)
    lane = Lane(
        session=session,
        prompt=prompt,
        strategy=strategy,
        policy=policy,
        max_tokens=max_tokens,
        eos_ids=eos_ids,
        processors=processors or [],
        guide=guide,
        top_logprobs=top_logprobs,
    )
    engine = Engine(session.target, session.drafter)
    engine.join(lane)
    try:
        while engine.lanes:
            for _, step in engine.advance():
                if isinstance(step, Exception):
                    raise step
                yield step
    finally:
        engine.leave(lane)


def prefill(session: Session, tokens: list[int], on_prefill: Callable[[int, int], None] | None = None) -> None:
    """Feed `tokens` beyond those that the session holds (which must be a prefix of them)."""
    for done, total in prefill_chunks(session, tokens):
        if on_prefill is not None:
            on_prefill(done, total)


def prefill_chunks(session: Session, tokens: list[int], *, most: int = PREFILL_STEP) -> Iterator[tuple[int, int]]:
    """`prefill` a chunk at a time; yields (done, total) after each, when the session is in order and may be left.

    Chunks are those of mlx-lm's plain decoding, and so are the numbers, unless they are to have fewer tokens (`most`).
    """
    start = len(session.tokens)
    while (at := len(session.tokens)) < len(tokens):
        session.feed(tokens[at : at + min(PREFILL_STEP, most)])
        free_unused_memory()
        yield len(session.tokens) - start, len(tokens) - start
