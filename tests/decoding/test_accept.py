"""Which drafts are kept, as pure functions: tokens come from the target's own distribution, and no draft is wasted."""

import math
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from test_sampling import chi_square_p
from tiny import read

from dflash_mlx.decoding.accept import Coupled, DraftVocabulary, reject
from dflash_mlx.sampling import SamplingParams

# What a drafter says of three places, and what the target says of them and of the one after: very different.
DRAFT = mx.array([[0.7, 0.2, 0.1, 0.0], [0.1, 0.1, 0.2, 0.6], [0.05, 0.8, 0.1, 0.05]])
TARGET = mx.array([[0.1, 0.2, 0.3, 0.4], [0.5, 0.3, 0.1, 0.1], [0.3, 0.1, 0.2, 0.4], [0.4, 0.3, 0.2, 0.1]])


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
