"""When two ways to the same logits agree: how much of a difference is rounding."""

import mlx.core as mx

# Largest root-mean-square difference that is rounding, relative to the logits' spread.
TOLERANCE = {mx.float32: 1e-3, mx.bfloat16: 0.1, mx.float16: 0.02}


def relative_difference(found: mx.array, expected: mx.array) -> float:
    """Root mean square of the difference, relative to the standard deviation of `expected`. Any one shape for both."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    spread = mx.maximum(mx.std(expected), 1e-6)
    return float(mx.sqrt(mx.mean(mx.square(found - expected))) / spread)
