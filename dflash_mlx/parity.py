"""Whether drafting changes a pair's answers on this machine: greedy answers token by token, sampled ones by counting.

The truth is mlx-lm's own plain decoding (`generate_step`), not this project's loop. In float32 the greedy answers are
equal. In shorter precisions a block of tokens is rounded differently from one token at a time, so answers may part
where plain decoding's two best tokens are closer together than that rounding, which is measured here as well.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import generate_step

from dflash_mlx.bench.contestants import Local
from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.bench.record import first_difference
from dflash_mlx.bench.run import time_answer
from dflash_mlx.generation import encode, generate
from dflash_mlx.pair import ModelPair
from dflash_mlx.sampling import SamplingParams, sampling_scores

Progress = Callable[[int, int], None]

# A difference is explained by rounding while its gap is at most this many times the most that rounding moved a gap.
_MARGIN = 2.0
# Rounding of float32 sums that the measurement may miss, as logits are of the order of ten.
_SMALLEST_ROUNDING = 1e-4
_SUSPICIOUS = 1e-4  # p-value below which a distribution is called different; one run in 10,000 is by chance
_TOKENS, _CHOICES = 3, 4  # sampled answers are this long, each token one of the likeliest few
_LEAST_EXPECTED = 5.0  # cells of a chi-square test with fewer are taken together


@dataclass(frozen=True)
class GreedyResult:
    """One prompt. gap: plain decoding's best logit over its second at the first difference.

    rounding: the most that reading the answer in one block instead of token by token moved such a gap.
    """

    name: str
    tokens: int
    first_difference: int | None
    plain_token: int | None
    drafted_token: int | None
    gap: float | None
    rounding: float

    @property
    def explained(self) -> bool:
        """Whether rounding is enough to account for the difference, if there is one."""
        return self.gap is None or self.gap <= _MARGIN * max(self.rounding, _SMALLEST_ROUNDING)


@dataclass(frozen=True)
class SampledResult:
    """Drafted samples against the exact distribution of the target's first tokens.

    total_variation: half the sum of differences between shares and probabilities; `expected_variation` is about what
    as many perfect samples show. p_value: of the chi-square test.
    """

    acceptance_rule: str
    samples: int
    total_variation: float
    expected_variation: float
    chi_square: float
    degrees: int
    p_value: float

    @property
    def agrees(self) -> bool:
        return self.p_value >= _SUSPICIOUS


@dataclass(frozen=True)
class ParityReport:
    """What was found. `lossless`: nothing that rounding and chance do not explain."""

    pair: str
    dtype: str
    greedy: list[GreedyResult]
    sampled: list[SampledResult] = field(default_factory=list)

    @property
    def lossless(self) -> bool:
        return all(result.explained for result in self.greedy) and all(result.agrees for result in self.sampled)

    def verdict(self) -> str:
        """One line."""
        apart = [result for result in self.greedy if result.first_difference is not None]
        broken = [result for result in apart if not result.explained]
        wrong = [result for result in self.sampled if not result.agrees]
        if broken or wrong:
            parts = [f"{r.name} parts at token {r.first_difference} with a gap of {r.gap:.3g}" for r in broken]
            parts += [f"samples ({r.acceptance_rule}) are off, p = {r.p_value:.1g}" for r in wrong]
            return f"NOT lossless here: {'; '.join(parts)}. Please report it with the output of --json."
        if not apart:
            words = f"lossless here: all {len(self.greedy)} greedy answers are identical"
        else:
            words = (
                f"lossless here up to rounding: {len(self.greedy) - len(apart)} of {len(self.greedy)} greedy answers "
                f"are identical, the others part at near-ties (gaps up to {max(r.gap or 0 for r in apart):.2g})"
            )
        return words + (", and samples follow the target's distribution." if self.sampled else ".")

    def to_json(self) -> dict[str, Any]:
        return {
            "pair": self.pair,
            "dtype": self.dtype,
            "lossless": self.lossless,
            "verdict": self.verdict(),
            "identical": sum(result.first_difference is None for result in self.greedy),
            "greedy": [_greedy_json(result) for result in self.greedy],
            "sampled": [{**asdict(result), "agrees": result.agrees} for result in self.sampled],
        }


def _greedy_json(result: GreedyResult) -> dict[str, Any]:
    # JSON has no infinity, which is the gap where plain decoding had come to an end.
    gap = None if result.gap is None or math.isinf(result.gap) else result.gap
    return {**asdict(result), "gap": gap, "explained": result.explained}


def check_greedy(
    pair: ModelPair, prompts: Sequence[BenchPrompt], *, max_tokens: int, progress: Progress | None = None
) -> list[GreedyResult]:
    """Answer each prompt plainly with mlx-lm and drafted with full blocks, and compare."""
    results = []
    drafting = Local(name="drafted", pair=pair, width=pair.block_size - 1)
    for done, prompt in enumerate(prompts):
        if progress:
            progress(done, len(prompts))
        tokens = encode(pair, prompt.text)
        drafted = time_answer(drafting, tokens, SamplingParams(max_tokens=max_tokens)).token_ids
        # What was asked for may not have fitted the model's context.
        plain, best = _plain(pair, tokens, max_tokens)
        at = first_difference(plain, drafted)
        results.append(
            GreedyResult(
                name=prompt.name,
                tokens=len(plain),
                first_difference=at,
                plain_token=plain[at] if at is not None and at < len(plain) else None,
                drafted_token=drafted[at] if at is not None and at < len(drafted) else None,
                gap=None if at is None else _gap(best, at),
                rounding=_rounding(pair, tokens, plain, best),
            )
        )
    return results


@dataclass(frozen=True)
class _Best:
    """The two best tokens of a step and their log-probabilities."""

    tokens: tuple[int, int]
    scores: tuple[float, float]

    @property
    def gap(self) -> float:
        return self.scores[0] - self.scores[1]


def _plain(pair: ModelPair, prompt: list[int], max_tokens: int) -> tuple[list[int], list[_Best]]:
    """mlx-lm's greedy decoding, up to and with the first end-of-sequence token, and each step's two best."""
    tokens: list[int] = []
    best: list[_Best] = []
    room = pair.context_length
    limit = max_tokens if room is None else min(max_tokens, room - len(prompt))
    for token, scores in generate_step(mx.array(prompt), pair.target.model, max_tokens=limit):
        two = cast("list[int]", mx.argpartition(-scores, 1)[:2].tolist())
        first, second = sorted(two, key=lambda i: -float(scores[i]))
        best.append(_Best((first, second), (float(scores[first]), float(scores[second]))))
        tokens.append(int(token))
        if tokens[-1] in pair.eos_ids:
            break
    return tokens, best


def _gap(best: Sequence[_Best], at: int) -> float:
    """The gap at a step; infinite after plain decoding's end, where there is nothing to be close to."""
    return best[at].gap if at < len(best) else math.inf


def _rounding(pair: ModelPair, prompt: list[int], answer: list[int], best: Sequence[_Best]) -> float:
    """The most that one forward over prompt and answer moves the gaps of token-by-token decoding."""
    logits = pair.target.forward(mx.array([prompt + answer[:-1]]), pair.target.make_cache())[0, len(prompt) - 1 :]
    pairs = mx.array([step.tokens for step in best])
    found = mx.take_along_axis(logits.astype(mx.float32), pairs, axis=-1)
    moved = mx.abs((found[:, 0] - found[:, 1]) - mx.array([step.gap for step in best]))
    return float(moved.max())


def check_sampled(
    pair: ModelPair, prompt: str, *, samples: int, seeded: bool, progress: Progress | None = None
) -> SampledResult:
    """Draw drafted answers of three tokens and compare their counts with the target's exact probabilities.

    Each token is one of the likeliest four, so that all 64 answers can be counted. seeded: with seeds 0, 1, ..., which
    is one acceptance rule; without seeds it is the other (see `decoding.accept`).
    """
    tokens = encode(pair, prompt)
    exact = exact_distribution(pair, tokens)
    counts: Counter[tuple[int, ...]] = Counter()
    session = pair.new_session()
    for i in range(samples):
        if progress and i % 10 == 0:
            progress(i, samples)
        params = SamplingParams(max_tokens=_TOKENS, temperature=1.0, top_k=_CHOICES, seed=i if seeded else None)
        width = min(_TOKENS, pair.block_size - 1)
        counts[tuple(generate(pair, tokens, params, session=session, width=width).token_ids)] += 1
    return compare_counts(counts, exact, rule="with seeds" if seeded else "without seeds")


def exact_distribution(pair: ModelPair, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """The probability of each answer of three tokens (fewer where it ends) from plain forwards of the target."""
    params = SamplingParams(temperature=1.0, top_k=_CHOICES)
    found: dict[tuple[int, ...], float] = {}
    growing: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(_TOKENS):
        starts = list(growing)
        rows = mx.array([[*prompt, *start] for start in starts])
        logits = pair.target.forward(rows, pair.target.make_cache())[:, -1]
        probs = mx.softmax(sampling_scores(logits, params), axis=-1)
        next_ones: dict[tuple[int, ...], float] = {}
        for row, start in enumerate(starts):
            likeliest = cast("list[int]", mx.argpartition(-probs[row], _CHOICES - 1)[:_CHOICES].tolist())
            for token in likeliest:
                ends = token in pair.eos_ids or length == _TOKENS - 1
                answer = (*start, token)
                (found if ends else next_ones)[answer] = growing[start] * float(probs[row, token])
        growing = next_ones
    return found


def compare_counts(
    counts: "Counter[tuple[int, ...]]", exact: dict[tuple[int, ...], float], *, rule: str = ""
) -> SampledResult:
    """Total variation and Pearson's chi-square of counted answers against exact probabilities.

    Answers that are expected fewer than five times are taken together; those without any probability, too.
    """
    total = sum(counts.values())
    variation = sum(abs(counts[a] / total - p) for a, p in exact.items())
    variation += sum(n / total for a, n in counts.items() if a not in exact)
    spread = sum(math.sqrt(2 * p * (1 - p) / (math.pi * total)) for p in exact.values())
    large = [a for a, p in exact.items() if p * total >= _LEAST_EXPECTED]
    cells = [(counts[a], exact[a] * total) for a in large]
    rest = (total - sum(counts[a] for a in large), total - sum(exact[a] * total for a in large))
    if rest[1] >= _LEAST_EXPECTED or not cells:
        cells.append(rest)
    else:
        # Too few to test on their own; what should be rare joins the least likely cell.
        cells[-1] = (cells[-1][0] + rest[0], cells[-1][1] + rest[1])
    chi_square = sum((n - e) ** 2 / max(e, 1e-9) for n, e in cells)
    degrees = max(1, len(cells) - 1)
    p_value = chi_square_tail(chi_square, degrees)
    return SampledResult(rule, total, variation / 2, spread / 2, chi_square, degrees, p_value)


def chi_square_tail(value: float, degrees: int) -> float:
    """P(X >= value) for X chi-square distributed: the regularized upper gamma function Q(degrees / 2, value / 2).

    By its recurrence from Q(1/2, x) = erfc(sqrt x) or Q(1, x) = exp(-x); DLMF 8.8.6.
    """
    x = value / 2
    if x <= 0:
        return 1.0
    a, tail = (0.5, math.erfc(math.sqrt(x))) if degrees % 2 else (1.0, math.exp(-x))
    while a < degrees / 2:
        tail += math.exp(a * math.log(x) - x - math.lgamma(a + 1))
        a += 1
    return min(1.0, tail)
