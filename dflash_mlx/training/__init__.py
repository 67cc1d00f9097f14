"""Training a drafter: own-answer data, the training itself, measurement and export.

from dflash_mlx.training import TrainOptions, run

run(TrainOptions(model="path/or/hub-id", out="drafter"))
"""

from typing import TYPE_CHECKING, Any

from dflash_mlx.training.options import TrainOptions

if TYPE_CHECKING:
    from dflash_mlx.training.pipeline import TrainResult, run

__all__ = ["TrainOptions", "TrainResult", "run"]


def __getattr__(name: str) -> Any:
    # Late, so that `dflash-mlx train --help` imports no mlx.
    if name in ("run", "TrainResult"):
        from dflash_mlx.training import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
