"""Optimizers and the learning rate."""

import math
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim

from dflash_mlx.training.options import TrainOptions

# An orthogonalized update has entries of about 1 / sqrt(larger side); this factor makes them as large as Adam's
# (arXiv 2502.16982, section 2.2), so that one learning rate serves both.
_MUON_SCALE = 0.2
# A run limited by time still warms up over steps: the first ones compile kernels and take much of the time.
_WARMUP_STEPS = 200
_FLOOR = 0.01


class MatchedMuon(optim.Muon):
    """Muon whose updates are as large as AdamW's at the same learning rate, with decoupled weight decay.

    The Newton-Schulz steps run in bfloat16 on GPUs, as the authors' do.
    """

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        velocity = self.momentum * state["v"] + (1 - self.momentum) * gradient
        state["v"] = velocity
        update = gradient * (1 - self.momentum) + velocity * self.momentum if self.nesterov else velocity
        if mx.default_device() == mx.gpu:
            update = update.astype(mx.bfloat16)
        update = self._zeropower_via_newtonschulz5(update, steps=self.ns_steps).astype(parameter.dtype)
        rate = self.learning_rate.astype(parameter.dtype)
        update = update * (_MUON_SCALE * math.sqrt(max(parameter.shape)))
        return parameter * (1 - rate * self.weight_decay) - rate * update


def make_optimizer(options: TrainOptions) -> optim.Optimizer:
    """AdamW, or Muon for matrices with AdamW for the rest. The learning rate is set at each step.

    Codebooks are tables, of which a step moves some rows: they are AdamW's, too.
    """
    adamw = optim.AdamW(
        learning_rate=options.learning_rate,
        betas=[0.9, 0.95],
        weight_decay=options.weight_decay,
        bias_correction=True,
    )
    if options.optimizer == "adamw":
        return adamw
    muon = MatchedMuon(learning_rate=options.learning_rate, weight_decay=options.weight_decay)
    return optim.MultiOptimizer([muon, adamw], [lambda name, weight: weight.ndim == 2 and "codebook" not in name])


def learning_rate(options: TrainOptions, *, share: float, step: int) -> float:
    """Warm-up, then a cosine down to 1%. share: of the budget spent, 0 to 1; step: steps done."""
    if options.training_budget[0] is None:
        rise = (share + 1 / (options.steps or 1)) / options.warmup if options.warmup else 1.0
    else:
        rise = (step + 1) / _WARMUP_STEPS if options.warmup else 1.0
    wave = 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
    return options.learning_rate * min(1.0, rise) * (_FLOOR + (1 - _FLOOR) * wave)
