"""Drafting a block in several denoising steps, as masked diffusion models do (MaskGIT, arXiv 2202.04200, section 3.2).

Each step is a pass of the drafter over the block. After it the places that the drafter is surest of are fixed, and the
next step sees their tokens where it saw masks before. DFlash drafters are trained for one step, which is the default.
"""

import math
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from dflash_mlx.errors import UsageError

# The share of the places that are masks still, by the share of the steps that are done.
_MASKED = {"cosine": lambda done: math.cos(math.pi / 2 * done), "linear": lambda done: 1.0 - done}


@dataclass(frozen=True)
class DFlashConfig:
    """How a DFlash drafter drafts. Answers are the same whatever it says.

    block_size: the largest block of a round, an anchor and up to block_size - 1 drafts; None leaves it as it is.
    diffusion_steps: passes of the drafter for a block. noise_schedule: how many places each step fixes; "cosine": few
    at first and more later, "linear": as many in each. Raises UsageError for values that cannot be.
    """

    block_size: int | None = None
    diffusion_steps: int = 1
    noise_schedule: Literal["cosine", "linear"] = "cosine"

    def __post_init__(self) -> None:
        if self.diffusion_steps < 1:
            raise UsageError(f"diffusion_steps should be at least 1; got {self.diffusion_steps}.")
        if self.noise_schedule not in _MASKED:
            raise UsageError(f"noise_schedule should be one of {', '.join(_MASKED)}; got {self.noise_schedule!r}.")

    def fixed_counts(self, places: int) -> list[int]:
        """How many of so many places are fixed after each step; after the last one all are.

        Steps that would fix nothing are left out.
        """
        masked, steps = _MASKED[self.noise_schedule], self.diffusion_steps
        counts = {places - round(places * masked(step / steps)) for step in range(1, steps + 1)}
        return sorted(counts - {0})


def surest(confidence: mx.array, fixed: mx.array, count: int) -> mx.array:
    """Which places are fixed now, boolean (B, W): those in `fixed` already, and the surest of the others.

    confidence: (B, W); count: how many are fixed in each row.
    """
    order = mx.argsort(mx.where(fixed, -mx.inf, -confidence), axis=-1)
    return mx.argsort(order, axis=-1) < count
