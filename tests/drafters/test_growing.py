"""Trees that grow place by place: the paths read are the likeliest so far, and of what was grown the likeliest drafts
make the tree. The truth is a search on the host, over lists."""

import heapq

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.decoding.tree import likeliest_grown
from dflash_mlx.drafters.growing import grow
from dflash_mlx.drafters.ranking import Ranking
from dflash_mlx.tree_steps import SUREST

TOKENS = 11


def said_after(path):
    """Logarithms of the chance of each of TOKENS after a path, like those of a network."""
    scores = np.random.default_rng([7, *path]).normal(0, 2, TOKENS)
    return scores - np.log(np.exp(scores).sum())


def ranked(paths, count):
    log_probs = np.array([said_after(path) for path in paths])
    order = np.argsort(-log_probs, axis=1)[:, :count]
    return Ranking(mx.array(order), mx.array(np.take_along_axis(log_probs, order, axis=1).astype(np.float32)))


def grown(count, places):
    """What is grown, and the paths that were read at each place."""
    read = []

    def follow(tokens, parents, visible):
        before = [()] * count if not read else [read[-1][parent] for parent in parents.tolist()]
        read.append([(*path, token) for path, token in zip(before, tokens.tolist(), strict=True)])
        earlier = [path for paths in read for path in paths]
        assert visible.shape == (count, len(earlier))
        expected = [[path == other[: len(path)] for path in earlier] for other in read[-1]]
        assert visible.tolist() == expected
        return ranked(read[-1], count)

    return grow(ranked([()], count), follow, places), read


def search(count, places):
    """The same on the host: the drafts that were considered by their paths, with the sums of their logarithms, and what
    was read at each place."""
    beam, considered, read = [((), 0.0)], {}, []
    for place in range(places):
        found = []
        for path, total in beam:
            log_probs = said_after(path)
            best = sorted(range(TOKENS), key=lambda token: -log_probs[token])[:count]
            found += [((*path, token), total + log_probs[token]) for token in best]
        considered |= dict(found)
        beam = heapq.nlargest(count, found, key=lambda item: item[1])
        if place + 1 < places:
            read.append({path for path, _ in beam})
    return considered, read


def paths_of(found):
    """The path of each draft that was grown, in order."""
    tokens = found.token_ids.tolist()
    return [tuple(tokens[i] for i in path if i < len(tokens)) for path in found.paths.tolist()]


@pytest.mark.parametrize(("count", "places"), [(1, 4), (2, 1), (3, 5), (4, 3)])
def test_what_is_grown_is_what_a_search_considers(count, places):
    found, read = grown(count, places)
    considered, expected_read = search(count, places)
    assert [set(paths) for paths in read] == expected_read
    paths = paths_of(found)
    assert sorted(paths) == sorted(considered)
    for path, log_prob in zip(paths, found.log_probs.tolist(), strict=True):
        assert log_prob == pytest.approx(said_after(path[:-1])[path[-1]], abs=1e-4)
    for place, best in enumerate(found.best.tolist(), start=1):
        assert paths[best] == max((p for p in considered if len(p) == place), key=lambda p: considered[p])


@pytest.mark.parametrize("scale", [0.3, 1.0, 100.0])
@pytest.mark.parametrize("size", [1, 7, 23, 999])
def test_the_tree_has_the_likeliest_of_them(size, scale):
    count, places = 3, 5
    found, _ = grown(count, places)
    considered, _ = search(count, places)

    def chance(path):
        each = [np.exp(said_after(path[:i])[path[i]]) * scale for i in range(len(path))]
        return float(np.prod(np.minimum(each, SUREST)))

    likeliest = likeliest_grown(found, size, scale=scale)
    size = min(size, len(considered))
    expected = sorted(considered, key=chance, reverse=True)[:size]
    assert likeliest.size == size
    assert likeliest.branched
    assert np.array(likeliest.chances) == pytest.approx([chance(path) for path in expected], rel=1e-3)
    for smaller in {size, 1, size // 2} - {0}:
        tree = likeliest.tree(smaller)
        depths, tokens, visible = tree.depths.tolist(), tree.tokens.tolist(), np.array(tree.visible)
        rows = [tuple(tokens[i - 1] for i in range(1, smaller + 1) if visible[row, i]) for row in range(smaller + 1)]
        # Where chances are equal to the last digit, either of two drafts may be in it.
        assert sum(chance(row) for row in rows[1:]) == pytest.approx(sum(map(chance, expected[:smaller])), rel=1e-3)
        assert depths == [len(row) for row in rows]
        assert visible[:, 0].all()
        assert (np.triu(visible, 1) == 0).all()
        assert tree.depth >= max(depths)
        probabilities = [np.exp(said_after(row[:-1])[row[-1]]) for row in rows[1:]]
        assert np.array(tree.probabilities) == pytest.approx(probabilities, rel=1e-3)
