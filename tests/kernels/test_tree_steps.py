"""The steps of trees in CUDA kernels: their sources, run on the CPU, give what the plain steps give."""

import random

import mlx.core as mx
import numpy as np
import pytest
from kernels.cuda_on_cpu import kernel_on_cpu, kernels_folder, needs_compiler
from tiny import FAMILIES, drafted_tokens, plain_tokens, tiny_drafter, tiny_eagle3, tiny_target

from dflash_mlx.decoding.tree import likeliest, walk
from dflash_mlx.drafters.ranking import BRANCHES, Ranking, rank
from dflash_mlx.kernels import few_rows
from dflash_mlx.kernels.tree_steps import launches
from dflash_mlx.kernels.tree_steps.launches import KERNELS
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.tree_steps import NOWHERE, PLAIN


@pytest.fixture
def launched(monkeypatch, tmp_path_factory):
    """Has kernels run on the CPU; the shapes of the first inputs of those that were launched."""
    folder = kernels_folder(tmp_path_factory)
    # The stand-in computes at once, which cannot be written down.
    mx.disable_compile()
    with kernel_on_cpu(launches, lambda inputs: inputs[0].shape, folder=folder, monkeypatch=monkeypatch) as shapes:
        yield shapes
    mx.enable_compile()


def scores_of(rng, places, size, dtype=mx.float32):
    return mx.array(3 * rng.standard_normal((places, size), dtype=np.float32)).astype(dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize(("places", "size"), [(1, 8), (3, 100), (15, 3000)])
def test_ranking(places, size, dtype, launched):
    rng = np.random.default_rng(size)
    scores = scores_of(rng, places, size, dtype)
    columns, log_probs = KERNELS.rank(scores, BRANCHES)
    _, expected = PLAIN.rank(scores, BRANCHES)
    np.testing.assert_allclose(np.array(log_probs), np.array(expected), atol=2e-5)
    # Which of equal scores come first is open.
    best = mx.take_along_axis(scores, columns, axis=1).astype(mx.float32)
    assert (best == -mx.sort(-scores.astype(mx.float32), axis=1)[:, :BRANCHES]).all()
    assert all(len(set(row)) == BRANCHES for row in columns.tolist())
    assert launched == [(places, size)]


@needs_compiler
def test_ranking_by_the_scores_of_some_tokens(launched):
    scores, ids = scores_of(np.random.default_rng(2), 3, 100), mx.arange(1000, 1100)
    assert (KERNELS.rank(scores, 8, ids)[0] == KERNELS.rank(scores, 8)[0] + 1000).all()
    assert mx.array_equal(PLAIN.rank(scores, 8, ids)[0], PLAIN.rank(scores, 8)[0] + 1000)


@needs_compiler
def test_ranking_what_a_filter_has_left(launched):
    """Scores that were removed come last; rows with many equal ones have each column once."""
    scores = mx.full((3, 40), -mx.inf)
    scores[0, 7], scores[1, :3], scores[2] = 1.0, 2.0, 0.0
    columns, log_probs = KERNELS.rank(scores, 8)
    assert columns[0, 0].item() == 7
    assert set(columns[1, :3].tolist()) == {0, 1, 2}
    assert all(len(set(row)) == 8 for row in columns.tolist())
    np.testing.assert_allclose(
        np.exp(np.array(log_probs)), [[1, *[0] * 7], [1 / 3] * 3 + [0] * 5, [1 / 40] * 8], atol=1e-6
    )


def rows_of(tree):
    """The drafts of a tree in any order: the tokens on the way to each, and its probability."""
    tokens, visible, depths = tree.tokens.tolist(), np.array(tree.visible), tree.depths.tolist()
    found = {}
    for row, probability in enumerate(tree.probabilities.tolist(), start=1):
        seen = np.flatnonzero(visible[row])
        assert [seen[0], seen[-1]] == [0, row], "a parent comes first"
        assert [depths[other] for other in seen] == list(range(len(seen)))
        found[tuple(tokens[other - 1] for other in seen[1:])] = pytest.approx(probability, rel=1e-5)
    assert visible[0].tolist() == [True] + [False] * tree.size
    assert len(found) == tree.size
    return found


@needs_compiler
@pytest.mark.parametrize(
    ("places", "sizes"), [(1, (1, 5)), (2, (60,)), (3, (7, 14)), (7, (15, 31)), (15, (15, 31, 63))]
)
def test_finding_and_building_trees(places, sizes, launched):
    for size in sizes:
        rng = np.random.default_rng(size)
        ranking = rank(scores_of(rng, places, 500), BRANCHES)
        for scale in (0.6, 1.0, 1.3):
            found, expected = (likeliest(ranking, size, scale=scale, steps=steps) for steps in (KERNELS, PLAIN))
            np.testing.assert_allclose(np.array(found.chances), np.array(expected.chances), rtol=1e-4)
            assert found.size == expected.size == size
            best, firsts = ranking.log_probs[:, 0], ranking.token_ids[:, 0]
            for said in (found.said, expected.said):
                np.testing.assert_allclose(np.array(said[:places].view(mx.float32)), np.exp(np.array(best)), rtol=1e-5)
                assert said[-places:].tolist() == firsts.tolist()
            for count in {1, size // 2, size} - {0}:
                tree, truth = found.tree(count), expected.tree(count)
                assert tree.depth == truth.depth
                assert rows_of(tree) == rows_of(truth)
    assert launched


@needs_compiler
@pytest.mark.parametrize("value", [0.0, -1e30, float(np.log(0.3))])
def test_equal_chances_leave_a_tree(value, launched):
    """Every draft comes after what it continues, also where all are as likely, or certain, or impossible."""
    ranking = Ranking(mx.arange(15 * 8).reshape(15, 8), mx.full((15, 8), value))
    tree = likeliest(ranking, 31, steps=KERNELS).tree(31)
    assert len(rows_of(tree)) == 31


@needs_compiler
@pytest.mark.parametrize(("places", "size"), [(1, 1), (3, 10), (15, 31), (15, 63)])
def test_walking(places, size, launched):
    """Choices that follow a path through the tree, as far as one goes, or none."""
    rng = random.Random(size)
    ranking = rank(scores_of(np.random.default_rng(size), places, 300), BRANCHES)
    tree = likeliest(ranking, size, steps=KERNELS).tree(size)
    visible, tokens = np.array(tree.visible), tree.tokens.tolist()
    for goal in (0, 1, tree.size // 2, tree.size):
        choices = [rng.randrange(1000, 2000) for _ in range(tree.size + 1)]
        on_path = [row for row in range(1, goal + 1) if visible[goal, row]]
        for before, row in zip([0, *on_path], on_path, strict=False):
            choices[before] = tokens[row - 1]
        found = walk(tree, mx.array(choices, dtype=mx.uint32))
        expected = PLAIN.walk(
            tree.tokens, tree.probabilities, tree.depths, tree.visible, mx.array(choices, dtype=mx.uint32), tree.depth
        )
        assert found.num_accepted.tolist() == [len(on_path)]
        assert found.path.tolist()[: len(on_path) + 1] == [0, *on_path]
        assert found.anchor.tolist() == [choices[[0, *on_path][-1]]]
        for ours, truth in zip(found[:4], expected, strict=False):
            assert ours.tolist() == truth.tolist()
            assert ours.dtype in (truth.dtype, mx.uint32)
        assert found.said[0, :-2].tolist() == expected.said[0, :-2].tolist()
        numbers = (np.array(walked.said[0, -2:].view(mx.float32)) for walked in (found, expected))
        np.testing.assert_allclose(*numbers, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize(("capacity", "length", "rows"), [(40, 0, 3), (256, 100, 32), (700, 611, 64), (600, 536, 64)])
def test_places_of_a_tree_and_what_is_kept_of_it(capacity, length, rows, launched):
    """In a cache whose positions lie anywhere, with some that do not count any longer."""
    rng = np.random.default_rng(capacity)
    placed = np.full(capacity, NOWHERE, dtype=np.int32)
    places = rng.permutation(capacity)
    placed[places[:length]] = np.arange(length)
    placed[places[length : length + 5]] = length + np.arange(5)
    depths, visible = mx.array(rng.integers(0, 9, rows)), mx.array(rng.random((rows, rows)) < 0.5)
    held, before = mx.array(placed), mx.array([length], dtype=mx.int32)
    found, expected = (steps.place(held, before, depths, visible) for steps in (KERNELS, PLAIN))
    for ours, truth in zip(found, expected, strict=True):
        assert ours.tolist() == truth.tolist()
    assert (placed[np.array(found[3])] >= length).all()
    path = mx.array(rng.permutation(rows)[:3])
    kept, truth = (steps.keep(held, before, found[3], path) for steps in (KERNELS, PLAIN))
    assert kept.tolist() == truth.tolist()
    assert sorted(kept.tolist())[: length + 3] == list(range(length + 3))
    assert len(launched) == 2


@needs_compiler
def test_what_is_too_large_goes_the_plain_way(launched, monkeypatch):
    monkeypatch.setattr(launches, "_MOST_PATHS", 100)
    monkeypatch.setattr(launches, "_MOST_ROWS", 40)
    ranking = rank(scores_of(np.random.default_rng(0), 5, 500), BRANCHES)
    found = likeliest(ranking, 50, steps=KERNELS)
    tree, truth = found.tree(45), likeliest(ranking, 50).tree(45)
    assert (tree.visible == truth.visible).all()
    assert walk(tree, mx.zeros(46, dtype=mx.uint32)).num_accepted.item() == 0
    assert not launched


@needs_compiler
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [tiny_drafter, lambda: tiny_eagle3(1)], ids=["dflash", "eagle3"])
def test_answers_are_those_of_plain_decoding(family, make, launched):
    target, drafter = tiny_target(family, seed=3), make()
    target.tree_steps = KERNELS
    places = drafter.places
    found = drafted_tokens(target, drafter, [1, 2, 3], 40, FixedWidth(9, places=places))
    assert found == plain_tokens(target, [1, 2, 3], 40)
    assert len(launched) > 10


@needs_compiler
def test_they_are_used_where_they_work(launched, monkeypatch):
    assert launches.work(mx.float16)
    wrong = PLAIN._replace(rank=lambda scores, count, token_ids: (scores[:, :count], scores[:, :count]))
    monkeypatch.setattr(launches.plain, "PLAIN", wrong)
    assert not launches.work(mx.float16)


def test_no_compiler_no_kernels(monkeypatch):
    def refuse(step):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(launches, "_kernel", refuse)
    assert not launches.work(mx.float16)
    assert few_rows.tree_steps is launches
