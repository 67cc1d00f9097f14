"""The steps of trees in CUDA kernels, of which each takes the place of five to twenty of MLX's operations.

A fast GPU is done with these few numbers sooner than the computer has launched the operations: together they took a
millisecond of a round there. On a Mac such a round takes many times as long, and they do not show.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx import tree_steps as plain
from dflash_mlx.constants import constant
from dflash_mlx.kernels.cuda_modules import cuda_kernel
from dflash_mlx.tree_steps import LEAST, NOWHERE, SUREST, Found, TreeSteps, Walk

# Paths and rows that fit into a block's memory, and the threads of a block; larger trees go the plain way.
_MOST_PATHS, _MOST_ROWS, _THREADS, _MANY_THREADS = 2048, 256, 256, 1024
_LOG_SUREST = float(np.log(SUREST))


def rank(scores: mx.array, count: int, token_ids: mx.array | None = None) -> tuple[mx.array, mx.array]:
    """See `tree_steps.rank`."""
    ids = constant(0, mx.int32, (1,)) if token_ids is None else token_ids
    found, log_probs = _replayed(_rank, count, token_ids is not None)(scores, ids)
    return found, log_probs


def _rank(scores: mx.array, token_ids: mx.array, count: int, named: bool) -> list[mx.array]:
    places = scores.shape[0]
    return _kernel("rank")(
        inputs=[scores, token_ids.astype(mx.int32)],
        template=[("T", scores.dtype), ("K", count), ("NAMED", named), ("THREADS", _THREADS)],
        grid=(places * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(places, count), (places, count)],
        output_dtypes=[mx.uint32, mx.float32],
    )


def find(token_ids: mx.array, log_probs: mx.array, size: int, log_scale: float) -> tuple[Found, mx.array]:
    """See `tree_steps.find`. What is found: each path's last candidate, and as a row of the tree its parent, (N,)."""
    places, branches = log_probs.shape
    if max(places * size, _likely_pairs(size, branches).shape[0]) > _MOST_PATHS:
        return plain.find(token_ids, log_probs, size, log_scale)
    candidates, parents, said = _replayed(_find, size)(token_ids, log_probs, _limits(log_scale))
    return (candidates, parents), said


def _find(token_ids: mx.array, log_probs: mx.array, settings: mx.array, size: int) -> list[mx.array]:
    places, branches = log_probs.shape
    return _kernel("find")(
        inputs=[token_ids.astype(mx.uint32), log_probs, _likely_pairs(size, branches), settings],
        template=[("MOST_PATHS", _MOST_PATHS), ("THREADS", _MANY_THREADS)],
        grid=(_MANY_THREADS, 1, 1),
        threadgroup=(_MANY_THREADS, 1, 1),
        output_shapes=[(size,), (size,), (2 * places + size,)],
        output_dtypes=[mx.int32, mx.int32, mx.uint32],
    )


@lru_cache(maxsize=256)
def _limits(log_scale: float) -> mx.array:
    """What `find` adds to logarithms, and their limits after that. To hand new numbers to a GPU takes as long as ten
    launches, so the same array is used again; few scales come up (`policy.trees_or_chains`)."""
    array = mx.array([log_scale, LEAST, _LOG_SUREST])
    mx.eval(array)
    return array


@cache
def _likely_pairs(size: int, branches: int) -> mx.array:
    """Of `size` sorted paths and their continuations by sorted candidates, the ones that can be among the `size`
    likeliest continuations: (P + 1, 2), which path and which candidate, after their numbers."""
    pairs = [(i, k) for i in range(size) for k in range(branches) if (i + 1) * (k + 1) <= size]
    array = mx.array([(size, branches), *pairs], dtype=mx.int32)
    mx.eval(array)
    return array


def build(
    found: Found, size: int, token_ids: mx.array, log_probs: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """See `tree_steps.build`."""
    if found[1].ndim > 1:  # found the plain way
        return plain.build(found, size, token_ids, log_probs)
    tokens, probabilities, depths, visible = _replayed(_build, size)(*found, token_ids, log_probs)
    return tokens, probabilities, depths, visible


def _build(
    candidates: mx.array, parents: mx.array, token_ids: mx.array, log_probs: mx.array, size: int
) -> list[mx.array]:
    return _kernel("build")(
        inputs=[candidates, parents, token_ids.astype(mx.uint32), log_probs, constant(size, mx.int32, (1,))],
        template=[("THREADS", _THREADS)],
        grid=(_THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(size,), (size,), (size + 1,), (size + 1, size + 1)],
        output_dtypes=[mx.uint32, mx.float32, mx.int32, mx.bool_],
    )


def place(
    placed: mx.array, length: mx.array, depths: mx.array, visible: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """See `tree_steps.place`."""
    count, [capacity] = depths.size, placed.shape
    row_positions, mask, positions, places = _kernel("place")(
        inputs=[placed, length, depths.astype(mx.int32), visible],
        template=[("THREADS", _THREADS)],
        # A block for each row of the tree.
        grid=(count * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(count,), (count, capacity), (capacity,), (count,)],
        output_dtypes=[mx.int32, mx.bool_, mx.int32, mx.int32],
    )
    return row_positions, mask, positions, places


def walk(
    tokens: mx.array, probabilities: mx.array, depths: mx.array, visible: mx.array, choices: mx.array, depth: int
) -> Walk:
    """See `tree_steps.walk`."""
    if depths.size > _MOST_ROWS:
        return plain.walk(tokens, probabilities, depths, visible, choices, depth)
    return Walk(*_replayed(_walk, depth)(tokens, probabilities, depths, visible, choices))


def _walk(
    tokens: mx.array, probabilities: mx.array, depths: mx.array, visible: mx.array, choices: mx.array, depth: int
) -> list[mx.array]:
    return _kernel("walk")(
        inputs=[
            tokens,
            probabilities,
            depths.astype(mx.int32),
            visible,
            choices.astype(mx.uint32),
            constant(depth + 1, mx.int32, (1,)),
        ],
        template=[("THREADS", _THREADS)],
        grid=(_THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(1,), (depth + 1,), (1, depth + 1), (1,), (1, depth + 4)],
        output_dtypes=[mx.int32, mx.uint32, mx.uint32, mx.uint32, mx.uint32],
    )


def keep(placed: mx.array, length: mx.array, places: mx.array, path: mx.array) -> mx.array:
    """See `tree_steps.keep`."""
    [kept] = _replayed(_keep)(placed, length, places, path)
    return kept


def _keep(placed: mx.array, length: mx.array, places: mx.array, path: mx.array) -> list[mx.array]:
    return _kernel("keep")(
        inputs=[placed, length, places.astype(mx.int32), path.astype(mx.uint32)],
        template=[("THREADS", _THREADS), ("NOWHERE", NOWHERE)],
        grid=(-(-placed.size // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[placed.shape],
        output_dtypes=[mx.int32],
    )


@cache
def _replayed(launch: Callable[..., list[mx.array]], *constants: int) -> Callable[..., list[mx.array]]:
    """What launches a kernel, written down once: MLX puts a kernel's text together anew for each call from Python."""
    replay: Callable[..., list[mx.array]] = mx.compile(lambda *arrays: launch(*arrays, *constants))
    return replay


KERNELS = TreeSteps(rank, find, build, place, walk, keep)


def work(dtype: mx.Dtype) -> bool:
    """Whether the kernels can be compiled here, and find as likely trees as the plain steps do by numbers of a type."""
    scores = mx.array(np.random.default_rng(0).standard_normal((5, 3000), dtype=np.float32)).astype(dtype)

    def computed(steps: TreeSteps) -> list[mx.array]:
        token_ids, log_probs = steps.rank(scores, 4, mx.arange(3000)[::-1])
        found, said = steps.find(token_ids, log_probs, 20, -0.1)
        tokens, probabilities, depths, visible = steps.build(found, 20, token_ids, log_probs)
        placed = mx.array([0, 5, NOWHERE, 1, *[NOWHERE] * 30], dtype=mx.int32)
        length = mx.array([3], dtype=mx.int32)
        positions, mask, held, places = steps.place(placed, length, depths, visible)
        walk = steps.walk(tokens, probabilities, depths, visible, mx.full((21,), token_ids[0, 0]), 5)
        count = walk.num_accepted.item()
        kept = mx.sort(steps.keep(placed, length, places, walk.path))[: 2 + count + 1]
        # The order of a tree's rows is free, and what comes after the kept ones.
        free = (tokens, probabilities, depths, visible.sum(axis=0), positions, mask.sum(axis=0), held)
        told = walk.tokens[0, : count + 1], walk.anchor, walk.said[:, -2:].view(mx.float32)
        numbers = said[5:25].view(mx.float32), said[:5].view(mx.float32), said[25:]
        return [token_ids, log_probs, *numbers, *map(mx.sort, free), places, walk.num_accepted, kept, *told]

    try:
        found = computed(KERNELS)
        mx.eval(found)
        # For a GPU, MLX would have to compile these operations first.
        with mx.stream(mx.cpu):
            return all(
                mx.allclose(own.astype(mx.float32), truth.astype(mx.float32), atol=1e-4).item()
                for own, truth in zip(found, computed(plain.PLAIN), strict=True)
            )
    except (RuntimeError, ValueError):  # no compiler, or one that refuses them
        return False


_NAMES = {
    "rank": (["scores", "token_ids"], ["found", "log_probs"]),
    "find": (["token_ids", "log_probs", "pairs", "settings"], ["candidates", "parents", "said"]),
    "build": (
        ["candidates", "parents", "token_ids", "log_probs", "settings"],
        ["tokens", "probabilities", "depths", "visible"],
    ),
    "place": (["placed", "length", "depths", "visible"], ["row_positions", "mask", "positions", "places"]),
    "walk": (
        ["tokens", "probabilities", "depths", "visible", "choices", "settings"],
        ["num_accepted", "path", "kept", "anchor", "said"],
    ),
    "keep": (["placed", "length", "places", "path"], ["kept"]),
}


@cache
def _kernel(step: str) -> Any:
    inputs, outputs = _NAMES[step]
    return cuda_kernel(
        name=f"dflash_tree_{step}", input_names=inputs, output_names=outputs, file=f"tree_steps/{step}.cu"
    )
