"""The parity check finds what it should: nothing in a lossless loop, and differences that were put there."""

import math
import random
from collections import Counter
from dataclasses import replace

import mlx.core as mx
import pytest
from test_generation import make_pair
from tiny import plain_tokens, tiny_target

from dflash_mlx import parity
from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.parity import (
    GreedyResult,
    ParityReport,
    SampledResult,
    check_greedy,
    check_sampled,
    chi_square_tail,
    compare_counts,
    exact_distribution,
)

PROMPTS = [
    BenchPrompt(name="a", category="chat", text="hello there"),
    BenchPrompt(name="b", category="chat", text="go"),
]


@pytest.mark.slow
def test_a_lossless_loop_is_found_lossless() -> None:
    pair = make_pair()
    results = check_greedy(pair, PROMPTS, max_tokens=24)
    assert [result.first_difference for result in results] == [None, None]
    assert all(result.rounding < 1e-3 for result in results)
    sampled = [check_sampled(pair, "hey", samples=150, seeded=seeded) for seeded in (True, False)]
    assert all(result.samples == 150 for result in sampled)
    report = ParityReport("tiny", "float32", results, sampled)
    assert report.lossless
    assert report.verdict().startswith("lossless here: all 2 greedy answers are identical")
    assert report.to_json()["identical"] == 2


def test_a_wrong_token_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_pair()
    truth = parity.time_answer

    def wrong(*args: object) -> object:
        answer = truth(*args)  # type: ignore[arg-type]
        changed = [*answer.token_ids]
        changed[5] = (changed[5] + 1) % 40
        return replace(answer, token_ids=changed)

    monkeypatch.setattr(parity, "time_answer", wrong)
    [result, _] = check_greedy(pair, PROMPTS, max_tokens=24)
    tokens = pair.encode_chat([{"role": "user", "content": PROMPTS[0].text}])
    plain = plain_tokens(pair.target, tokens, 24, pair.eos_ids)
    assert (result.first_difference, result.plain_token) == (5, plain[5])
    assert result.drafted_token == (plain[5] + 1) % 40
    logits = pair.target.forward(mx.array([tokens + plain[:5]]), pair.target.make_cache())[0, -1]
    best, second = sorted(logits.tolist(), reverse=True)[:2]  # type: ignore[arg-type]
    assert result.gap == pytest.approx(best - second, abs=1e-3)
    report = ParityReport("tiny", "float32", [result])
    assert not report.lossless
    assert "a parts at token 5" in report.verdict()


def test_a_near_tie_is_explained_by_rounding_and_a_clear_choice_is_not() -> None:
    result = GreedyResult("a", 9, 3, 1, 2, gap=0.05, rounding=0.03)
    assert result.explained
    assert not replace(result, gap=0.07).explained
    assert not replace(result, gap=math.inf).explained
    assert "up to rounding: 0 of 1" in ParityReport("x", "bfloat16", [result]).verdict()


def test_the_exact_distribution_is_the_chain_rule() -> None:
    pair = make_pair(target=tiny_target("qwen3"))
    exact = exact_distribution(pair, [5, 6, 7])
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-4)
    answer = max(exact, key=lambda a: exact[a])
    logits = pair.target.forward(mx.array([[5, 6, 7, *answer[:-1]]]), pair.target.make_cache())[0, 2:].astype(
        mx.float32
    )
    product = 1.0
    for row, token in zip(logits.tolist(), answer, strict=True):  # type: ignore[arg-type]
        kept = sorted(row, reverse=True)[:4]
        product *= math.exp(row[token]) / sum(math.exp(x) for x in kept)
    assert exact[answer] == pytest.approx(product, rel=1e-3)


def test_counts_from_the_distribution_pass_and_from_another_do_not() -> None:
    exact = {(i,): p for i, p in enumerate((0.4, 0.3, 0.2, 0.08, 0.02))}
    chance = random.Random(0)
    good = Counter(chance.choices(list(exact), list(exact.values()), k=500))
    result = compare_counts(good, exact)
    assert result.agrees
    assert result.total_variation < 3 * result.expected_variation
    bad = Counter(chance.choices(list(exact), [0.3, 0.4, 0.2, 0.08, 0.02], k=500))
    assert not compare_counts(bad, exact).agrees
    assert not compare_counts(good + Counter({(9,): 60}), exact).agrees, "an answer that cannot be"


@pytest.mark.parametrize(
    ("value", "degrees", "tail"),
    # From printed tables of the chi-square distribution.
    [(3.841, 1, 0.05), (6.635, 1, 0.01), (5.991, 2, 0.05), (18.307, 10, 0.05), (37.697, 15, 0.001), (0.0, 3, 1.0)],
)
def test_the_tail_of_chi_square(value: float, degrees: int, tail: float) -> None:
    assert chi_square_tail(value, degrees) == pytest.approx(tail, rel=2e-3)


def test_a_wrong_distribution_is_named() -> None:
    sampled = SampledResult("with seeds", 100, 0.5, 0.05, 90.0, 5, 1e-9)
    report = ParityReport("x", "float32", [], [sampled])
    assert not report.lossless
    assert "samples (with seeds) are off" in report.verdict()
