"""Choosing tokens: how a block is drafted from logits, and how much of it the target keeps.

Three strategies, all lossless:

- `Greedy` (temperature 0): a draft is kept while it is the target's best token.
- `Coupled` (temperature above 0 with a seed): the target draws its token at each position with noise that depends
  on seed and position only (the Gumbel-max trick), and a draft is kept while it equals that token. So the answer is
  the same for any drafter and any width, and with none.
- `Rejection` (temperature above 0 without a seed): speculative sampling (arXiv 2211.17192, algorithm 1). A draft x
  is kept with probability min(1, target_probs[x] / draft_probs[x]); the first one refused is replaced by a draw from
  the residual distribution. It keeps the most drafts that any lossless scheme can.

A tree of drafts is judged by the target's own token at each of its rows, greedy or coupled (`for_trees`).

A strategy belongs to one answer. Everything stays on the device; the host reads one small array a round
(`Outcome.read`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, cast

import mlx.core as mx
import numpy as np

from dflash_mlx.constants import constant
from dflash_mlx.decoding.tree import DraftTree, walk
from dflash_mlx.drafters.contract import DraftVocabulary, Proposal, TreeChooser, best_tokens
from dflash_mlx.sampling import SamplingParams, sampling_scores
from dflash_mlx.tree_steps import Walk


@dataclass
class Outcome:
    """What the target made of drafts of which at most D can be kept: all W of a chain, or a tree's longest path.

    Of one answer, or with a first axis (B,) of several. num_accepted: () int, drafts kept. tokens: (D + 1,): the kept
    drafts, then at index `num_accepted` the target's own token; what comes after it is meaningless. walk: through a
    tree, where that is how they came about. further: (n,) uint32, what else the host wants to know then. depth: D.
    """

    num_accepted: mx.array
    tokens: mx.array
    walk: Walk | None = None
    further: mx.array | None = None
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        self.depth = int(self.tokens.shape[-1]) - 1

    @classmethod
    def of_tree(cls, walk: Walk, further: mx.array | None = None) -> "Outcome":
        """Of the only answer, (1,) and (1, D + 1)."""
        return cls(walk.num_accepted, walk.tokens, walk, further)

    @cached_property
    def packed(self) -> mx.array:
        """All of it as one array of uint32, so that the host reads once.

        An array of its own: on CUDA, MLX moves what the host reads to other memory, even while a pass that was launched
        ahead still reads the old.
        """
        if self.walk is not None:
            said = self.walk.said
            return said if self.further is None else mx.concatenate([said, self.further[None]], axis=1)
        if self.depth == 0:
            return self.tokens.astype(mx.uint32) + constant(0, mx.uint32)
        count = self.num_accepted[..., None].astype(mx.uint32)
        return mx.concatenate([count, self.tokens.astype(mx.uint32)], axis=-1)

    @property
    def next_anchors(self) -> mx.array:
        """The target's own token for each answer, (B,), still on the device."""
        if self.walk is not None:
            return self.walk.anchor
        if self.depth == 0:
            return self.tokens[:, 0]
        return mx.take_along_axis(self.tokens, self.num_accepted[:, None], axis=-1)[:, 0]

    @classmethod
    def stack(cls, outcomes: Sequence["Outcome"], depth: int) -> "Outcome":
        """One outcome of several answers' chains, of which at most `depth` drafts each can be kept."""
        if len(outcomes) == 1:
            [one] = outcomes
            return cls(one.num_accepted[None], one.tokens[None])
        tokens = [mx.pad(o.tokens, (0, depth - o.depth)) if o.depth < depth else o.tokens for o in outcomes]
        return cls(mx.stack([o.num_accepted for o in outcomes]), mx.stack(tokens))

    def read(self) -> list["Reading"]:
        """Wait for the device, and learn what each answer gained."""
        values = np.array(self.packed)
        if self.walk is not None:
            (count, *tokens), others = values[0, : self.depth + 2].tolist(), values[0, self.depth + 2 :]
            promised, depth = others[:2].view(np.float32).tolist()
            further = others[2:] if self.further is not None else None
            return [Reading(count, tokens[: count + 1], int(depth), promised, further)]
        numbers = values.tolist()
        if self.depth == 0:
            return [Reading(0, own, 0) for own in numbers]
        return [Reading(count, tokens[: count + 1], self.depth) for count, *tokens in numbers]


class Reading(NamedTuple):
    """What the host learns of an answer's round: the drafts kept, the num_accepted + 1 tokens gained, how many drafts
    could be kept, and of a tree how many were promised, and what else was asked for (`Outcome.further`)."""

    num_accepted: int
    tokens: list[int]
    depth: int
    promised: float | None = None
    further: np.ndarray | None = None


class Strategy(Protocol):
    """How tokens are chosen. `position` is the absolute position of the first token in question."""

    def propose(self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None) -> Proposal:
        """Draft from the drafter's logits, (W, V), or (W, n) when it has a `vocabulary` of its own."""

    def accept(self, proposal: Proposal | None, logits: mx.array, position: int | mx.array) -> Outcome:
        """Judge the drafts by the target's logits for the anchor and each draft, (W + 1, V)."""


class TreeStrategy(Strategy, TreeChooser, Protocol):
    """A strategy by which every token is the target's own choice, so that it can be found in a tree."""

    def choose(self, logits: mx.array, position: int | mx.array, tree: DraftTree) -> mx.array:
        """The target's own token at each row of logits (N + 1, V), (N + 1,); `position` is that after the anchor's."""


class Greedy:
    def propose(
        self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None = None
    ) -> Proposal:
        return Proposal(best_tokens(logits, vocabulary))

    def accept(self, proposal: Proposal | None, logits: mx.array, position: int | mx.array) -> Outcome:
        return match(proposal.tokens if proposal else None, mx.argmax(logits, axis=-1))

    def preferences(
        self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None = None
    ) -> mx.array:
        return logits

    def choose(self, logits: mx.array, position: int | mx.array, tree: DraftTree) -> mx.array:
        return mx.argmax(logits, axis=-1)


class Coupled:
    def __init__(self, params: SamplingParams, *, seed: int | None = None) -> None:
        self.params = params
        chosen = params.seed if seed is None else seed
        assert chosen is not None
        self.seed = chosen

    def propose(
        self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None = None
    ) -> Proposal:
        return Proposal(best_tokens(self.preferences(logits, position, vocabulary), vocabulary))

    def accept(self, proposal: Proposal | None, logits: mx.array, position: int | mx.array) -> Outcome:
        noise = self._noise(position, *logits.shape)
        return match(proposal.tokens if proposal else None, self._draw(logits, noise))

    def preferences(
        self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None = None
    ) -> mx.array:
        noise = self._noise(position, logits.shape[0], vocabulary.size if vocabulary else logits.shape[-1])
        if vocabulary is not None:
            ids = vocabulary.token_ids
            noise = noise[:, ids] if ids.ndim == 1 else mx.take_along_axis(noise, ids, axis=1)
        return sampling_scores(logits, self.params) + noise.reshape(len(noise), *[1] * (logits.ndim - 2), -1)

    def choose(self, logits: mx.array, position: int | mx.array, tree: DraftTree) -> mx.array:
        return self._draw(logits, self._noise(position, tree.depth + 1, logits.shape[1])[tree.depths])

    def _draw(self, logits: mx.array, noise: mx.array) -> mx.array:
        return mx.argmax(sampling_scores(logits, self.params) + noise, axis=-1)

    def _noise(self, position: int | mx.array, count: int, size: int) -> mx.array:
        """Standard Gumbel noise, (count, size), keyed by seed and position: the same whenever it is asked for."""
        positions = mx.arange(count, dtype=mx.uint32) + mx.array(position, dtype=mx.uint32)
        keys = mx.stack([mx.full(positions.shape, self.seed, dtype=mx.uint32), positions], axis=1)
        return mx.stack([mx.random.gumbel((size,), key=key) for key in keys])


class Rejection:
    def __init__(self, params: SamplingParams, *, seed: int | None = None) -> None:
        self.params = params
        self.seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        self.draws = 0

    def propose(
        self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None = None
    ) -> Proposal:
        scores = sampling_scores(logits, self.params)
        tokens, probs = mx.random.categorical(scores, key=self._next_key()), mx.softmax(scores, axis=-1)
        if vocabulary is None:
            return Proposal(tokens, probs)
        return Proposal(vocabulary.token_ids[tokens], vocabulary.widen(probs, elsewhere=0.0))

    def accept(self, proposal: Proposal | None, logits: mx.array, position: int | mx.array) -> Outcome:
        scores = sampling_scores(logits, self.params)
        if proposal is None:
            return Outcome(constant(0, mx.int32), mx.random.categorical(scores, key=self._next_key()))
        assert proposal.probs is not None
        return reject(proposal.tokens, proposal.probs, mx.softmax(scores, axis=-1), self._next_key())

    def _next_key(self) -> mx.array:
        self.draws += 1
        return mx.array([self.seed, self.draws], dtype=mx.uint32)


def choose_strategy(params: SamplingParams) -> Strategy:
    if params.temperature == 0:
        return Greedy()
    return Rejection(params) if params.seed is None else Coupled(params)


def for_trees(strategy: Strategy) -> TreeStrategy:
    """The strategy for an answer whose rounds are trees: a tree's rows cannot be tried by rejection one after another.

    It holds for the whole answer: whether a tree is grown depends on the noise that then chooses the token.
    """
    if isinstance(strategy, Rejection):
        return Coupled(strategy.params, seed=strategy.seed)
    return cast("TreeStrategy", strategy)


def match(drafts: mx.array | None, choices: mx.array) -> Outcome:
    """Keep drafts (..., W) while they equal the target's choices, (..., W + 1)."""
    if drafts is None:
        return Outcome(constant(0, mx.int32, choices.shape[:-1]), choices)
    agrees = (drafts == choices[..., :-1]).astype(mx.int32)
    return Outcome(mx.cumprod(agrees, axis=-1).sum(axis=-1), choices)


def judge(strategy: TreeStrategy, tree: DraftTree, logits: mx.array, position: int | mx.array) -> Walk:
    """Follow the target's own tokens through a tree, by its logits (N + 1, V); `position` is right after the anchor.

    Every token is the target's own choice or draw, so this is lossless whatever the tree holds.
    """
    return walk(tree, strategy.choose(logits, position, tree))


def reject(drafts: mx.array, draft_probs: mx.array, target_probs: mx.array, key: mx.array) -> Outcome:
    """Speculative sampling. drafts: (W,), drawn from draft_probs (W, V); target_probs: (W + 1, V); float32."""
    width = drafts.shape[0]
    accept_key, draw_key = mx.random.split(key)
    column = drafts[:, None]
    drafted = mx.take_along_axis(draft_probs, column, axis=1)[:, 0]
    wanted = mx.take_along_axis(target_probs[:width], column, axis=1)[:, 0]
    kept = mx.random.uniform(shape=(width,), key=accept_key) * drafted < wanted
    num_accepted = mx.cumprod(kept.astype(mx.int32)).sum()

    # After the last draft nothing was refused: the residual is the target's own distribution.
    refused = mx.concatenate([draft_probs, mx.zeros_like(draft_probs[:1])])
    target_row = mx.take(target_probs, num_accepted, axis=0)
    residual = mx.maximum(target_row - mx.take(refused, num_accepted, axis=0), 0)
    # Equal distributions leave nothing over but rounding; the target's own is then the limit.
    residual = mx.where(residual.sum() > 0, residual, target_row)
    own = mx.random.categorical(mx.log(residual), key=draw_key)
    padded = mx.concatenate([drafts, drafts[:1]])
    return Outcome(num_accepted, mx.where(mx.arange(width + 1) < num_accepted, padded, own))
