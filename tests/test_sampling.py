"""At a temperature above 0 the answers are drawn from the target's own distribution, whatever the drafter.

The joint distribution of the first three tokens over thousands of answers of a tiny model is compared with the exact
one, by a chi-square test whose filters and probabilities are computed here in float64, apart from the code under test.
"""

import itertools
import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from tiny import tiny_drafter, tiny_target

from dflash_mlx.decoding import accept
from dflash_mlx.decoding.accept import Coupled, Outcome, Rejection, choose_strategy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.policies import Choice
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.errors import UsageError
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams, best_columns, sampling_scores

VOCAB, PROMPT = 5, [1, 4, 2]
FEW, MANY = 600, 3000  # answers of a test; the few notice a gross error, and take a fifth of the time
few_or_many = pytest.mark.parametrize(
    "runs", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few answers", "many answers"]
)


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama", seed=3, vocab_size=VOCAB, num_hidden_layers=1)


@pytest.fixture(scope="module")
def drafter():
    one_layer = {"num_hidden_layers": 1, "layer_types": ("full_attention",), "num_target_layers": 1}
    return tiny_drafter(block_size=4, taps=(0,), vocab_size=VOCAB, **one_layer)


def exact_probs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row's distribution in float64: top-p, min-p, top-k at temperature 1, then the temperature."""
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = np.argsort(-probs)
    keep = np.ones(len(probs), bool)
    if params.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        keep[order[before >= params.top_p]] = False
    if params.min_p:
        keep &= probs >= params.min_p * probs.max()
    if params.top_k:
        ranked = [i for i in order if keep[i]]
        keep[[i for i in range(len(probs)) if i not in ranked[: params.top_k]]] = False
    powered = np.where(keep, probs, 0) ** (1 / params.temperature)
    return powered / powered.sum()


def exact_joint(target, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every three-token continuation of PROMPT."""
    joint = {(): 1.0}
    for _ in range(3):
        longer = {}
        for tokens, probability in joint.items():
            logits = target.forward(mx.array([PROMPT + list(tokens)]), target.make_cache())[0, -1]
            row = exact_probs(np.array(logits, dtype=np.float64), params)
            longer |= {(*tokens, i): probability * float(p) for i, p in enumerate(row) if p > 0}
        joint = longer
    return joint


def chi_square_p(counts: dict, expected: dict, runs: int) -> float:
    """Upper tail of the chi-square statistic (Wilson-Hilferty). Outcomes expected fewer than 5 times share a bin."""
    assert set(counts) <= set(expected), "a token that a filter removes was drawn"
    bins, rest = [], [0.0, 0.0]
    for outcome, probability in expected.items():
        pair = (counts.get(outcome, 0), probability * runs)
        if pair[1] >= 5:
            bins.append(pair)
        else:
            rest = [rest[0] + pair[0], rest[1] + pair[1]]
    if rest[1] >= 1:
        bins.append(tuple(rest))
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in bins)
    freedom = len(bins) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def sample(
    target, drafter, params: SamplingParams, runs: int, strategy_of_run, policy=None
) -> dict[tuple[int, ...], int]:
    """Counts of the first three tokens. One session is rewound to the prompt between runs."""
    policy = policy or FixedWidth(3)
    session = Session(target, drafter)
    counts: dict[tuple[int, ...], int] = {}
    for run in range(runs):
        session.rewind(len(PROMPT) - 1)
        steps = decode(session, PROMPT, strategy=strategy_of_run(run), policy=policy, max_tokens=5, eos_ids=set())
        tokens: list[int] = []
        while len(tokens) < 3:
            tokens += next(steps).tokens
        steps.close()
        counts[tuple(tokens[:3])] = counts.get(tuple(tokens[:3]), 0) + 1
    return counts


CASES = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.7, top_p=0.97, top_k=4, min_p=0.05),
]


@pytest.mark.slow
@few_or_many
@pytest.mark.parametrize("case", [*(pytest.param(case, marks=pytest.mark.long) for case in (0, 1)), 2])
def test_rejection_sampling_keeps_the_targets_distribution(target, drafter, case, runs):
    params = CASES[case]
    strategy = Rejection(params, seed=100 + case)
    if case == 0:  # a drafter that knows only some of the tokens
        drafter = DFlashDrafter(replace(drafter.config, draft_token_ids=(0, 2, 3)))
    # In blocks of two drafts the third token comes from a block's last place.
    policy = FixedWidth(2 if case == 1 else 3)
    counts = sample(target, drafter, params, runs, lambda run: strategy, policy)
    assert chi_square_p(counts, exact_joint(target, params), runs) > 1e-3


@pytest.mark.slow
@few_or_many
def test_coupled_sampling_keeps_the_targets_distribution(target, drafter, runs):
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=0)
    counts = sample(
        target, drafter, params, runs, lambda run: Coupled(SamplingParams(temperature=1.0, top_p=0.95, seed=run))
    )
    assert chi_square_p(counts, exact_joint(target, params), runs) > 1e-3


class SureTrees(FixedWidth):
    """Verifies the drafts that are likely enough, sometimes none.

    What is drafted depends on the very noise that the target's tokens are chosen with, and must not bias them.
    """

    def next_round(self, *, may_branch, told=0.0):
        return Choice(self.places, tree=9)

    def choose(self, forecast):
        self.sizes = getattr(self, "sizes", set())
        size = int((forecast.chances > 0.4).sum())
        self.sizes.add(size)
        return size


@few_or_many
@pytest.mark.parametrize("case", [*(pytest.param(case, marks=pytest.mark.long) for case in (0, 1)), 2])
def test_trees_keep_the_targets_distribution(target, drafter, case, runs):
    """Without a seed: each answer has noise of its own."""
    params = CASES[case]
    if case == 0:
        drafter = DFlashDrafter(replace(drafter.config, draft_token_ids=(0, 2, 3)))
    policy = SureTrees(1, places=3) if case else FixedWidth(9, places=3)
    counts = sample(target, drafter, params, runs, lambda run: Rejection(params, seed=run), policy)
    assert chi_square_p(counts, exact_joint(target, params), runs) > 1e-3
    if case:
        assert {0, 1} < policy.sizes


def test_the_test_notices_biased_acceptance(target, drafter, monkeypatch):
    """Keeping drafts a third too often must fail the same test, also with few runs."""
    params = CASES[0]
    honest = accept.reject

    def biased(drafts, draft_probs, target_probs, key):
        return honest(drafts, draft_probs * 0.75, target_probs, key)

    monkeypatch.setattr(accept, "reject", biased)
    strategy = Rejection(params, seed=7)
    runs = FEW
    counts = sample(target, drafter, params, runs, lambda run: strategy)
    assert chi_square_p(counts, exact_joint(target, params), runs) < 1e-5


def test_reject_draws_from_the_target(monkeypatch):
    """The pure function alone, many times: first token after a draft of one, for very different distributions."""
    draft_probs = mx.array([[0.7, 0.2, 0.1, 0.0]])
    target_probs = mx.array([[0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
    runs = 20_000
    keys = mx.random.split(mx.random.key(5), 2 * runs)
    drafts = mx.vmap(lambda key: mx.random.categorical(mx.log(draft_probs), key=key))(keys[:runs])

    def first_token(draft, key):
        outcome = accept.reject(draft, draft_probs, target_probs, key)
        return outcome.tokens[0]

    tokens = np.array(mx.vmap(first_token)(drafts, keys[runs:]))
    counts = {(i,): int((tokens == i).sum()) for i in range(4)}
    expected = {(i,): float(target_probs[0, i]) for i in range(4)}
    assert chi_square_p(counts, expected, runs) > 1e-3


def test_equal_distributions_keep_everything():
    probs = mx.softmax(mx.random.normal((5, 7), key=mx.random.key(1)), axis=-1)
    drafts = mx.argmax(probs[:4], axis=-1)
    for i in range(50):
        outcome = accept.reject(drafts, probs[:4], probs, mx.random.key(i))
        [reading] = Outcome.stack([outcome], 4).read()
        assert reading.num_accepted == 4


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=11),
        pytest.param(SamplingParams(temperature=1.3, top_k=9, seed=4), marks=pytest.mark.slow),
    ],
)
def test_a_seed_gives_the_same_answer_with_any_drafter_and_none(params):
    target = tiny_target("qwen3")

    def answer(drafter, width, places=0):
        steps = decode(
            Session(target, drafter),
            [1, 2, 3],
            strategy=choose_strategy(params),
            policy=FixedWidth(width, places=places),
            max_tokens=40,
            eos_ids=set(),
        )
        return [token for step in steps for token in step.tokens]

    plain = answer(None, 0)
    assert answer(None, 0) == plain
    for seed, width in itertools.product((1, 2), (1, 3, 7)):
        assert answer(tiny_drafter(seed=seed), width) == plain
        assert answer(tiny_drafter(seed=seed), 4 * width, places=width) == plain
        assert answer(tiny_drafter(seed=seed, draft_token_ids=(1, 5, 7, 30)), width) == plain
    params = replace(params, seed=999)
    assert answer(None, 0) != plain


FILTERS = {"top_p": 0.8, "min_p": 0.15, "top_k": 5}


@pytest.mark.parametrize(
    "names", [names for count in range(1, 4) for names in itertools.combinations(FILTERS, count)], ids="+".join
)
def test_filters_combine_in_the_order_that_is_promised(names):
    """Random rows, from nearly flat to nearly sure: softmax of the scores is the exact distribution."""
    params = SamplingParams(temperature=0.7, **{name: FILTERS[name] for name in names})
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(200, 30)) * rng.uniform(0.3, 4, (200, 1))
    found = mx.softmax(sampling_scores(mx.array(logits), params), axis=-1)
    expected = [exact_probs(row, params) for row in logits]
    np.testing.assert_allclose(np.array(found), expected, atol=1e-4)


def test_filters_are_applied_in_float32():
    """A long flat tail: in bfloat16 a cumulative sum stops growing and the nucleus would be far too small."""
    tail = -1.05 * np.log(np.arange(1, 30_001))
    wide = sampling_scores(mx.array(tail, dtype=mx.float32), SamplingParams(temperature=1.0, top_p=0.9))
    narrow = sampling_scores(mx.array(tail).astype(mx.bfloat16), SamplingParams(temperature=1.0, top_p=0.9))
    kept = [int((scores > -mx.inf).sum()) for scores in (wide, narrow)]
    probs = np.exp(tail) / np.exp(tail).sum()
    exact = int((np.cumsum(probs) - probs < 0.9).sum())
    assert abs(kept[0] - exact) <= 2
    assert abs(kept[1] - exact) < 0.1 * exact


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2.0),
        ("seed", -1),
        ("seed", 2**32),
        ("stop", ("",)),
        ("repetition_penalty", 0.0),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(UsageError, match=field):
        SamplingParams(**{field: value})


def test_a_refusal_says_what_is_expected_and_what_was_found():
    found = {}
    for field, value in {
        "max_tokens": 0,
        "temperature": -0.5,
        "top_p": 0.0,
        "top_k": -1,
        "min_p": 1.5,
        "repetition_penalty": 0.0,
        "stop": ("a", ""),
        "top_logprobs": 21,
        "seed": -1,
    }.items():
        with pytest.raises(UsageError) as refused:
            SamplingParams(**{field: value})
        found[field] = str(refused.value)
    assert found == {
        "max_tokens": "max_tokens should be a whole number of at least 1; got 0.",
        "temperature": "temperature should be a number of at least 0; got -0.5.",
        "top_p": "top_p should be above 0 and at most 1; got 0.0.",
        "top_k": "top_k should be 0 (off) or a positive whole number; got -1.",
        "min_p": "min_p should be from 0 to 1; got 1.5.",
        "repetition_penalty": "repetition_penalty should be above 0 (1 is off); got 0.0.",
        "stop": "stop should be strings that are not empty; got ('a', '').",
        "top_logprobs": "top_logprobs should be from 0 to 20; got 21.",
        "seed": "seed should be a whole number from 0 to 4294967295; got -1.",
    }


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", (1,)),
        ("temperature", (0, 0.01)),
        ("top_p", (0.01, 1)),
        ("top_k", (0, 1)),
        ("min_p", (0, 1)),
        ("seed", (0, 2**32 - 1, None)),
        ("top_logprobs", (0, 20, None)),
        ("repetition_penalty", (0.01, 1)),
        ("stop", ((), ("a",))),
    ],
)
def test_values_at_the_ends_of_a_range_are_taken(field, values):
    for value in values:
        assert getattr(SamplingParams(**{field: value}), field) == value


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == ("END",)


def test_without_penalties_and_bias_there_is_nothing_to_process():
    assert SamplingParams().logits_processors() == []
    assert len(SamplingParams(logit_bias={1: 2.0}, repetition_penalty=0.5).logits_processors()) == 2


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("width", [3, 24, 25, 29, 64, 400])
def test_the_best_columns_hold_the_largest_values(width, dtype):
    """Rows shorter than the chunks that are looked through, longer, and with an incomplete last chunk."""
    rng = np.random.default_rng(width)
    for _ in range(10):
        rows = np.stack([rng.permutation(width) - width // 2 for _ in range(3)])  # no two alike, some negative
        columns = np.array(best_columns(mx.array(rows).astype(dtype), 3, chunk=4))
        found = np.sort(np.take_along_axis(rows, columns.astype(np.int64), axis=1), axis=1)
        if dtype == mx.float32 or width < 256:  # wider ones have ties in bfloat16
            assert (found == np.sort(rows, axis=1)[:, -3:]).all()
        assert all(len(set(row)) == 3 for row in columns.tolist())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(presence_penalty=0.7, frequency_penalty=0.4),
        SamplingParams(logit_bias={3: 4.0, 8: -100.0}),
    ],
    ids=["repetition", "presence-frequency", "bias"],
)
def test_penalties_and_bias_act_as_in_plain_decoding(params):
    """Inside a block, each row sees the drafts before it in its history: the answer is mlx-lm's own."""
    from mlx_lm.generate import generate_step

    target = tiny_target("llama")
    prompt = [4, 9, 9, 2]
    expected = [
        int(token)
        for token, _ in generate_step(
            mx.array(prompt), target.model, max_tokens=30, logits_processors=params.logits_processors()
        )
    ]
    plain = [int(token) for token, _ in generate_step(mx.array(prompt), target.model, max_tokens=30)]
    assert expected != plain
    for width in (0, 1, 5):
        steps = decode(
            Session(target, tiny_drafter()),
            prompt,
            strategy=choose_strategy(params),
            policy=FixedWidth(width),
            max_tokens=30,
            eos_ids=set(),
            processors=params.logits_processors(),
        )
        assert [token for step in steps for token in step.tokens] == expected
