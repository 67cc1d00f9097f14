"""DFlash 2 drafters in the decode loop: whatever the selector chooses, in chains and trees, the answer is the target's.

That a forward and a path equal the official ones is in test_official.py.
"""

import itertools
import random
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from test_sampling import CASES, PROMPT, VOCAB, chi_square_p, exact_joint, sample
from tiny import HIDDEN, SECOND, mostly_slow, plain_tokens, read, tiny_drafter, tiny_target

from dflash_mlx.decoding.accept import Coupled, DraftVocabulary, Greedy, Rejection
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.policies import Choice
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.dflash2 import PathSelector
from dflash_mlx.drafters.path import grow_paths, propose_path
from dflash_mlx.drafters.ranking import BRANCHES
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams, best_columns

RUNS = 1600
ALL_SLIDING = {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9, "is_causal": False}


class Confident:
    """Verifies the drafts that the drafter is sure of: how many depends on the context, and must not bias samples."""

    branches = False
    listens_after = 1

    def __init__(self, enough: float) -> None:
        self.enough, self.chosen = enough, []

    def next_round(self, *, may_branch, told=0.0) -> Choice:
        return Choice(3)

    def choose(self, forecast):
        sure = (forecast.best > self.enough).tolist()
        self.chosen.append(sure.index(False) if False in sure else len(sure))
        return self.chosen[-1]

    def observe(self, round):
        pass

    def take_notice(self):
        return None


@pytest.mark.parametrize("family", mostly_slow(["llama", "qwen3"], "llama"))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        ALL_SLIDING,
        {"draft_token_ids": (1, 5, 7, 11, 30, 40)},
        {"conv_kernel_size": 4, "conv_group_size": 2, "selector_top_k": 48, "final_logit_softcapping": 4.0},
    ],
    ids=["full", "sliding", "reduced vocabulary", "four taps"],
)
def test_greedy_answers_are_those_of_plain_decoding(family, changes):
    target = tiny_target(family)
    rng = random.Random(5)
    for seed in range(4):
        block_size = rng.randint(2, 9)
        drafter = tiny_drafter(block_size=block_size, seed=seed, **{**SECOND, **changes})
        prompt = [rng.randrange(48) for _ in range(rng.choice([1, 7, 30]))]
        width = rng.randint(1, block_size - 1)
        for policy in (FixedWidth(width), FixedWidth(width, places=block_size - 1)):
            steps = list(
                decode(
                    Session(target, drafter),
                    prompt,
                    strategy=Greedy(),
                    policy=policy,
                    max_tokens=25,
                    eos_ids=set(),
                )
            )
            assert [token for step in steps for token in step.tokens] == plain_tokens(target, prompt, 25)
            assert any(step.width == width for step in steps)


@pytest.mark.parametrize("places", [0, 5], ids=["chains", "trees"])
def test_a_selector_that_knows_the_answer_is_followed(places):
    """Codes that lead from each token of the answer to the next make every draft right, whatever the head says."""
    target = tiny_target("llama")
    answers = ([prompt, *plain_tokens(target, [prompt], 9)] for prompt in range(48))
    truth = next(answer for answer in answers if len(set(answer[:-1])) == len(answer) - 1)
    drafter = tiny_drafter(block_size=6, **{**SECOND, "selector_rank": 48, "selector_top_k": 48})
    selector = drafter.candidate_selector
    codes = mx.zeros((48, 48))
    for token, successor in itertools.pairwise(truth):
        codes[token, successor] = 1000.0
    selector.predecessor_codebook.weight, selector.successor_codebook.weight = codes, mx.eye(48)
    selector.links = lambda hidden, candidates: selector.successor_codebook(candidates)
    session = Session(target, drafter)
    steps = list(
        decode(session, truth[:1], strategy=Greedy(), policy=FixedWidth(4, places), max_tokens=9, eos_ids=set())
    )
    assert [(step.width, step.num_accepted) for step in steps[:2]] == [(0, 0), (4, 4)]
    # The last round was queued before the limit was known to cut it.
    assert all(step.num_accepted == step.width for step in steps[:-1])
    assert [token for step in steps for token in step.tokens] == truth[1:]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("width", "count"), [(5, 5), (48, 3), (4099, 4), (20_000, 16)])
def test_best_columns_are_the_largest(width, count, dtype):
    """Compared with sorting. In bfloat16 many values are equal, and any of those will do."""
    logits = mx.random.normal((3, width), key=mx.random.key(width)).astype(dtype)
    columns = best_columns(logits, count)
    assert all(len(set(row)) == count for row in columns.tolist())
    found = mx.sort(mx.take_along_axis(logits, columns, axis=1), axis=-1)
    assert mx.array_equal(found, mx.sort(logits, axis=-1)[:, -count:]).item()


@pytest.fixture(scope="module")
def pair():
    target = tiny_target("llama", seed=3, vocab_size=VOCAB, num_hidden_layers=1)
    one_layer = {"num_hidden_layers": 1, "layer_types": ("full_attention",), "num_target_layers": 1}
    return target, tiny_drafter(block_size=4, taps=(0,), vocab_size=VOCAB, **one_layer, **SECOND)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [RUNS // 4, pytest.param(RUNS, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", [0, *(pytest.param(case, marks=pytest.mark.long) for case in range(1, len(CASES)))])
def test_rejection_sampling_keeps_the_targets_distribution(pair, case, runs):
    params = CASES[case]
    strategy = Rejection(params, seed=40 + case)
    counts = sample(*pair, params, runs, lambda run: strategy)
    assert chi_square_p(counts, exact_joint(pair[0], params), runs) > 1e-3


@pytest.mark.long
def test_a_width_chosen_by_confidence_does_not_bias_sampling(pair):
    params = CASES[0]
    strategy, policy = Rejection(params, seed=9), Confident(0.45)
    counts = sample(*pair, params, RUNS, lambda run: strategy, policy)
    assert min(policy.chosen.count(width) for width in set(policy.chosen)) > 0.02 * len(policy.chosen)
    assert len(set(policy.chosen)) >= 2
    assert chi_square_p(counts, exact_joint(pair[0], params), RUNS) > 1e-3


def test_a_seed_gives_the_same_answer_as_without_a_drafter(pair):
    target, drafter = pair
    for seed in range(10):
        params = SamplingParams(temperature=0.9, top_p=0.95, seed=seed)
        answers = [
            [
                token
                for step in decode(
                    Session(target, with_),
                    PROMPT,
                    strategy=Coupled(params),
                    policy=policy,
                    max_tokens=20,
                    eos_ids=set(),
                )
                for token in step.tokens
            ]
            for with_, policy in ((None, FixedWidth(0)), (drafter, FixedWidth(3)), (drafter, FixedWidth(5, places=3)))
        ]
        assert answers[0] == answers[1] == answers[2]


def test_the_distributions_reported_are_those_drawn_from(pair):
    """Many paths of one context: draws given the draft before follow the probabilities that the proposal names."""
    _, drafter = pair
    strategy = Rejection(SamplingParams(temperature=1.0), seed=1)
    hidden = mx.random.normal((2, 32), key=mx.random.key(0))
    logits = mx.random.normal((2, VOCAB), key=mx.random.key(1))
    counts, expected, runs = {}, {}, 3000
    for _ in range(runs):
        proposal = propose_path(
            drafter.candidate_selector,
            strategy,
            hidden=hidden,
            logits=logits,
            anchor=mx.array([2]),
            position=0,
            vocabulary=DraftVocabulary(mx.arange(VOCAB), VOCAB),
        )
        first, second = proposal.tokens.tolist()
        counts[first, second] = counts.get((first, second), 0) + 1
        probs = proposal.probs.tolist()
        for token in range(VOCAB):
            if probs[1][token] > 0:
                expected[first, token] = probs[0][first] * probs[1][token]
    assert sum(expected.values()) == pytest.approx(1, abs=1e-4)
    assert chi_square_p(counts, expected, runs) > 1e-3


@cache
def new_selector(size):
    """A selector that considers all `size` tokens and, being new, adds nothing to their scores."""
    return PathSelector(tiny_drafter(vocab_size=size, **{**SECOND, "selector_top_k": size}).config)


def path_of(strategy, logits, *, position):
    """A path for these logits (W, V) by a new selector."""
    size = logits.shape[1]
    return propose_path(
        new_selector(size),
        strategy,
        hidden=mx.zeros((len(logits), HIDDEN)),
        logits=logits,
        anchor=mx.array([2]),
        position=position,
        vocabulary=DraftVocabulary(mx.arange(size), size),
    )


@pytest.mark.parametrize("position", [1, 7, 4095])
def test_a_path_by_the_targets_own_logits_is_all_kept_under_a_seed(position):
    """Each place is drafted with the noise by which the target will choose there."""
    for seed in range(10):
        strategy = Coupled(SamplingParams(temperature=1.0, seed=seed))
        logits = mx.random.normal((7, 20), key=mx.random.key(seed))
        proposal = path_of(strategy, logits[:6], position=position)
        assert read(strategy.accept(proposal, logits, position)).num_accepted == 6


@pytest.mark.parametrize("kind", [Rejection, Coupled])
def test_the_places_of_a_path_are_drawn_independently(kind):
    """Without a selector's links, what is drawn at one place says nothing about the next: each has its own noise."""
    probs = np.array([0.5, 0.3, 0.2])
    logits, runs, counts = mx.array(np.log(np.tile(probs, (2, 1)))), 1000, {}
    for seed in range(runs):
        drawn = path_of(kind(SamplingParams(temperature=1.0), seed=seed), logits, position=4)
        places = tuple(drawn.tokens.tolist())
        counts[places] = counts.get(places, 0) + 1
    expected = {(a, b): probs[a] * probs[b] for a in range(3) for b in range(3)}
    assert chi_square_p(counts, expected, runs) > 1e-3


@pytest.mark.parametrize("ids", [None, tuple(range(40, 8, -2))], ids=["all tokens", "some"])
@pytest.mark.parametrize("strategy", [Greedy(), Coupled(SamplingParams(temperature=0.8, seed=3))])
@pytest.mark.parametrize(("places", "top_k"), [(1, 3), (4, 3), (5, 12)])
def test_what_a_tree_is_chosen_from_are_the_likeliest_paths(places, top_k, strategy, ids):
    """Compared with a search on the host that asks the selector for each path, as drafting a chain does."""
    drafter = tiny_drafter(**{**SECOND, "selector_top_k": top_k})
    selector, size = drafter.candidate_selector, 48
    assert mx.abs(selector.successor_codebook.weight).max().item() > 0.1
    vocabulary = DraftVocabulary(mx.array(ids or list(range(size))), size)
    hidden = mx.random.normal((places, HIDDEN), key=mx.random.key(0))
    logits = 2 * mx.random.normal((places, vocabulary.token_ids.size), key=mx.random.key(1))
    drafted = grow_paths(
        selector, strategy, hidden=hidden, logits=logits, anchor=mx.array([2]), position=9, vocabulary=vocabulary
    )
    probs = mx.softmax(logits, axis=-1)
    assert np.exp(np.array(drafted.confidence)) == pytest.approx(np.array(probs.max(axis=-1))[None], rel=1e-4)

    @cache
    def said_after(place, token):
        """The tokens that may come at a place after one before it, by their logarithms, the likeliest eight."""
        columns = selector.candidates(logits[place : place + 1])
        tokens, unary = vocabulary.token_ids[columns], mx.take_along_axis(logits[place : place + 1], columns, axis=-1)
        scores = selector.scores(unary, selector.links(hidden[place : place + 1], tokens), mx.array([token]))
        few = DraftVocabulary(tokens[0], size)
        log_probs = nn.log_softmax(strategy.preferences(scores, 9 + place, few), axis=-1)
        among = mx.log(mx.take_along_axis(probs[place : place + 1], columns, axis=-1).sum())
        said = dict(zip(tokens[0].tolist(), (log_probs[0] + among).tolist(), strict=True))
        return dict(sorted(said.items(), key=lambda item: -item[1])[:BRANCHES])

    beam, expected = {(): 0.0}, {}
    for place in range(places):
        found = {}
        for path, total in beam.items():
            for token, log_prob in said_after(place, path[-1] if path else 2).items():
                found[(*path, token)] = total + log_prob
                expected[(*path, token)] = log_prob
        best = max(found, key=found.get)
        assert drafted.tokens[0, place].item() == best[-1]
        beam = dict(sorted(found.items(), key=lambda item: -item[1])[: min(BRANCHES, top_k)])
    tokens, grown = drafted.grown.token_ids.tolist(), drafted.grown
    paths = [tuple(tokens[i] for i in path if i < len(tokens)) for path in grown.paths.tolist()]
    assert sorted(paths) == sorted(expected)
    assert grown.log_probs.tolist() == pytest.approx([expected[path] for path in paths], abs=1e-4)
