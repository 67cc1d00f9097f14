"""Choosing tokens: how a block is drafted from logits, and how much of it the target keeps.

Three strategies, all lossless:

- `Greedy` (temperature 0): a draft is kept while it is the target's best token.
- `Coupled` (temperature above 0 with a seed): the target draws its token at each position with noise that depends
  on seed and position only (the Gumbel-max trick), and a draft is kept while it equals that token. So the answer is
  the same for any drafter and any width, and with none.
- `Rejection` (temperature above 0 without a seed): speculative sampling (arXiv 2211.17192, algorithm 1). A draft x
  is kept with probability min(1, target_probs[x] / draft_probs[x]); the first one refused is replaced by a draw from
  the residual distribution. It keeps the most drafts that any lossless scheme can.

Everything stays on the device; the host reads one small array a round (`Outcome.read`).
"""

import os
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import mlx.core as mx

from dflash_mlx.decoding.logprobs import TokenLogprob, pack_logprobs, unpack_logprobs
from dflash_mlx.sampling import SamplingParams, sampling_scores


@dataclass
class DraftVocabulary:
    """The tokens a drafter may draft, out of a vocabulary of `size`: token_ids (n,), in the order of its logits."""

    token_ids: mx.array
    size: int

    def widen(self, values: mx.array, *, elsewhere: float) -> mx.array:
        """(W, n) -> (W, size), float32, with the value `elsewhere` for the tokens that are never drafted."""
        full = mx.full((values.shape[0], self.size), elsewhere, dtype=mx.float32)
        columns = mx.broadcast_to(self.token_ids, values.shape)
        return mx.put_along_axis(full, columns, values.astype(mx.float32), axis=-1)


@dataclass
class Proposal:
    """A drafted continuation of the anchor.

    tokens: (W,) drafted ids; probs: (W, V) float32 distributions they were drawn from, for `Rejection`; logits: the
    drafter's, (W, V) or (W, n) when it has a vocabulary of its own.
    """

    tokens: mx.array
    logits: mx.array
    probs: mx.array | None = None

    @property
    def width(self) -> int:
        return int(self.tokens.shape[0])

    def shortened(self, width: int) -> "Proposal":
        """The first `width` drafts."""
        if width >= self.width:
            return self
        return Proposal(self.tokens[:width], self.logits[:width], None if self.probs is None else self.probs[:width])

    def confidence(self) -> mx.array:
        """The drafter's probability of its best token at each position, (W,), in millionths.

        It depends on the context alone, not on the tokens drawn, so choosing a width by it does not bias sampling.
        """
        logits = self.logits.astype(mx.float32)
        best = mx.exp(logits.max(axis=-1) - mx.logsumexp(logits, axis=-1))
        return (best * 1e6).astype(mx.uint32)


@dataclass
class Outcome:
    """What the target made of a proposal of W drafts.

    num_accepted: () int, drafts kept. tokens: (W + 1,): the kept drafts, then at index `num_accepted` the target's
    own token; what lies behind it is meaningless.
    """

    num_accepted: mx.array
    tokens: mx.array

    def __post_init__(self) -> None:
        count = self.num_accepted.reshape(1).astype(mx.uint32)
        self.packed = mx.concatenate([count, self.tokens.astype(mx.uint32)])

    @property
    def next_anchor(self) -> mx.array:
        """The target's own token, (1,), still on the device."""
        return mx.take(self.tokens, self.num_accepted.reshape(1), axis=0)

    def report_logprobs(self, rows: mx.array, count: int) -> None:
        """Have `read` bring log-probabilities, of the target's logits (W + 1, V), with `count` alternatives each."""
        self.packed = mx.concatenate([self.packed, pack_logprobs(rows, self.tokens, count)])

    def read(self, confidence: mx.array | None = None, drafts: mx.array | None = None) -> "Reading":
        """Wait for the device. One read, whatever is asked: `confidence` and `drafts` of the next proposal, too."""
        more = [array.astype(mx.uint32) for array in (confidence, drafts) if array is not None]
        values = cast("list[int]", (mx.concatenate([self.packed, *more]) if more else self.packed).tolist())
        rows, own = self.tokens.shape[0], self.packed.shape[0]
        kept = values[0] + 1
        logprobs = unpack_logprobs(values[1 + rows : own], rows)[:kept] if own > 1 + rows else []
        chances = own + (confidence.shape[0] if confidence is not None else 0)
        return Reading(
            values[0], values[1 : 1 + kept], [v / 1e6 for v in values[own:chances]], values[chances:], logprobs
        )


class Reading(NamedTuple):
    """What the host learns of a round: drafts kept, the num_accepted + 1 tokens gained, and what else was asked for:

    the next drafts' confidence, those drafts, and the gained tokens' log-probabilities.
    """

    num_accepted: int
    tokens: list[int]
    confidence: list[float]
    drafts: list[int]
    logprobs: list[TokenLogprob]


class Strategy(Protocol):
    """How tokens are chosen. `position` is the absolute position of the first token in question."""

    def propose(self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None) -> Proposal:
        """Draft from the drafter's logits, (W, V), or (W, n) when it has a `vocabulary` of its own."""

    def accept(self, proposal: Proposal | None, logits: mx.array, position: int | mx.array) -> Outcome:
        """Judge the drafts by the target's logits for the anchor and each draft, (W + 1, V)."""


class Greedy:
    def propose(
        self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None = None
    ) -> Proposal:
        best = mx.argmax(logits, axis=-1)
        return Proposal(best if vocabulary is None else vocabulary.token_ids[best], logits)

    def accept(self, proposal: Proposal | None, logits: mx.array, position: int | mx.array) -> Outcome:
        return match(proposal, mx.argmax(logits, axis=-1))


class Coupled:
    def __init__(self, params: SamplingParams) -> None:
        assert params.seed is not None
        self.params = params
        self.seed = params.seed

    def propose(
        self, logits: mx.array, position: int | mx.array, vocabulary: DraftVocabulary | None = None
    ) -> Proposal:
        scores = sampling_scores(logits, self.params)
        wide = scores if vocabulary is None else vocabulary.widen(scores, elsewhere=-mx.inf)
        return Proposal(self._draw(wide, position), logits)

    def accept(self, proposal: Proposal | None, logits: mx.array, position: int | mx.array) -> Outcome:
        return match(proposal, self._draw(sampling_scores(logits, self.params), position))

    def _draw(self, scores: mx.array, position: int | mx.array) -> mx.array:
        """One token a row, (L, V) -> (L,), with noise keyed by the row's position."""
        positions = mx.arange(scores.shape[0], dtype=mx.uint32) + mx.array(position, dtype=mx.uint32)
        keys = mx.stack([mx.full(positions.shape, self.seed, dtype=mx.uint32), positions], axis=1)
        noise = mx.stack([mx.random.gumbel(scores.shape[1:], key=key) for key in keys])
        return mx.argmax(scores + noise, axis=-1)


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
            return Proposal(tokens, logits, probs)
        return Proposal(vocabulary.token_ids[tokens], logits, vocabulary.widen(probs, elsewhere=0.0))

    def accept(self, proposal: Proposal | None, logits: mx.array, position: int | mx.array) -> Outcome:
        scores = sampling_scores(logits, self.params)
        if proposal is None:
            return Outcome(mx.array(0), mx.random.categorical(scores, key=self._next_key()))
        assert proposal.probs is not None
        return reject(proposal.tokens, proposal.probs, mx.softmax(scores, axis=-1), self._next_key())

    def _next_key(self) -> mx.array:
        self.draws += 1
        return mx.array([self.seed, self.draws], dtype=mx.uint32)


def choose_strategy(params: SamplingParams) -> Strategy:
    if params.temperature == 0:
        return Greedy()
    return Rejection(params) if params.seed is None else Coupled(params)


def match(proposal: Proposal | None, choices: mx.array) -> Outcome:
    """Keep drafts while they equal the target's choices, (W + 1,)."""
    if proposal is None:
        return Outcome(mx.array(0), choices)
    agrees = (proposal.tokens == choices[:-1]).astype(mx.int32)
    return Outcome(mx.cumprod(agrees).sum(), choices)


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
