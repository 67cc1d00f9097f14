"""Parameter trees as flat dicts."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

Tree = dict[str, Any]


def flat(tree: Any) -> dict[str, mx.array]:
    """The arrays of a tree by their dotted names."""
    pairs: Any = tree_flatten(tree)
    return dict(pairs)


def count_parameters(tree: Any) -> int:
    return sum(int(x.size) for x in flat(tree).values())


def count_bytes(tree: Any) -> int:
    return sum(int(x.nbytes) for x in flat(tree).values())
