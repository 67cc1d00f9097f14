"""Drafting with DFlash 2's selector: each draft is one of a few candidates, scored by the draft before it."""

from typing import Protocol

import mlx.core as mx

from dflash_mlx.drafters.contract import Chooser, Drafted, DraftVocabulary, Proposal, TreeChooser
from dflash_mlx.drafters.growing import grow
from dflash_mlx.drafters.ranking import BRANCHES, Ranking, rank


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
    tokens, unary, links = _candidates(selector, hidden, logits, vocabulary)
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


def grow_paths(
    selector: Selector,
    chooser: TreeChooser,
    *,
    hidden: mx.array,
    logits: mx.array,
    anchor: mx.array,
    position: int | mx.array,
    vocabulary: DraftVocabulary,
) -> Drafted:
    """Grow what a tree of drafts after `anchor` (1,) is chosen from, without leaving the device.

    hidden: (W, D), logits: (W, n) for the vocabulary's n tokens. All candidates of a place are scored after each one of
    the place before it, at once. A candidate's chance is the selector's choice among the candidates, times the head's
    chance that the token is one of them at all.
    """
    tokens, unary, links = _candidates(selector, hidden, logits, vocabulary)
    places, count = tokens.shape
    previous = mx.concatenate([mx.broadcast_to(anchor.astype(tokens.dtype), (1, count)), tokens[:-1]])
    scores = selector.scores(unary[:, None], links[:, None], previous)
    scores = chooser.preferences(scores, position, DraftVocabulary(tokens, vocabulary.size))
    ranking = rank(scores.reshape(-1, count), BRANCHES)
    branches = ranking.token_ids.shape[1]
    unary, total = unary.astype(mx.float32), mx.logsumexp(logits.astype(mx.float32), axis=-1)
    among = mx.logsumexp(unary, axis=-1) - total
    log_probs = (ranking.log_probs.reshape(places, -1) + among[:, None]).reshape(-1, branches)
    # Candidates are counted through all places. What may follow one is said in the row of the same candidate, one place
    # further; the first place says the same in all its rows.
    followers = ranking.token_ids + (mx.arange(places * count) // count * count)[:, None]

    def follow(ends: mx.array, parents: mx.array, visible: mx.array) -> Ranking:
        rows = ends + count
        return Ranking(followers[rows], log_probs[rows])

    grown = grow(Ranking(followers[:1], log_probs[:1]), follow, places)
    grown.token_ids = tokens.flatten()[grown.token_ids]
    # A policy compares trees with chains, whose chances are the head's.
    return Drafted(grown.token_ids[grown.best][None], log_probs=(unary.max(axis=-1) - total)[None], grown=grown)


def _candidates(
    selector: Selector, hidden: mx.array, logits: mx.array, vocabulary: DraftVocabulary
) -> tuple[mx.array, mx.array, mx.array]:
    """What each of W places is chosen among: tokens (W, top_k), their logits, and their links (W, top_k, rank)."""
    columns = selector.candidates(logits)
    tokens = vocabulary.token_ids[columns]
    return tokens, mx.take_along_axis(logits, columns, axis=-1), selector.links(hidden, tokens)
