"""Checks that a target and a drafter belong together, by running them.

A wrong pair does not crash: it drafts nonsense and is slow, or reads the wrong layers. So shapes are compared first,
and then both models run on a few tokens; anything off is a PairError that says what was expected and what was found.
"""

from itertools import pairwise

import mlx.core as mx
import numpy as np

from dflash_mlx.decoding.batch import open_caches
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.drafters.dflash_state import DFlashState
from dflash_mlx.errors import PairError
from dflash_mlx.rounding import TOLERANCE, relative_difference
from dflash_mlx.targets.target import Target

_BLOCK = 4


def check_shapes(target: Target, drafter: DFlashDrafter) -> None:
    """Compare what the two configs say, without running anything. Raises PairError."""
    config = drafter.config
    problems = []
    if config.hidden_size != target.hidden_size:
        problems.append(f"it was made for a hidden size of {config.hidden_size}, the target has {target.hidden_size}")
    if config.vocab_size != target.vocab_size:
        problems.append(f"it was made for a vocabulary of {config.vocab_size}, the target has {target.vocab_size}")
    layers = len(target.layers)
    if config.num_target_layers not in (None, layers):
        problems.append(f"it was made for {config.num_target_layers} target layers, the target has {layers}")
    outside = [i for i in config.target_layer_ids if not 0 <= i < layers]
    if outside:
        problems.append(f"it reads target layers {outside}, the target has layers 0 to {layers - 1}")
    if any(a >= b for a, b in pairwise(config.target_layer_ids)):
        problems.append(f"its target layers {list(config.target_layer_ids)} are not in rising order")
    if problems:
        raise PairError(
            f"this drafter is not for this target: {'; '.join(problems)}. "
            "Use the drafter made for the target, or run with --no-draft."
        )


def check_pair(target: Target, drafter: DFlashDrafter, *, dtype: mx.Dtype) -> list[str]:
    """Run both models on a few tokens. Returns what was found right, a line each; raises PairError otherwise."""
    rng = np.random.default_rng(0)
    prompt = mx.array(rng.integers(0, target.vocab_size, (1, 6)))
    block = mx.array(rng.integers(0, target.vocab_size, (1, _BLOCK)))
    tolerance = TOLERANCE[dtype]
    done = [_check_taps(target, drafter, prompt, tolerance), _check_head(target, prompt, tolerance)]
    done += _check_blocks(target, drafter, prompt, block, tolerance)
    return done


def _check_taps(target: Target, drafter: DFlashDrafter, prompt: mx.array, tolerance: float) -> str:
    """Reading the layers changes neither the model nor its numbers."""
    layer_ids = drafter.config.target_layer_ids
    classes = [type(layer) for layer in target.layers]
    names = target.parameter_names()
    plain = target.forward(prompt, target.make_cache())
    logits, features = target.forward_tapped(prompt, target.make_cache(), layer_ids)
    _require_close("a tapped forward", logits, "the plain forward", plain, tolerance)
    if [type(layer) for layer in target.layers] != classes or target.parameter_names() != names:
        raise PairError(
            "reading the target's layers changed the model itself; this target cannot be used for drafting."
        )
    expected = (1, prompt.shape[1], drafter.config.feature_size)
    if features.shape != expected:
        raise PairError(f"the target's features should have the shape {expected}, found {features.shape}.")
    if not mx.all(mx.isfinite(features)).item():
        raise PairError("the target's features are not finite; try another --dtype, float32 for instance.")
    return f"layers {list(layer_ids)} can be read without changing the target"


def _check_head(target: Target, prompt: mx.array, tolerance: float) -> str:
    """The embedding and the head that the drafter shares are the target's real ones."""
    if target.final_norm is None:
        return "vocabulary head taken as it is (the target has no final norm of its own)"
    last = len(target.layers) - 1
    logits, hidden = target.forward_tapped(prompt, target.make_cache(), [last])
    shared = target.head(target.final_norm(hidden))
    # Targets that scale or cap their logits do it after the head; the best token is the same.
    if not mx.array_equal(mx.argmax(shared, axis=-1), mx.argmax(logits, axis=-1)).item():
        _require_close("the shared vocabulary head", shared, "the target's logits", logits, tolerance)
    return "the shared vocabulary head gives the target's own tokens"


def _check_blocks(
    target: Target, drafter: DFlashDrafter, prompt: mx.array, block: mx.array, tolerance: float
) -> list[str]:
    """A block gives what token by token gives, a trimmed cache forgets, and drafts are finite."""
    session = Session(target, drafter)
    session.feed(np.array(prompt[0]).tolist())
    length = prompt.shape[1]
    caches, at, model = open_caches(session), mx.array([length]), target.pass_for(())
    together, _ = caches.feed(model, block, at=at, room=length + _BLOCK)
    mx.eval(together)
    caches.commit(_BLOCK, [1])
    alone = [together[:, :1]]
    for i in range(1, _BLOCK):
        logits, _ = caches.feed(model, block[:, i : i + 1], at=at + i, room=length + _BLOCK)
        caches.commit(1, [1])
        mx.eval(logits)
        alone.append(logits)
    stepwise = mx.concatenate(alone, axis=1)
    _require_close(
        "a block forward, trimmed and continued token by token,",
        stepwise,
        "the block forward",
        together,
        tolerance,
    )

    state = DFlashState.of(drafter, target, session.draft_cache, length)
    drafted = state.draft(block[:, 0], at, _BLOCK - 1, room=length + _BLOCK).logits
    if not mx.all(mx.isfinite(drafted)).item():
        raise PairError("the drafter's logits are not finite; try another --dtype, float32 for instance.")
    return ["a block forward equals token by token, and rejected tokens leave the cache", "drafts are finite"]


def _require_close(name: str, found: mx.array, reference: str, expected: mx.array, tolerance: float) -> None:
    difference = relative_difference(found, expected)
    if not difference <= tolerance:
        raise PairError(
            f"{name} should give the same logits as {reference}; they differ by {difference:.3g} of their spread "
            f"(at most {tolerance:g} is rounding). This target cannot be used for drafting with this version of mlx-lm."
        )
