"""The steps of a round that make a tree of drafts, feed it and walk through it, on the device, in plain MLX.

There are kernels for them, too (kernels/tree_steps/), which have to compute the same. Everything is about a single
answer. W places are drafted, and at each of them K candidates come into question. What the paths and rows of a tree are
is said in decoding/tree.py.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from dflash_mlx.sampling import best_columns

# A path is always likelier than what continues it: no probability counts as more than this, or as less than e^-30.
SUREST, LEAST = 0.995, -30.0
# The position of a place in a cache that holds none.
NOWHERE = 1 << 30


# Paths that were found, in whatever form the way that found them builds trees of them.
Found = Sequence[mx.array]


class Walk(NamedTuple):
    """The target's way through a tree, on the device.

    num_accepted: (1,). path: (D + 1,), the rows gone through, the anchor's first; tokens: (1, D + 1), what the target
    chose at these rows; what comes after index `num_accepted` is meaningless. anchor: (1,), the last token chosen.
    said: (1, D + 4) uint32, what the host wants to know: num_accepted, the tokens, and the bits of two float32: the
    probability that the path went on, summed over the rows of it with children, and the depth of the tree.
    """

    num_accepted: mx.array
    path: mx.array
    tokens: mx.array
    anchor: mx.array
    said: mx.array


class TreeSteps(NamedTuple):
    """Ways to compute the six steps, of which this file has the plain ones."""

    rank: Callable[[mx.array, int, mx.array | None], tuple[mx.array, mx.array]]
    find: Callable[[mx.array, mx.array, int, float], tuple[Found, mx.array]]
    build: Callable[[Found, int, mx.array, mx.array], tuple[mx.array, mx.array, mx.array, mx.array]]
    place: Callable[[mx.array, mx.array, mx.array, mx.array], tuple[mx.array, mx.array, mx.array, mx.array]]
    walk: Callable[[mx.array, mx.array, mx.array, mx.array, mx.array, int], Walk]
    keep: Callable[[mx.array, mx.array, mx.array, mx.array], mx.array]


class Paths(NamedTuple):
    """Paths through the ranks of W places, K at each, which alone can be among the likeliest; the first is empty.

    They come in the order of a dictionary: a path, then all that continue it. terms: (C, T), what a path's chance is
    made of, as indices into the sums of the likeliest path's first 0, 1, ... W logarithms, followed by how much less
    likely each candidate is than the best of its place. marks: (3, C), a path's depth, its last candidate, and the
    first path after it that does not continue it.
    """

    terms: mx.array
    marks: mx.array


@cache
def likely_paths(places: int, branches: int, size: int) -> Paths:
    """The paths that can be among the `size` likeliest, whatever the probabilities are.

    All paths are likelier that have no higher rank at any place, and all that these continue. Their number, which
    grows with every rank, may not exceed `size`.
    """
    # Of the paths of a length: their ranks, -1 after their ends; how many have no higher rank; how many are likelier.
    ranks, equals, better = np.full((1, places), -1), np.ones(1, dtype=int), np.zeros(1, dtype=int)
    levels = [ranks]
    for place in range(places):
        more = equals[:, None] * np.arange(1, branches + 1)
        kept, own = np.nonzero(better[:, None] + more <= size)
        equals, better = more[kept, own], better[kept] + more[kept, own]
        ranks = ranks[kept]
        ranks[:, place] = own
        levels.append(ranks)
    ranks = np.concatenate(levels)
    ranks = ranks[np.lexsort(ranks.T[::-1])]
    depths = (ranks >= 0).sum(axis=1)
    ends = np.full(len(ranks), len(ranks))
    for length in range(1, places + 1):
        [shallow], [same] = np.nonzero(depths <= length), np.nonzero(depths == length)
        ends[same] = np.append(shallow, len(ranks))[np.searchsorted(shallow, same, side="right")]
    lasts = np.maximum(depths - 1, 0)
    candidates = lasts * branches + np.maximum(ranks[np.arange(len(ranks)), lasts], 0)

    row, column = np.nonzero(ranks > 0)
    slot = np.arange(len(row)) - np.searchsorted(row, row)
    # The best candidate of the first place is as likely as itself: a term that adds nothing.
    terms = np.full((len(ranks), 2 + slot.max(initial=-1)), places + 1)
    terms[:, 0] = depths
    terms[row, 1 + slot] = places + 1 + column * branches + ranks[row, column]
    return Paths(mx.array(terms.astype(np.int32)), mx.array(np.stack([depths, candidates, ends]).astype(np.int32)))


def rank(
    scores: mx.array,
    count: int,
    token_ids: mx.array | None = None,
    *,
    log_sum: Callable[[mx.array], mx.array] | None = None,
) -> tuple[mx.array, mx.array]:
    """The `count` best tokens by each row's scores (W, V), the best first, and their log-probabilities.

    token_ids: (V,), which tokens the scores are of; None: of token 0, 1, ... Returns (W, count) twice. Scores that a
    filter has removed are the last choice, but stay numbers. log_sum: another way to the logarithm of the sum of each
    row's exponentials, (W, 1).
    """
    scores = mx.maximum(scores.astype(mx.float32), -1e30)
    columns = best_columns(scores, count)
    best = mx.take_along_axis(scores, columns, axis=-1)
    order = mx.argsort(-best, axis=-1)
    sums = log_sum(scores) if log_sum is not None else mx.logsumexp(scores, axis=-1, keepdims=True)
    log_probs = mx.take_along_axis(best, order, axis=-1) - sums
    columns = mx.take_along_axis(columns, order, axis=-1)
    return columns if token_ids is None else token_ids[columns], log_probs


def find(token_ids: mx.array, log_probs: mx.array, size: int, log_scale: float) -> tuple[Found, mx.array]:
    """The `size` likeliest of all paths through the candidates (W, K), to whose `log_probs` `log_scale` is added.

    There must be so many. Returns the paths, the likeliest first, and what the host may want to know (`said_of`).
    """
    paths, best, firsts = likely_paths(*log_probs.shape, size), mx.exp(log_probs[:, 0]), token_ids[:, 0]
    log_probs = clipped(log_probs, log_scale)
    # Over the whole rows: of a single number with others of its row behind it, MLX's sum writes those, too, on CUDA.
    straight = mx.cumsum(log_probs, axis=0)[:, 0]
    lesser = (log_probs - log_probs[:, :1]).flatten()
    sums = mx.concatenate([mx.zeros((1,)), straight, lesser])[paths.terms].sum(axis=1)
    found = mx.argpartition(-sums, size)[: size + 1] if size + 1 < sums.size else mx.arange(sums.size)
    # The first one is the empty path, which no other is likelier than.
    found = found[mx.argsort(-sums[found])]
    return (found, paths.marks), said_of(best, mx.exp(sums[found[1:]]), firsts)


def said_of(best: mx.array, chances: mx.array, firsts: mx.array) -> mx.array:
    """What is told of a tree's drafts, as one array so that the host reads once: (2 W + N,) uint32.

    The bits of how likely the best token of each place is, (W,), and each of the paths, (N,); and these tokens, (W,).
    """
    best, chances = (array.astype(mx.float32).view(mx.uint32) for array in (best, chances))
    return mx.concatenate([best, chances, firsts.astype(mx.uint32)])


def clipped(log_probs: mx.array, log_scale: float) -> mx.array:
    """Logarithms of probabilities that are multiplied by a scale, within what counts."""
    return mx.clip(log_probs + log_scale, LEAST, float(np.log(SUREST)))


def build(
    found: Found, size: int, token_ids: mx.array, log_probs: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The tree of the `size` likeliest of the paths that `find` found, in an order in which parents come first.

    token_ids, log_probs: (W, K), of the candidates. Returns the drafts' tokens (N,) and probabilities (N,), and of all
    rows, the anchor's first, the depths (N + 1,) and which rows each continues, itself included, (N + 1, N + 1).
    """
    rows, marks = mx.sort(found[0][: size + 1]), found[1]
    depths, last, after = marks[:, rows]
    visible = (rows <= rows[:, None]) & (rows[:, None] < after)
    tokens, own = (array.flatten()[last[1:]] for array in (token_ids, log_probs))
    return tokens.astype(mx.uint32), mx.exp(own), depths, visible


def place(
    placed: mx.array, length: mx.array, depths: mx.array, visible: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Where a tree's rows go in a cache of which (C,) says which position is `placed` where, out of order.

    length: (1,), the positions that count; depths, visible: of the R rows, as `build` returns them. The rows take the
    first places that hold none of these positions. Returns the rows' positions (R,), what each sees, boolean (R, C),
    the position that each place has then, (C,), and the rows' places (R,).
    """
    count, held = depths.size, placed < length
    places = mx.sort(mx.where(held, NOWHERE, mx.arange(placed.size)))[:count]
    # Of each place, which row of the tree is there, below 0 where none is.
    row = mx.put_along_axis(mx.full(placed.shape, -1, dtype=mx.int32), places, mx.arange(count), axis=0)
    index, row_positions = mx.maximum(row, 0), length + depths
    mask = mx.where(row < 0, held, mx.take(visible, index, axis=1))
    return row_positions, mask, mx.where(row < 0, placed, row_positions[index]), places


def walk(
    tokens: mx.array, probabilities: mx.array, depths: mx.array, visible: mx.array, choices: mx.array, depth: int
) -> Walk:
    """Follow the target's choices (N + 1,), one for each row of a tree, from the anchor on."""
    rows = mx.arange(depths.size)
    parents = mx.where(visible & (rows < rows[:, None]), rows, 0).max(axis=1)
    differs = tokens != choices[parents[1:]]
    # A row is reached when it and all that it continues are what the target chose; siblings differ, so rows reached
    # make one path.
    reached = ~(visible[:, 1:] & differs).any(axis=1)
    path = mx.argsort(mx.where(reached, rows, rows + rows.size))[: depth + 1]
    promised = mx.where(reached[parents[1:]], probabilities, 0).sum()
    num_accepted, kept = reached.sum(keepdims=True).astype(mx.int32) - 1, choices[path].astype(mx.uint32)
    numbers = mx.stack([promised, depths.max().astype(mx.float32)]).view(mx.uint32)
    said = mx.concatenate([num_accepted.astype(mx.uint32), kept, numbers])
    return Walk(num_accepted, path, kept[None], kept[num_accepted], said[None])


def keep(placed: mx.array, length: mx.array, places: mx.array, path: mx.array) -> mx.array:
    """Let the rows of a `path` (D + 1,) through a tree, which is at `places` (R,), be the positions after the `length`.

    Returns what is `placed` where then (`place`). What other places held after the length does not count any longer,
    and must not when there are more positions.
    """
    left = mx.where(placed < length, placed, NOWHERE)
    return mx.put_along_axis(left, places[path], length + mx.arange(path.size), axis=0)


PLAIN = TreeSteps(rank, find, build, place, walk, keep)
