"""Trees of tokens in recurrent layers: a row follows its parent, and not the row that was written before it.

Such a layer (GatedDeltaNet, a short convolution) reaches back in two ways. A convolution takes the last few tokens:
here those of a row's path. And a state goes from token to token. To go through each path by itself would take a state
for each row, as large as a matrix of weights. But the delta rule can be computed for all rows at once (as for chunks of
a chain in Gated DeltaNet, arXiv 2412.06464, section 3): what a row writes depends on what was written before it by
products of keys, and in a tree a row has these with its ancestors only. Only the state before the tree is read, and
none is written. `recurrence.py` then replays the path that is kept.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, compute_lower_bound_g, gated_delta_update

from dflash_mlx.hooks import means, renamed, subclassed

# What layers call it in their code.
RECURRENCE = "gated_delta_update"
# What is left of a state after a token is taken to be more than this, so that its logarithm is a number.
_LEAST_LEFT = 1e-30


@dataclass
class _Ancestry:
    """Of the rows of a tree, how far each is from the root, (L,), and which it continues, itself included, (L, L)."""

    depths: mx.array
    visible: mx.array

    @property
    def rows(self) -> int:
        return int(self.depths.shape[0])

    @cached_property
    def between(self) -> mx.array:
        """Of two rows, those that the first continues and the second does not, (L * L, L) float32."""
        return (self.visible[:, None] & ~self.visible).astype(mx.float32).reshape(-1, self.rows)

    def window(self, size: int) -> mx.array:
        """The last `size` tokens of each row's path, (L, size), where size - 1 tokens of the context come first."""
        depths = self.depths[:, None] + mx.arange(1 - size, 1)
        on_path = self.visible[:, None] & (self.depths == depths[..., None])
        return size - 1 + mx.where(depths < 0, depths, on_path.argmax(axis=-1).astype(mx.int32))


_TREE: ContextVar[_Ancestry] = ContextVar("tree")


class BranchedRecurrences:
    """What is recurrent in some parts of a model."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._convolutions = [layer for part in parts for layer in convolutions(part)]
        self._recurrences = [layer for part in parts for layer in recurrences(part)]

    @contextmanager
    def over(self, depths: mx.array, visible: mx.array) -> Iterator[None]:
        """For one forward over the rows of a tree (`tree_rows.TreeShape`). What caches hold after it is meaningless."""
        token = _TREE.set(_Ancestry(depths, visible))
        try:
            with subclassed(self._convolutions, _along_windows), subclassed(self._recurrences, _along_paths):
                yield
        finally:
            _TREE.reset(token)


def convolutions(model: nn.Module) -> list[nn.Module]:
    """A model's convolutions over time of each channel by itself, which are sums of products with a few tokens."""
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.Conv1d)
        and "weight" in layer  # not that of a layer on another machine
        and layer.groups == layer.weight.shape[0]
        and layer.weight.shape[2] == layer.stride == layer.dilation == 1
        and layer.padding == 0
    ]


def recurrences(model: nn.Module) -> list[nn.Module]:
    """The layers of a model whose code calls mlx-lm's GatedDeltaNet."""
    return [layer for layer in model.modules() if means(type(layer), RECURRENCE, gated_delta_update)]


@cache
def _along_windows(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, x: mx.array) -> mx.array:
        """x: (1, K - 1 + L, C), the tokens before the tree and its rows -> (1, L, C)."""
        tree, weight = _TREE.get(), self["weight"][..., 0].T.astype(mx.float32)
        if x.shape[:2] != (1, tree.rows + len(weight) - 1):
            raise NotImplementedError("a convolution over something else than the rows of the tree")
        windows = mx.take(x, tree.window(len(weight)), axis=1).astype(mx.float32)
        out = (windows * weight).sum(axis=2)
        return (out + self["bias"] if "bias" in self else out).astype(x.dtype)

    return type(f"Branched{kind.__name__}", (kind,), {"__call__": call})


def _along_paths(kind: type[nn.Module]) -> type[nn.Module]:
    return renamed(kind, RECURRENCE, _branched_update)


def _branched_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,  # noqa: N803  mlx-lm's name
    dt_bias: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    *,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    **_: Any,
) -> tuple[mx.array, mx.array]:
    """mlx-lm's `gated_delta_update` for the rows of a tree: q, k (1, L, Hk, Dk) and v (1, L, Hv, Dv); state unchanged.

    By the delta rule a row i makes g_i S + d_i k_i' of its parent's state S, (Dv, Dk), where what it writes is
    d_i = beta_i (v_i - g_i S k_i).
    """
    tree = _TREE.get()
    left = (
        compute_g(A_log, a, dt_bias) if lower_bound is None else compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
    )
    if left.ndim != 3 or q.shape[0] != 1 or mask is not None:
        raise NotImplementedError("this kind of GatedDeltaNet")
    logs = mx.log(mx.maximum(left[0].astype(mx.float32), _LEAST_LEFT))
    beta = mx.sigmoid(b[0].astype(mx.float32)) * (2.0 if allow_neg_eigval else 1.0)
    queries, keys = (mx.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    queries, keys, values = (x[0].swapaxes(0, 1).astype(mx.float32) for x in (queries, keys, v))
    # What is left of the state before the tree, (H, L, 1), and of what a row that i continues wrote, (H, L, L).
    of_state = mx.exp(tree.visible.astype(mx.float32) @ logs).T[..., None]
    of_rows = mx.exp(tree.between @ logs).reshape(tree.rows, tree.rows, -1).transpose(2, 0, 1) * tree.visible
    before = state[0].astype(mx.float32).swapaxes(-1, -2)
    links = beta.T[..., None] * (keys @ keys.swapaxes(-1, -2)) * of_rows * (1 - mx.eye(tree.rows))
    wanted = beta.T[..., None] * (values - of_state * (keys @ before))
    written = _inverse(links) @ wanted
    out = of_state * (queries @ before) + (queries @ keys.swapaxes(-1, -2) * of_rows) @ written
    return out.swapaxes(0, 1)[None].astype(q.dtype), state


def _inverse(links: mx.array) -> mx.array:
    """The inverse of 1 + links (..., L, L), which have numbers below their diagonals alone.

    By blocks on the diagonal that become twice as large each time, from the inverses of their halves. (A sum of powers
    would take as many products, and its terms may be so large that what is left of them is rounding.)
    """
    rows = mx.arange(links.shape[-1])
    found, size = mx.eye(links.shape[-1]), 1
    while size < links.shape[-1]:
        block = rows // size
        below = links * ((block[:, None] % 2 == 1) & (block == block[:, None] - 1))
        found = found - found @ below @ found
        size *= 2
    return found
