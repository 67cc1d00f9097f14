"""Drafting a path: each draft is chosen among a few candidates, scored by the draft before it (DFlash 2's selector)."""

from typing import Protocol

import mlx.core as mx

from dflash_mlx.drafters.contract import Chooser, DraftVocabulary, Proposal


class Selector(Protocol):
    """See `drafters.dflash2.PathSelector`."""

    def candidates(self, logits: mx.array) -> mx.array: ...

    def links(self, hidden: mx.array, candidates: mx.array) -> mx.array: ...

    def scores(self, unary: mx.array, links: mx.array, previous: mx.array) -> mx.array: ...


def propose_path(
    selector: Selector,
    strategy: Chooser,
    *,
    hidden: mx.array,
    logits: mx.array,
    anchor: mx.array,
    position: int | mx.array,
    vocabulary: DraftVocabulary,
) -> Proposal:
    """Draft W tokens after `anchor` (1,), left to right, without leaving the device.

    hidden: (W, D), logits: (W, n) for the vocabulary's n tokens. At each position the strategy chooses among the
    candidates as it would among a small vocabulary, so the distributions it reports are those it drew from, and its
    acceptance stays lossless.
    """
    columns = selector.candidates(logits)
    tokens = vocabulary.token_ids[columns]
    unary = mx.take_along_axis(logits, columns, axis=-1)
    links = selector.links(hidden, tokens)
    previous = anchor
    steps: list[Proposal] = []
    for i in range(logits.shape[0]):
        scores = selector.scores(unary[i : i + 1], links[i : i + 1], previous)
        few = DraftVocabulary(tokens[i], vocabulary.size)
        steps.append(strategy.propose(scores, position + i, few))
        previous = steps[-1].tokens
    probs = [step.probs for step in steps if step.probs is not None]
    return Proposal(
        mx.concatenate([step.tokens for step in steps]),
        mx.concatenate(probs) if probs else None,
    )
