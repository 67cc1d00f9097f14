"""Trees of the drafter's drafts and the text's: the likeliest paths by both, and answers stay the target's own."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from decoding.test_tree import random_candidates, ranking_of
from drafters.test_growing import grown, said_after
from drafters.test_ngram import SimpleText, circling
from drafters.test_with_ngram import NEW, REPEATS, VOCAB, Inner
from tiny import SECOND, tiny_drafter

from dflash_mlx.decoding.accept import Coupled, Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.joined import join
from dflash_mlx.decoding.policies import Forecast
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.tree import Likeliest, likeliest, likeliest_grown
from dflash_mlx.drafters.contract import Continuation
from dflash_mlx.drafters.with_ngram import WithNgram, WithNgramState
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.tree_steps import SUREST


def joined(ids, log_probs, text, size, *, scale=1.0):
    found = Likeliest(ranking_of(ids, log_probs), (), mx.zeros((2 * len(ids) + size,)))
    return join(found, text, scale=scale)


def paths_of(tree, size):
    """The tokens on the way to each draft of a tree of so many."""
    built = tree.tree(size)
    tokens, visible = built.tokens.tolist(), np.array(built.visible)[1:, 1:]
    return [tuple(tokens[at] for at in np.flatnonzero(row)) for row in visible]


def path_chance(path, ids, log_probs, text, joint, scale):
    """By the drafter alone where it has left the text; `joint` says what both say of a place on the text's path."""
    chance = 1.0
    for place, token in enumerate(path):
        if list(path[:place]) == text.tokens[:place]:
            chance *= joint[place][token]
        else:
            own = dict(zip(ids[place].tolist(), np.exp(log_probs[place]) * scale, strict=True))
            chance *= min(own[token], SUREST)
    return chance


@pytest.mark.parametrize("seed", range(6))
def test_the_likeliest_of_all_paths_are_found(seed):
    rng = np.random.default_rng(seed)
    ids, log_probs = random_candidates(rng, 4, 3, vocabulary=9)
    scale = float(rng.choice([0.6, 1.0, 1.2]))
    text = Continuation(rng.integers(0, 9, 4).tolist(), rng.uniform(0.05, 0.99, 4).tolist())
    # What is said of each place on the text's path, read off trees of one place.
    joint = []
    for place in range(4):
        one = Continuation(text.tokens[place : place + 1], text.chances[place : place + 1])
        tree = joined(ids[place : place + 1], log_probs[place : place + 1], one, 9, scale=scale)
        joint.append({token: chance for (token,), chance in zip(paths_of(tree, 9), tree.chances.tolist(), strict=True)})
    every = []
    for depth in range(1, 5):
        for path in itertools.product(*([*ids[place].tolist(), text.tokens[place]] for place in range(depth))):
            possible = all(
                token in ids[place] or list(path[: place + 1]) == text.tokens[: place + 1]
                for place, token in enumerate(path)
            )
            if possible:
                every.append(path)
    chances = sorted((path_chance(p, ids, log_probs, text, joint, scale) for p in set(every)), reverse=True)
    tree = joined(ids, log_probs, text, 20, scale=scale)
    np.testing.assert_allclose(np.array(tree.chances), chances[:20], rtol=1e-5)
    paths = paths_of(tree, 20)
    assert len(set(paths)) == 20
    own = [path_chance(path, ids, log_probs, text, joint, scale) for path in paths]
    np.testing.assert_allclose(own, chances[:20], rtol=1e-5)
    built = tree.tree(20)
    assert built.depths.tolist() == [0, *map(len, paths)]
    assert built.depth == max(map(len, paths))
    # A parent's row comes before its children's.
    assert (np.triu(np.array(built.visible), 1) == 0).all()


def test_an_unlikely_text_leaves_the_drafters_tree():
    ids, log_probs = random_candidates(np.random.default_rng(1), 5, 4)
    text = Continuation([98, 97, 96, 95, 94], [0.0] * 5)
    expected = likeliest(ranking_of(ids, log_probs), 15)
    tree = joined(ids, log_probs, text, 15)
    # The text's first token keeps a little of the chance.
    assert set(paths_of(tree, 10)) - {(98,)} <= set(paths_of(expected, 15))
    np.testing.assert_allclose(np.array(tree.chances)[:5], np.array(expected.chances)[:5], rtol=0.05)


def test_a_likely_text_comes_first_and_the_drafters_drafts_beside_it():
    ids = np.array([[1, 2], [3, 4], [5, 6]])
    log_probs = np.log(np.array([[0.5, 0.3], [0.5, 0.3], [0.5, 0.3]]))
    text = Continuation([9, 4, 7], [0.95] * 3)
    paths = paths_of(joined(ids, log_probs, text, 6), 6)
    assert paths[:3] == [(9,), (9, 4), (9, 4, 7)]
    assert any(path[0] in (1, 2) for path in paths)


def test_what_both_hold_likely_is_likelier_than_what_one_does():
    def chances(text_token, chance):
        tree = joined(np.array([[1, 2]]), np.log(np.array([[0.6, 0.3]])), Continuation([text_token], [chance]), 3)
        return dict(zip([path[0] for path in paths_of(tree, 3)], tree.chances.tolist(), strict=True))

    assert chances(1, 0.8)[1] > 0.8
    assert chances(1, 0.8)[1] > chances(2, 0.8)[2] > chances(7, 0.8)[7]
    assert chances(1, 0.9)[1] > chances(1, 0.5)[1]
    # What one of them gains the others lose.
    for token in (1, 2, 7):
        told = chances(token, 0.8)
        assert all(told[other] < before for other, before in ((1, 0.6), (2, 0.3)) if other != token)
        assert sum(told.values()) <= 1.0


def chance_of_each_path(tree):
    return dict(zip(paths_of(tree, tree.size), tree.chances.tolist(), strict=True))


def by_the_drafter(tree):
    """The same of a tree of the drafter's paths, whose rows are in the order in which they were grown."""
    paths = paths_of(tree, tree.size)
    return {path: np.exp(sum(said_after(path[:i])[path[i]] for i in range(len(path)))) for path in paths}


def test_a_text_that_leaves_paths_that_were_grown_goes_on_alone():
    found, _ = grown(3, 4)
    own = likeliest_grown(found, 23)
    drafters = by_the_drafter(own)
    text = Continuation([50, 51, 52, 53], [0.9, 0.8, 0.7, 0.6])
    tree = chance_of_each_path(join(own, text, scale=1.0))
    first = tree[(50,)]
    assert first > 0.5
    assert tree[(50, 51)] == pytest.approx(0.8 * first, rel=1e-5)
    assert tree[(50, 51, 52)] == pytest.approx(0.7 * 0.8 * first, rel=1e-5)
    # The drafter's own paths are less likely by what the text's first token took, all alike.
    kept = {path: tree[path] / drafters[path] for path in tree if path in drafters}
    assert len(kept) > 10
    assert np.ptp(list(kept.values())) < 1e-3
    assert 0 < next(iter(kept.values())) < 0.5


def test_a_text_that_follows_a_path_that_was_grown_makes_it_likelier():
    found, _ = grown(3, 4)
    own = likeliest_grown(found, 23)
    drafters = by_the_drafter(own)
    path = max((path for path in drafters if len(path) == 3), key=lambda path: drafters[path])
    tree = chance_of_each_path(join(own, Continuation([*path, 50], [0.9] * 4), scale=1.0))
    assert all(tree[path[:length]] > drafters[path[:length]] for length in (1, 2, 3))
    assert tree[(*path, 50)] < tree[path]
    others = [other for other in tree if other in drafters and other[0] != path[0]]
    assert all(tree[other] < drafters[other] for other in others)


@pytest.mark.parametrize("scale", [0.05, 1.0])
def test_a_policy_learns_of_the_drafter_where_it_was_asked_alone(scale):
    """What both hold likely says nothing of the drafter: nothing is promised there, and nothing kept there counts."""
    ids = np.array([[1, 2], [3, 4], [5, 6]])
    log_probs = np.log(np.array([[0.5, 0.3], [0.6, 0.2], [0.7, 0.1]]))
    text = Continuation([1, 4, 9], [0.9] * 3)
    tree = joined(ids, log_probs, text, 12, scale=scale)
    told = dict(zip(paths_of(tree, 12), tree.tree(12).probabilities.tolist(), strict=True))
    with_text = {path for path in told if list(path[:-1]) == text.tokens[: len(path) - 1]}
    assert {(1,), (1, 4), (1, 4, 9)} <= with_text
    assert all(told[path] == 0 for path in with_text)
    alone = {path: told[path] for path in told if path not in with_text}
    own = {3: 0.6, 4: 0.2, 5: 0.7, 6: 0.1}
    assert alone == pytest.approx({path: own[path[-1]] for path in alone}, rel=1e-5)
    forecast = Forecast(np.zeros(3), np.zeros(12), text=text.tokens)
    for tokens, num_accepted, expected in (
        ([2, 3, 5, 0], 3, 1),
        ([1, 3, 5, 0], 3, 2),
        ([1, 4, 9, 0], 3, 3),
        ([1, 0], 1, 1),
        ([0], 0, 0),
    ):
        assert forecast.kept_with_text(tokens, num_accepted) == expected
    assert Forecast(np.zeros(3), np.zeros(12)).kept_with_text([1, 4, 9, 0], 3) == 0


def test_the_text_goes_on_where_the_drafter_drafted():
    state = WithNgramState(Inner(), places=15, vocab_size=100)
    writer = SimpleText(REPEATS)
    assert state.continuation(SimpleText(NEW), 4) is None
    text = state.continuation(writer, 4)
    assert text.tokens == [12, 13, 14, 15]
    assert all(0.5 < chance < 1 for chance in text.chances)
    # A round that the text drafts for has its drafts already.
    zeros = mx.zeros((1,))
    state.propose([writer], zeros, zeros, 3, room=9)
    assert state.inner.asked == 0
    assert state.continuation(writer, 4) is None


class Listening(FixedWidth):
    """Is told of each round; `told` has how many drafts were kept, and how many of them came with a text's help."""

    listens_after = 1

    def __init__(self):
        super().__init__(9, places=7, waits=True)
        self.told = []

    def observe(self, round):
        self.told.append((round.num_accepted, round.with_text))


def answer(target, drafter, strategy, policy):
    """Tokens of an answer, and how many rounds it took."""
    lane = {"strategy": strategy, "policy": policy, "max_tokens": 150, "eos_ids": set()}
    steps = list(decode(Session(target, drafter), [1, 2, 3], **lane))
    return [token for step in steps for token in step.tokens], len(steps)


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("parts", [{}, SECOND])
def test_rounds_keep_more_with_the_text_and_answers_stay_the_same(parts, temperature, monkeypatch):
    """The text is never preferred here, so that only joined trees use it."""
    monkeypatch.setattr(WithNgramState, "_by_text", lambda state, writers: [False] * len(writers))
    target = circling()
    one_layer = {"num_hidden_layers": 1, "layer_types": ("full_attention",), "num_target_layers": 1}
    drafter = tiny_drafter(block_size=8, taps=(0,), vocab_size=VOCAB, **one_layer, **parts)
    strategy = Coupled(SamplingParams(temperature=temperature), seed=5) if temperature else Greedy()
    plain, _ = answer(target, None, strategy, FixedWidth(0))
    by_itself, with_text = Listening(), Listening()
    alone, rounds = answer(target, drafter, strategy, by_itself)
    joint, fewer = answer(target, WithNgram(drafter), strategy, with_text)
    assert alone == joint == plain
    assert fewer < 0.6 * rounds
    assert all(helped == 0 for _, helped in by_itself.told)
    assert all(helped <= kept for kept, helped in with_text.told)
    kept, helped = (sum(counts) for counts in zip(*with_text.told, strict=True))
    assert helped > 0.5 * kept > 0
