"""Trees of drafts: the likeliest ones are those of a plain search, and they are judged as a walk from row to row."""

import itertools
import random

import mlx.core as mx
import numpy as np
import pytest
from best_first import HostTree, Node, best_first

from dflash_mlx.decoding.accept import Greedy, Outcome, judge
from dflash_mlx.decoding.tree import likeliest, walk, wide_sizes
from dflash_mlx.drafters.ranking import BRANCHES, Ranking, rank


def random_candidates(rng, places, branches, vocabulary=50):
    """Token ids and probabilities (W, K), the best first."""
    ids = np.stack([rng.choice(vocabulary, branches, replace=False) for _ in range(places)])
    probabilities = -np.sort(-rng.dirichlet(np.full(branches + 1, 0.5), places)[:, :branches], axis=1)
    return ids, np.log(probabilities)


def ranking_of(ids, log_probs):
    return Ranking(mx.array(ids), mx.array(log_probs))


def random_tree(rng, size):
    ids, log_probs = random_candidates(rng, 6, 4)
    return HostTree.of(list(itertools.islice(best_first(log_probs), size)), ids, log_probs)


def paths_of(nodes: list[Node]) -> list[tuple[int, ...]]:
    """The ranks on the way to each node."""
    paths: list[tuple[int, ...]] = []
    for node in nodes:
        paths.append((*(paths[node.parent] if node.parent is not None else ()), node.rank))
        assert node.place == len(paths[-1]) - 1
    return paths


@pytest.mark.parametrize("seed", range(5))
def test_the_plain_search_goes_through_all_paths_in_falling_order_of_chance(seed):
    """All 3 + 9 + 27 + 81 paths, in the order that a sort of them all gives."""
    _, log_probs = random_candidates(np.random.default_rng(seed), 4, 3)
    nodes = list(best_first(log_probs))
    paths = paths_of(nodes)
    assert sorted(paths) == sorted(p for depth in range(1, 5) for p in itertools.product(range(3), repeat=depth))
    chances = [np.exp(sum(log_probs[i, rank] for i, rank in enumerate(path))) for path in paths]
    assert [node.chance for node in nodes] == pytest.approx(chances)
    assert chances == sorted(chances, reverse=True)


def check_found(ids, log_probs, size, *, scale=1.0):
    """The device finds what the plain search does, and writes it path by path, the likeliest first."""
    expected = list(itertools.islice(best_first(log_probs, scale=scale), size))
    found = likeliest(ranking_of(ids, log_probs), size, scale=scale)
    assert found.size == len(expected)
    np.testing.assert_allclose(np.array(found.chances), [node.chance for node in expected], rtol=1e-3)
    for count in {1, size // 2, size}:
        nodes, tree = expected[:count], found.tree(count)
        truth = HostTree.of(nodes, ids, log_probs)
        # In the order of a dictionary: a path before what continues it, and that before the next sibling.
        in_order = sorted(paths_of(nodes))
        assert truth.tokens == [ids[len(path) - 1, path[-1]] for path in in_order]
        assert tree.tokens.tolist() == truth.tokens
        assert tree.depths.tolist() == truth.depths
        assert (np.array(tree.visible) == truth.visible).all()
        assert tree.probabilities.tolist() == pytest.approx(truth.probabilities, rel=1e-4)
        assert max(truth.depths) <= tree.depth <= count
        assert tree.size == len(nodes)


@pytest.mark.parametrize(("places", "size"), [(1, 5), (3, 7), (3, 14), (7, 31), (15, 15), (15, 31), (15, 63)])
def test_the_device_finds_the_likeliest_drafts(places, size):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        check_found(*random_candidates(rng, places, BRANCHES), size, scale=rng.choice([0.5, 0.9, 1.0, 1.3]))


@pytest.mark.parametrize("best", [0.2, 0.6, 0.99])
def test_trees_of_every_form_are_found(best):
    """From broad to one path, with probabilities that differ from place to place by less and less."""
    for spread in (0.3, 0.01):
        rng = np.random.default_rng(0)
        ids, _ = random_candidates(rng, 15, BRANCHES)
        probabilities = best * np.power(1 - best, np.arange(BRANCHES)) * np.exp(-spread * rng.random((15, 1)))
        noise = 1 - 1e-3 * np.sort(rng.random((15, BRANCHES)), axis=1)
        check_found(ids, np.log(probabilities * noise).astype(np.float32), 31)


def test_sums_never_run_over_one_number_of_a_longer_row(monkeypatch):
    """On CUDA, MLX 0.32 writes the others of the row after its end then, over memory of other arrays."""
    cumsum, steps = mx.cumsum, []

    def noting(array, axis=0):
        mx.eval(array)
        steps.append((memoryview(array).strides[axis], array[0].nbytes))
        return cumsum(array, axis=axis)

    monkeypatch.setattr(mx, "cumsum", noting)
    ranking = rank(mx.random.normal((1, 5000), key=mx.random.key(0)), BRANCHES)
    assert likeliest(ranking, 31).size == BRANCHES
    assert steps
    assert all(step == row for step, row in steps)


def test_there_are_no_more_drafts_than_paths():
    ids, log_probs = random_candidates(np.random.default_rng(0), 2, 3)
    found = likeliest(ranking_of(ids, log_probs), 50)
    assert found.size == 3 + 9
    tree = found.tree(50)
    assert (tree.size, tree.depth) == (12, 2)
    parents = [int(np.flatnonzero(row)[-2]) for row in np.array(tree.visible)[1:]]
    assert len(set(zip(parents, tree.tokens.tolist(), strict=True))) == 12


@pytest.mark.parametrize("value", [0.0, -1e30, np.log(0.3)])
def test_equal_chances_leave_a_tree(value):
    """Also where all drafts are as likely, or certain, or impossible: every draft comes after what it continues."""
    found = likeliest(Ranking(mx.arange(15 * 8).reshape(15, 8), mx.full((15, 8), value)), 31)
    for size in (5, 31):
        tree = found.tree(size)
        visible, depths = np.array(tree.visible), np.array(tree.depths)
        assert (visible.sum(axis=1) == depths + 1).all()
        assert not np.triu(visible, 1).any()
        assert (depths[1:] == np.array(tree.tokens) // 8 + 1).all()
        for row in range(1, size + 1):
            parent = np.flatnonzero(visible[row])[-2]
            assert (visible[row] == visible[parent] | (np.arange(size + 1) == row)).all()


def test_scale_moves_every_probability_and_none_to_certainty():
    ranking = Ranking(mx.array([[1], [2]]), mx.log(mx.array([[0.8], [0.5]])))
    assert likeliest(ranking, 2, scale=0.5).chances.tolist() == pytest.approx([0.4, 0.1])
    assert likeliest(ranking, 2, scale=10.0).chances.tolist() == pytest.approx([0.995, 0.995**2])


def test_wide_trees_have_about_twice_and_four_times_as_many_drafts():
    """With the anchor, that fills blocks of twice and four times the rows of a chain's."""
    assert [tuple((size + 1) / (places + 1) for size in wide_sizes(places)) for places in (3, 15)] == [(2, 4)] * 2
    assert [wide_sizes(places) for places in (31, 63, 100)] == [(63, 63), (63, 63), (100, 100)]


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
        expected = [0]
        while (longer := tree.walk([choices[row] for row in expected])) != expected:
            expected = longer
        found = walk(tree.on_device, mx.array(choices))
        assert found.path.shape == (max(tree.depths) + 1,)
        assert found.path[: found.num_accepted.item() + 1].tolist() == expected
        numbers = [tree.promised(expected), max(tree.depths)]
        assert found.said[0, -2:].view(mx.float32).tolist() == pytest.approx(numbers, rel=1e-5)
        lengths.add(len(expected))
    assert lengths >= {1, 2, 3, 4}


def test_an_outcome_brings_the_kept_drafts_and_the_targets_own_token():
    rng = np.random.default_rng(3)
    tree = random_tree(rng, 12)
    logits = mx.array(rng.normal(size=(13, 50)).astype(np.float32))
    child = tree.parents.index(0) + 1
    logits[0, tree.tokens[child - 1]] = 100.0
    walk = judge(Greedy(), tree.on_device, logits, 7)
    choices, outcome = mx.argmax(logits, axis=-1).tolist(), Outcome.of_tree(walk)
    [reading] = outcome.read()
    rows = walk.path[: reading.num_accepted + 1].tolist()
    assert rows == tree.walk([choices[row] for row in rows])
    assert reading.tokens == [choices[row] for row in rows]
    assert reading.num_accepted >= 1
    assert reading.promised == pytest.approx(tree.promised(rows), rel=1e-5)
    assert reading.depth == max(tree.depths) <= outcome.depth
    assert outcome.next_anchors.item() == reading.tokens[-1]


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
    found = rank(mx.array(scores), 8, None if vocabulary is None else mx.array(vocabulary))
    logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    order = np.argsort(-logs, axis=1)[:, :8]
    assert (np.array(found.token_ids) == (order if vocabulary is None else np.array(vocabulary)[order])).all()
    np.testing.assert_allclose(np.array(found.log_probs), np.take_along_axis(logs, order, axis=1), rtol=1e-5)


def test_removed_tokens_are_the_last_choice():
    scores = mx.full((2, 600), -mx.inf)
    scores[:, 7] = 0.0
    found = rank(scores, 8)
    assert found.token_ids[:, 0].tolist() == [7, 7]
    assert (found.token_ids < 600).all().item()
    assert mx.exp(found.log_probs).tolist() == [[1.0, *[0.0] * 7]] * 2
    assert likeliest(found, 2).tree(2).tokens.tolist() == [7, 7]
