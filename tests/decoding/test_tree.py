"""Trees of drafts: grown best first, judged as a walk from row to row would."""

import itertools
import random

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.decoding.accept import Greedy, Outcome, judge
from dflash_mlx.decoding.tree import Candidates, DraftTree, Ranking, grow, rank, walk, wide_sizes


def random_candidates(rng, places, branches, vocabulary=50):
    ids = np.stack([rng.choice(vocabulary, branches, replace=False) for _ in range(places)])
    return Candidates(ids, np.log(-np.sort(-rng.dirichlet(np.ones(branches + 1), places)[:, :branches], axis=1)))


def random_tree(rng, size):
    candidates = random_candidates(rng, 6, 4)
    return DraftTree.of(list(itertools.islice(grow(candidates), size)), candidates)


@pytest.mark.parametrize("seed", range(5))
def test_paths_come_in_falling_order_of_chance(seed):
    """All 3 + 9 + 27 + 81 paths, in the order that a sort of them all gives."""
    candidates = random_candidates(np.random.default_rng(seed), 4, 3)
    nodes = list(grow(candidates))
    paths = []
    for node in nodes:
        before = paths[node.parent] if node.parent is not None else ()
        paths.append((*before, node.rank))
        assert node.place == len(before)
    assert sorted(paths) == sorted(p for depth in range(1, 5) for p in itertools.product(range(3), repeat=depth))
    chances = [np.exp(sum(candidates.log_probs[i, rank] for i, rank in enumerate(path))) for path in paths]
    assert [node.chance for node in nodes] == pytest.approx(chances)
    assert chances == sorted(chances, reverse=True)


def test_scale_moves_every_probability_and_none_to_certainty():
    candidates = Candidates(np.array([[1], [2]]), np.log(np.array([[0.8], [0.5]])))
    assert [node.chance for node in grow(candidates, scale=0.5)] == pytest.approx([0.4, 0.1])
    assert [node.chance for node in grow(candidates, scale=10.0)] == pytest.approx([0.995, 0.995**2])


def test_rows_follow_their_parents_and_the_likeliest_path_comes_first():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        tree = random_tree(rng, int(rng.integers(1, 40)))
        assert all(parent <= i for i, parent in enumerate(tree.parents))
        best = 0
        while best < tree.size and tree.parents[best] == best:
            best += 1
        heads = [i for i, parent in enumerate(tree.parents, 1) if parent == 0]
        assert heads[0] == 1
        assert tree.probabilities[0] == max(tree.probabilities[i - 1] for i in heads)
        assert best >= 1
        for row in range(1, tree.size + 1):
            line = {row}
            while row:
                row = tree.parents[row - 1]
                line.add(row)
            assert set(np.flatnonzero(tree.visible[max(line)])) == line
            assert tree.depths[max(line)] == len(line) - 1


def test_a_tree_is_written_path_by_path_the_likeliest_first():
    """Every draft that was grown is there once, and before its next sibling come all that continue it."""
    for seed in range(20):
        candidates = random_candidates(np.random.default_rng(seed), 3, 4)
        nodes = list(itertools.islice(grow(candidates), 25))
        tree = DraftTree.of(nodes, candidates)
        grown: list[tuple[int, ...]] = []
        for node in nodes:
            grown.append((*(grown[node.parent] if node.parent is not None else ()), node.rank))
        # In the order of a dictionary: a path before what continues it, and that before the next sibling.
        in_order = sorted(grown)
        assert tree.tokens.tolist() == [candidates.token_ids[len(path) - 1, path[-1]] for path in in_order]
        rows = {(): 0, **{path: row for row, path in enumerate(in_order, 1)}}
        assert tree.parents == tuple(rows[path[:-1]] for path in in_order)
        assert tree.probabilities == pytest.approx(
            [np.exp(candidates.log_probs[len(path) - 1, path[-1]]) for path in in_order]
        )


def test_wide_trees_have_about_twice_and_four_times_as_many_drafts():
    """With the anchor, that fills blocks of twice and four times the rows of a chain's."""
    assert [tuple((size + 1) / (places + 1) for size in wide_sizes(places)) for places in (3, 15)] == [(2, 4)] * 2


def test_no_drafts_are_a_tree_too():
    empty = DraftTree.of([], random_candidates(np.random.default_rng(0), 2, 2))
    assert (empty.size, empty.depth, empty.depths) == (0, 0, [0])
    assert list(grow(empty_candidates := Candidates(np.zeros((0, 2)), np.zeros((0, 2))))) == []
    assert empty_candidates.depth == 0


def walked(tree, choices):
    """The rows that the choices lead through, a step at a time."""
    path = [0]
    while True:
        wanted = choices[path[-1]]
        rows = [i for i, p in enumerate(tree.parents, 1) if p == path[-1] and tree.tokens[i - 1] == wanted]
        if not rows:
            return path
        path += rows


def test_the_walk_on_the_device_is_the_walk_by_hand():
    lengths = set()
    for seed in range(200):
        rng = np.random.default_rng(seed)
        tree = random_tree(rng, int(rng.integers(1, 30)))
        choices = rng.integers(0, 50, tree.size + 1).astype(np.uint32)
        # Mostly choose a child, so that walks of every length come up.
        for row in range(tree.size + 1):
            children = [i for i, p in enumerate(tree.parents, 1) if p == row]
            if children and rng.random() < 0.8:
                choices[row] = tree.tokens[rng.choice(children) - 1]
        expected = walked(tree, choices.tolist())
        num_accepted, path = walk(tree, mx.array(choices))
        assert path.shape == (tree.depth + 1,)
        assert path[: num_accepted.item() + 1].tolist() == expected
        assert tree.promised(expected) == pytest.approx(
            sum(tree.probabilities[i - 1] for i in range(1, tree.size + 1) if tree.parents[i - 1] in expected)
        )
        lengths.add(len(expected))
    assert lengths >= {1, 2, 3, 4}


def test_an_outcome_brings_the_kept_drafts_and_the_targets_own_token():
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 12)
    logits = mx.array(rng.normal(size=(13, 50)).astype(np.float32))
    child = tree.parents.index(0) + 1
    logits[0, int(tree.tokens[child - 1])] = 100.0
    outcome = judge(Greedy(), tree, logits, 7)
    choices = mx.argmax(logits, axis=-1).tolist()
    [reading] = Outcome.stack([outcome], tree.depth).read()
    assert reading.path == walked(tree, choices)
    assert reading.tokens == [choices[row] for row in reading.path]
    assert reading.num_accepted == len(reading.path) - 1 >= 1
    assert outcome.next_anchor.item() == reading.tokens[-1]


@pytest.mark.parametrize("answers", [1, 3])
def test_reading_an_outcome_launches_nothing(answers, monkeypatch):
    """What it launched would run after the round that is on its way already, and the host would wait for both."""
    outcome = Outcome.stack([Greedy().accept(None, mx.zeros((1, 5)), 0)] * answers, 0)
    mx.eval(outcome.packed)
    monkeypatch.setattr(mx, "concatenate", lambda *_, **__: pytest.fail("a new array"))
    assert [reading.tokens for reading in outcome.read()] == [[0]] * answers


@pytest.mark.parametrize("vocabulary", [None, random.Random(0).sample(range(500), 40)])
def test_candidates_are_the_likeliest_tokens(vocabulary):
    scores = np.random.default_rng(0).normal(0, 3, (5, 40)).astype(np.float32)
    scores[:, 3:30] = -np.inf  # what a filter has removed
    ranking = rank(mx.array(scores), 8, None if vocabulary is None else mx.array(vocabulary))
    found = ranking.read()
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    order = np.argsort(-logs, axis=1)[:, :8]
    assert (found.token_ids == (order if vocabulary is None else np.array(vocabulary)[order])).all()
    np.testing.assert_allclose(found.log_probs, np.take_along_axis(logs, order, axis=1), rtol=1e-5)


def test_a_ranking_can_be_taken_apart_by_answers():
    """Of three answers with two places each, those of the third and the first; and of those one place."""
    ids = mx.arange(6 * 4, dtype=mx.uint32).reshape(6, 4)
    log_probs = mx.broadcast_to(mx.array([-0.1, -0.2, -0.3, -0.4]), (6, 4))
    taken = Ranking(ids, log_probs).take([2, 0], 3).read()
    assert taken.token_ids.tolist() == [[16, 17, 18, 19], [20, 21, 22, 23], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert taken.log_probs.shape == (4, 4)
    short = taken.shortened(1)
    assert short.token_ids.tolist() == [[16, 17, 18, 19]]
    assert (short.depth, short.log_probs.shape) == (1, (1, 4))


def test_removed_tokens_are_never_drafted():
    scores = mx.full((2, 600), -mx.inf)
    scores[:, 7] = 0.0
    ranking = rank(scores, 8)
    found = ranking.read()
    assert found.token_ids[:, 0].tolist() == [7, 7]
    assert (found.token_ids < 600).all()
    assert np.exp(found.log_probs).tolist() == [[1.0, *[0.0] * 7]] * 2
