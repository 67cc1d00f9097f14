"""Which drafts are kept, as pure functions: tokens come from the target's own distribution, and no draft is wasted."""

import math
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from best_first import HostTree, best_first
from test_sampling import chi_square_p
from tiny import read

from dflash_mlx.decoding.accept import Coupled, DraftVocabulary, Greedy, Outcome, Rejection, for_trees, judge, reject
from dflash_mlx.drafters.contract import Proposal
from dflash_mlx.sampling import SamplingParams, sampling_scores

# What a drafter says of three places, and what the target says of them and of the one after: very different.
DRAFT = mx.array([[0.7, 0.2, 0.1, 0.0], [0.1, 0.1, 0.2, 0.6], [0.05, 0.8, 0.1, 0.05]])
TARGET = mx.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.3, 0.1, 0.1], [0.3, 0.1, 0.2, 0.4], [0.4, 0.3, 0.2, 0.1]])


@pytest.mark.parametrize("width", [0, 3])
def test_what_the_host_reads_is_an_array_of_its_own(width):
    """On CUDA, MLX moves its memory then, and the next pass, which may have been launched, reads the tokens."""
    tokens = mx.arange(2 * (width + 1), dtype=mx.uint32).reshape(2, width + 1)
    outcome = Outcome(mx.array([width, 0]), tokens)
    mx.eval(outcome.packed)
    assert not np.shares_memory(np.asarray(outcome.packed), np.asarray(tokens))
    assert [reading.tokens for reading in outcome.read()] == [tokens[0].tolist(), tokens[1, :1].tolist()]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_every_draft_of_a_block_is_judged(width):
    """The joint distribution of a block's W places and of the one after is the target's, the last draft included.

    The target's rows do not depend on the drafts here, so the places have to be independent. Places that a block did
    not reach are filled with draws from the target, as the next rounds would fill them.
    """
    draft_probs, target_probs, runs = DRAFT[:width], TARGET[: width + 1], 3000
    draft_key, judge_key, fill_key = mx.random.split(mx.random.key(5), 3)
    drafts = mx.random.categorical(mx.log(draft_probs), shape=(runs, width), key=draft_key)
    places = mx.random.categorical(mx.log(target_probs), shape=(runs, width + 1), key=fill_key).tolist()
    for drafted, row, key in zip(drafts, places, mx.random.split(judge_key, runs), strict=True):
        tokens = read(reject(drafted, draft_probs, target_probs, key)).tokens
        row[: len(tokens)] = tokens
    found = Counter(map(tuple, places))
    rows = target_probs.tolist()
    expected = {
        places: math.prod(row[token] for row, token in zip(rows, places, strict=True))
        for places in np.ndindex(*[len(rows[0])] * len(rows))
    }
    assert chi_square_p(found, expected, runs) > 1e-3


@pytest.mark.parametrize("position", [1, 7, 4095])
@pytest.mark.parametrize("token_ids", [None, tuple(range(29, -1, -1))], ids=["whole vocabulary", "own order"])
def test_coupled_drafts_from_the_targets_own_logits_are_all_kept(position, token_ids):
    """Draft and target choose with the same noise at the same position, so equal logits choose equal tokens."""
    vocabulary = DraftVocabulary(mx.array(token_ids), 30) if token_ids else None
    for seed in range(20):
        strategy = Coupled(SamplingParams(temperature=1.0, top_k=20, seed=seed))
        logits = mx.random.normal((6, 30), key=mx.random.key(seed))
        drafted = logits[:5, mx.array(token_ids)] if token_ids else logits[:5]
        proposal = strategy.propose(drafted, position, vocabulary)
        outcome = strategy.accept(proposal, logits, position)
        assert read(outcome).num_accepted == 5


OWN = DraftVocabulary(mx.array([5, 2, 7]), 9)
SOME = [[0.1, 2.0, 0.3], [1.0, 0.5, 3.0]]
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9)


def test_greedy_drafts_are_the_drafters_best_tokens():
    logits = mx.array(SOME)
    for vocabulary, tokens in ((None, [1, 2]), (OWN, [2, 7])):
        proposal = Greedy().propose(logits, 3, vocabulary)
        assert proposal.tokens.tolist() == tokens


@pytest.mark.parametrize("vocabulary", [None, OWN], ids=["whole vocabulary", "own vocabulary"])
def test_sampled_drafts_are_drawn_from_what_they_say_they_are(vocabulary):
    """Many rows of the same logits: counts of the tokens, and the distribution that comes with them."""
    runs = 3000
    logits = mx.broadcast_to(mx.array(SOME[0]), (runs, 3))
    proposal = Rejection(SAMPLED, seed=3).propose(logits, 0, vocabulary)
    probs = mx.softmax(sampling_scores(logits[:1], SAMPLED))[0].tolist()
    ids = OWN.token_ids.tolist() if vocabulary else range(3)
    expected = dict(zip(ids, probs, strict=True))
    assert proposal.probs.shape == (runs, 9 if vocabulary else 3)
    for token, probability in enumerate(proposal.probs[-1].tolist()):
        assert probability == pytest.approx(expected.get(token, 0.0), abs=1e-6)
    assert chi_square_p(Counter(proposal.tokens.tolist()), expected, runs) > 1e-3


def test_a_token_without_drafts_is_drawn_from_the_target():
    runs = 3000
    logits = mx.broadcast_to(mx.array(SOME[0]), (runs, 3))
    outcome = Rejection(SAMPLED, seed=3).accept(None, logits, 0)
    assert outcome.num_accepted.item() == 0
    probs = mx.softmax(sampling_scores(logits[:1], SAMPLED))[0].tolist()
    assert chi_square_p(Counter(outcome.tokens.tolist()), dict(enumerate(probs)), runs) > 1e-3


def test_rejection_keeps_what_a_sure_target_would_draw():
    """Two sure models that agree on the first two of three places."""

    def sure(*tokens):
        return 50.0 * mx.eye(6)[mx.array(tokens)]

    strategy = Rejection(SamplingParams(temperature=1.0), seed=0)
    proposal = strategy.propose(sure(4, 1, 3), 0)
    assert proposal.tokens.tolist() == [4, 1, 3]
    reading = read(strategy.accept(proposal, sure(4, 1, 2, 5), 0))
    assert (reading.num_accepted, reading.tokens) == (2, [4, 1, 2])


def test_each_draw_is_another_and_a_seed_repeats_them():
    logits = mx.zeros((40, 100))
    params = SamplingParams(temperature=1.0)

    def draws(strategy):
        return [strategy.accept(None, logits, 0).tokens.tolist() for _ in range(2)]

    first, second = draws(Rejection(params, seed=4))
    assert first != second
    assert draws(Rejection(params, seed=4)) == [first, second]
    assert draws(Rejection(params, seed=5)) != [first, second]
    assert draws(Rejection(params)) != draws(Rejection(params))


def test_where_rounding_leaves_nothing_over_the_target_draws():
    """A draft distribution that is larger everywhere, far more than rounding makes it."""
    target = mx.array([[0.0, 0.5, 0.5, 0.0]])
    refused = Counter()
    for key in mx.random.split(mx.random.key(0), 200):
        reading = read(reject(mx.array([1]), 2 * target, mx.concatenate([target, target]), key))
        if reading.num_accepted == 0:
            refused[reading.tokens[0]] += 1
    assert set(refused) == {1, 2}


def test_outcomes_of_different_depths_are_read_as_each_alone():
    rng = np.random.default_rng(0)
    outcomes = []
    for width in (0, 1, 2, 4):
        logits = mx.array(rng.normal(size=(width + 1, 6)).astype(np.float32))
        drafts = mx.argmax(logits[:width], axis=-1) if width else None
        outcomes.append(Greedy().accept(Proposal(drafts) if width else None, logits, 0))
    together = Outcome.stack(outcomes, 4)
    assert together.depth == 4
    for outcome, found in zip(outcomes, together.read(), strict=True):
        alone = read(outcome)
        assert found == (outcome.depth, alone.tokens, 4, None, None)


def test_trees_are_drawn_by_the_same_noise():
    greedy, coupled = Greedy(), Coupled(SAMPLED, seed=3)
    assert for_trees(greedy) is greedy
    assert for_trees(coupled) is coupled
    own = for_trees(Rejection(SAMPLED, seed=8))
    assert isinstance(own, Coupled)
    assert (own.params, own.seed) == (SAMPLED, 8)


def test_a_tree_is_judged_by_the_noise_of_its_rows_positions():
    """Rows at one depth have the same position, so each row's token is the one that plain decoding draws there."""
    ids, log_probs = np.array([[1, 2], [3, 4], [5, 6]]), np.log(np.array([[0.6, 0.4]] * 3))
    tree = HostTree.of(list(best_first(log_probs)), ids, log_probs)
    strategy, kept = Coupled(SamplingParams(temperature=1.0), seed=3), set()
    further = mx.array([5, 0, 2**32 - 1], dtype=mx.uint32)
    for position in range(20, 60):
        logits = mx.random.normal((tree.size + 1, 7), key=mx.random.key(position))
        walk = judge(strategy, tree.on_device, logits, position)
        [reading], [more] = Outcome.of_tree(walk).read(), Outcome.of_tree(walk, further).read()
        assert more[:4] == reading[:4]
        assert (reading.further, more.further.tolist()) == (None, further.tolist())
        kept.add(reading.num_accepted)
        for row, token in zip(walk.path[: reading.num_accepted + 1].tolist(), reading.tokens, strict=True):
            plain = strategy.accept(None, logits[row : row + 1], position + tree.depths[row])
            assert token == plain.tokens.item()
    assert {0, 1, 2} <= kept
