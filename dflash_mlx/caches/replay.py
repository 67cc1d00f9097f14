"""Computing over rows, written down once for each shape and then replayed.

Before a GPU computes anything, Python has to write down each of a pass's several hundred operations, and MLX to plan
them. A fast GPU is done with a small model's pass sooner than that. What was written down can be used again
(`mx.compile`), since in rows nothing but arrays changes from round to round: lengths are on the device, and buffers
keep their shapes until they grow. Whether replaying is faster is measured (`kernels/few_rows.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from dflash_mlx.caches.rows import Rows
from dflash_mlx.caches.tree_rows import TreeShape, branched, keep_path
from dflash_mlx.constants import constant
from dflash_mlx.ranks.mirror import Mirrored
from dflash_mlx.tree_steps import PLAIN, TreeSteps

# Single tokens after a tree, until its positions are put in order.
_MOST_ALONE = 8

# Computes with rows, which it reads and writes, and with further arrays; returns arrays.
Body = Callable[..., Sequence[mx.array]]


class Replayed:
    """A `Body` that MLX replays once it knows it for the shapes of its rows and inputs.

    The body must give the same for the same arrays, whatever else there is, and always take rows of the same model.
    """

    def __init__(self, body: Body) -> None:
        self._body = body
        self._form: Rows | None = None
        self._traced: Any = mx.compile(self._trace)

    def __call__(self, rows: Rows, *inputs: mx.array) -> list[mx.array]:
        if self._form is None:
            self._form = rows.without_arrays()
        # Given away, so that MLX may write into the buffers instead of copying them.
        arrays = rows.take_arrays()
        outputs, arrays = self._traced(list(inputs), rows.lengths.value, arrays)
        rows.put_arrays(arrays)
        return list(outputs)

    def _trace(
        self, inputs: list[mx.array], lengths: mx.array, arrays: list[mx.array]
    ) -> tuple[list[mx.array], list[mx.array]]:
        assert self._form is not None
        form = self._form
        form.put_arrays(arrays)
        form.lengths.value = lengths
        form.lengths.capacity = form.lengths.seen = int(arrays[0].shape[2])
        outputs = list(self._body(form, *inputs))
        return outputs, form.take_arrays()


def replayed(body: Body, *, on: bool) -> Body:
    return Replayed(body) if on else body


class Pass(Mirrored):
    """A target's pass: over mlx-lm's caches of one answer, or `over` rows.

    run: tokens (B, L) and caches -> logits (B, L, V) and, where a drafter wants them, features (B, L, taps * D).
    replays: whether passes over rows are replayed; rows with recurrent layers never are. steps: how a tree's rows find
    their places.
    """

    def __init__(
        self,
        run: Callable[[mx.array, list[Any]], tuple[mx.array, mx.array | None]],
        *,
        ropes: Sequence[Any] = (),
        replays: bool = False,
        steps: TreeSteps = PLAIN,
    ) -> None:
        self._run, self._ropes, self._steps = run, ropes, steps
        bodies: list[Body] = [self._chain_over, self._tree_over]
        self._chain, self._tree = (replayed(body, on=replays) for body in bodies)

    def __call__(self, tokens: mx.array, caches: list[Any]) -> tuple[mx.array, mx.array | None]:
        return self._run(tokens, caches)

    def over(self, rows: Rows, tokens: mx.array, tree: TreeShape | None = None) -> tuple[mx.array, mx.array | None]:
        """The tokens (B, L) that follow the rows' lengths, or the rows of a tree (1, L)."""
        # To put positions in order takes longer than a few single tokens gain by it.
        lengths = rows.lengths
        alone = tree is None and lengths.placed is not None and tokens.shape[1] == 1 and lengths.alone < _MOST_ALONE
        lengths.alone = lengths.alone + 1 if alone else 0
        if tree is None and not alone:
            rows.tidy()
            chain: Body = self._chain_over if rows.states else self._chain
            found = list(chain(rows, tokens))
        else:
            rows.scatter()
            branches: Body = self._tree_over if rows.states else self._tree
            # A single token is a tree, too.
            depths, visible = tree or (constant(0, mx.int32, (1,)), constant(True, mx.bool_, (1, 1)))
            *found, lengths.places = branches(rows, tokens, depths, visible, lengths.placed)
            if alone:
                # Its only row, which is row 0.
                keep_path(rows, depths, self._steps)
        return found[0], found[1] if len(found) > 1 else None

    def _chain_over(self, rows: Rows, tokens: mx.array) -> list[mx.array]:
        return [array for array in self._run(tokens, rows.layers) if array is not None]

    def _tree_over(
        self, rows: Rows, tokens: mx.array, depths: mx.array, visible: mx.array, placed: mx.array
    ) -> list[mx.array]:
        """Also returns the places at which the rows are."""
        lengths = rows.lengths
        lengths.placed = placed
        with branched(self._ropes, rows, depths, visible, self._steps):
            assert lengths.tree is not None
            assert lengths.tree.places is not None
            return [*self._chain_over(rows, tokens), lengths.tree.places]
