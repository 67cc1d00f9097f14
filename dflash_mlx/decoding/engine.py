"""The decode loop: prefill, then rounds of draft, verify, accept, commit. Token ids only.

A round feeds the anchor (newest token, not yet in the target's cache) and W drafts to the target; W may be 0, which
is plain decoding. The drafts are a chain or, where target and policy allow, a tree (tree.py). While a round runs, what
can be is already queued behind it: the next draft at least, since the accepted count need not leave the device for
that. Where the policy wants a chain whatever the draft says, the next verification too, if the lengths of the caches
stay on the device (targets/device_cache.py). So the device waits for Python as little as it can, and the host reads
once a round.
"""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import mlx.core as mx

from dflash_mlx.decoding.accept import Outcome, Proposal, Strategy, for_trees, judge
from dflash_mlx.decoding.constraint import Bits, Guide, limit, mask_rows
from dflash_mlx.decoding.logprobs import TokenLogprob
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.tree import BRANCHES, DraftTree, Ranking, rank
from dflash_mlx.decoding.width import WidthPolicy
from dflash_mlx.sampling import LogitsProcessor

FinishReason = Literal["stop", "length"]
PREFILL_STEP = 2048
# Penalties look back at most this far (mlx-lm's default is 20 tokens).
_HISTORY = 64
# While drafting pauses, features wait for the drafter in batches of this many tokens.
_MAX_PENDING = 64


@dataclass
class Step:
    """What a round added to the answer: `tokens` (at least one); `num_accepted` of its `width` drafts stayed.

    `depth` is the most that could have stayed: all of a chain, a tree's longest path.
    """

    tokens: list[int]
    width: int
    depth: int
    num_accepted: int
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass
class Round:
    """A launched verify forward: `fed` rows from position `base` on, its outcome still on the device.

    features: (1, L, taps * D), of the rows that may be kept, in the order in which they would be.
    """

    base: int | mx.array
    outcome: Outcome
    features: mx.array | None
    width: int
    drafted: int = 0
    absorbed: bool = False

    @property
    def fed(self) -> int:
        return self.width + 1

    @property
    def depth(self) -> int:
        return int(self.outcome.tokens.shape[0]) - 1

    @cached_property
    def end(self) -> int | mx.array:
        """Positions the target holds once the round is committed; what it kept of the drafts need not be known yet."""
        return self.base + 1 + self.outcome.num_accepted if self.width else self.base + 1


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
    """Continue `prompt`, of which the session may already hold a prefix.

    Yields a Step a round; the last one has a finish_reason and ends with an end-of-sequence token or at
    `max_tokens`. What was yielded is committed, so a consumer may stop after any step and use the session
    again. `guide` says which tokens may come; `top_logprobs`, how many alternatives to report with the log-probability
    of each token (None: report nothing). `on_prefill(done, total)` is called after each prefill chunk; it may raise to
    cancel.
    """
    session.settle()
    session.turn += 1
    turn = session.turn
    branches = policy.branches and not processors and guide is None and session.can_branch()
    if branches:
        strategy = for_trees(strategy)
    launch = partial(verify, session, strategy=strategy, processors=processors, top_logprobs=top_logprobs)
    try:
        prefill(session, prompt[:-1], on_prefill)
        anchor = prompt[-1]
        history = mx.array(prompt[-_HISTORY:]) if processors else None
        can_queue_ahead = not processors and guide is None and session.can_queue_ahead()
        remaining = max_tokens
        bits = guide.allowed([])[1] if guide is not None else None
        current = launch(mx.array([anchor]), None, history=history, bits=bits)
        last_read, idle = time.perf_counter(), 0.0
        while True:
            ahead: Round | None = None
            proposal: Proposal | None = None
            ranking: Ranking | None = None
            # The round in flight yields one token at least, and the next one its own.
            drafted = max(0, min(policy.next_width(), remaining - 2)) if session.drafter else 0
            if drafted:
                proposal = draft(session, current, drafted, strategy)
                confident = policy.reads_confidence
                # A tree's rows are put in order on the host.
                if can_queue_ahead and not confident and current.outcome.path is None:
                    session.to_device(mx.array(current.end))
                    ahead = launch(current.outcome.next_anchor, proposal)
                    ahead.drafted = drafted
                else:
                    if confident:
                        ranking = consider(session, proposal, strategy, current.end + 1, branches=branches)
                    mx.async_eval(
                        *([] if branches and ranking else [proposal.tokens]), *([ranking.packed] if ranking else [])
                    )
            elif current.width == 0 and remaining > 1 and guide is None and session.device is None:
                if history is not None:
                    history = mx.concatenate([history, current.outcome.tokens])[-_HISTORY:]
                ahead = launch(current.outcome.next_anchor, None, history=history)

            reading = current.outcome.read(ranking, proposal.tokens if proposal and guide is not None else None)
            tokens, finish_reason = clip(reading.tokens, remaining, eos_ids)
            num_accepted = min(reading.num_accepted, len(tokens))
            commit(session, current, [anchor, *tokens[:-1]], reading.path[: len(tokens)])
            if ahead is None:
                session.to_host()
            anchor = tokens[-1]
            remaining -= len(tokens)
            now = time.perf_counter()
            policy.observe(
                drafted=current.drafted,
                width=current.width,
                num_accepted=num_accepted,
                path=reading.path,
                # A slow consumer's time is not the device's; such rounds are not timed.
                seconds=now - last_read if idle < 0.5 * (now - last_read) else None,
            )
            last_read = now

            if finish_reason is None and ahead is None:
                if history is not None:
                    history = mx.concatenate([history, mx.array(tokens)])[-_HISTORY:]
                tree: DraftTree | None = None
                if reading.candidates is not None:
                    tree = policy.choose(reading.candidates.shortened(remaining - 1))
                if proposal is not None:
                    proposal = proposal.shortened(tree.size if tree is not None else remaining - 1)
                if guide is not None:
                    guide.advance(tokens)
                    proposal, bits = limit(guide, proposal, reading.drafts)
                drafts = tree if branches and tree is not None else proposal
                ahead = launch(mx.array([anchor]), drafts, history=history, bits=bits)
                ahead.drafted = drafted
            logprobs = reading.logprobs[: len(tokens)]
            yield Step(tokens, current.width, current.depth, num_accepted, finish_reason, logprobs)
            if finish_reason is not None:
                return
            assert ahead is not None
            idle = time.perf_counter() - now
            current = ahead
    finally:
        if session.turn == turn:
            session.settle()


def prefill(session: Session, tokens: list[int], on_prefill: Callable[[int, int], None] | None = None) -> None:
    """Feed `tokens` beyond those that the session holds (which must be a prefix of them)."""
    for done, total in prefill_chunks(session, tokens):
        if on_prefill is not None:
            on_prefill(done, total)


def prefill_chunks(session: Session, tokens: list[int]) -> Iterator[tuple[int, int]]:
    """`prefill` a chunk at a time; yields (done, total) after each, when the session is in order and may be left.

    Chunks are those of mlx-lm's plain decoding, and so are the numbers. Features go straight into the drafter's cache;
    vocabulary logits are never computed.
    """
    start = len(session.tokens)
    for at in range(start, len(tokens), PREFILL_STEP):
        chunk = tokens[at : at + PREFILL_STEP]
        _, features = session.forward(mx.array([chunk]))
        session.in_flight = len(chunk)
        if features is not None:
            session.absorb_pending(features)
        mx.eval([c.state for c in [*session.target_cache, *session.draft_cache]])
        session.keep(range(len(chunk)), fed=len(chunk))
        session.in_flight = 0
        session.tokens += chunk
        mx.clear_cache()
        yield at + len(chunk) - start, len(tokens) - start


def draft(session: Session, after: Round, width: int, strategy: Strategy) -> Proposal:
    """Draft `width` tokens behind the round in flight, of which only the device knows how much it keeps.

    All its features go into the drafter's cache and the rejected ones are masked; `commit` trims them.
    """
    assert session.drafter is not None
    after.absorbed = True
    masks = mx.full((width,), session.drafter.config.mask_token_id, dtype=mx.uint32)
    block = mx.concatenate([after.outcome.next_anchor.astype(mx.uint32), masks])
    drafted = session.draft(after.features, block, end=after.end)
    return session.propose(strategy, drafted, anchor=block[:1], position=after.end + 1)


def consider(
    session: Session, proposal: Proposal, strategy: Strategy, position: int | mx.array, *, branches: bool
) -> Ranking:
    """What the policy is to choose from, of a draft that begins at `position`: a tree's drafts, or a chain's width.

    The chance that a chain is kept is that of its places' best tokens: it depends on the context alone, not on the
    tokens drawn, so choosing a width by it does not bias sampling.
    """
    ids = session.vocabulary.token_ids if session.vocabulary else None
    if not branches:
        return rank(proposal.logits, 1, ids)
    return rank(for_trees(strategy).preferences(proposal.logits, position, session.vocabulary), BRANCHES, ids)


def verify(
    session: Session,
    anchor: mx.array,
    drafts: Proposal | DraftTree | None,
    strategy: Strategy,
    processors: list[LogitsProcessor] | None,
    history: mx.array | None = None,
    bits: Bits | None = None,
    top_logprobs: int | None = None,
) -> Round:
    """Launch the target over the anchor and the drafts, and the judgement of them.

    history: the tokens before, the anchor included, for the processors. bits: what may come at each row. Neither goes
    with a tree. `session.in_flight` counts what was fed on top of what is committed.
    """
    base = session.next_position
    tree = drafts if isinstance(drafts, DraftTree) and drafts.size else None
    proposal = drafts if isinstance(drafts, Proposal) and drafts.width else None
    tokens = [mx.array(tree.tokens)] if tree else [proposal.tokens.astype(mx.uint32)] if proposal else []
    fed = mx.concatenate([anchor.astype(mx.uint32), *tokens])
    logits, features = session.forward(fed[None], revocable=bool(tokens), tree=tree)
    session.in_flight += fed.shape[0]
    rows = logits[0]
    if processors and history is not None:
        rows = process_rows(rows, proposal, history, processors)
    if bits is not None:
        rows = mask_rows(rows, bits)
    if tree is not None:
        outcome = judge(for_trees(strategy), tree, rows, base + 1)
        features = features[:, outcome.path] if features is not None else None
    else:
        outcome = strategy.accept(proposal, rows, base + 1)
    if top_logprobs is not None:
        outcome.report_logprobs(rows if outcome.path is None else rows[outcome.path], top_logprobs)
    mx.async_eval(outcome.packed, *([features] if features is not None else []))
    return Round(base, outcome, features, fed.shape[0] - 1)


def process_rows(
    rows: mx.array, proposal: Proposal | None, history: mx.array, processors: list[LogitsProcessor]
) -> mx.array:
    """Apply bias and penalties to each row (W + 1, V) with the tokens that precede it: history, then drafts."""
    processed = []
    for i in range(rows.shape[0]):
        before = mx.concatenate([history, proposal.tokens[:i]]) if proposal and i else history
        row = rows[i : i + 1]
        for processor in processors:
            row = processor(before, row)
        processed.append(row)
    return mx.concatenate(processed)


def commit(session: Session, finished: Round, kept: list[int], path: list[int]) -> None:
    """Keep `kept` (the anchor and accepted drafts), found at the rows `path`; the rest leaves both caches."""
    session.in_flight -= finished.fed
    session.keep(path, fed=finished.fed)
    session.tokens += kept
    if session.drafter is None or finished.features is None:
        return
    if not finished.absorbed:
        session.pending.append(finished.features[:, : len(kept)])
        if len(session.pending) >= _MAX_PENDING:
            session.absorb_pending()
        return
    if session.device is None:
        session.trim_drafts(len(session.tokens))


def clip(tokens: list[int], remaining: int, eos_ids: set[int]) -> tuple[list[int], FinishReason | None]:
    """Cut a round's tokens at the first end-of-sequence token and at the tokens still wanted."""
    for i, token in enumerate(tokens[:remaining]):
        if token in eos_ids:
            return tokens[: i + 1], "stop"
    if len(tokens) >= remaining:
        return tokens[:remaining], "length"
    return tokens, None
