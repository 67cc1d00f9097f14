"""Lossless block-diffusion speculative decoding (DFlash, arXiv 2602.06036) for MLX.

The public names are loaded on first use, so that `dflash-mlx --help` imports neither mlx nor transformers:

    from dflash_mlx import load_pair, generate, generate_many, stream_generate, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dflash_mlx.runtime import load_fast_blas, set_mlx_defaults

if TYPE_CHECKING:
    from dflash_mlx.drafters.denoising import DFlashConfig
    from dflash_mlx.generation import GenerationResponse, generate, generate_many, stream_generate, stream_many
    from dflash_mlx.loading import load_pair
    from dflash_mlx.model import DFlashModel
    from dflash_mlx.pair import ModelPair
    from dflash_mlx.sampling import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "DFlashConfig",
    "DFlashModel",
    "GenerationResponse",
    "ModelPair",
    "SamplingParams",
    "generate",
    "generate_many",
    "load_pair",
    "stream_generate",
    "stream_many",
]

_HOMES = {
    "DFlashConfig": "dflash_mlx.drafters.denoising",
    "DFlashModel": "dflash_mlx.model",
    "GenerationResponse": "dflash_mlx.generation",
    "ModelPair": "dflash_mlx.pair",
    "SamplingParams": "dflash_mlx.sampling",
    "generate": "dflash_mlx.generation",
    "generate_many": "dflash_mlx.generation",
    "load_pair": "dflash_mlx.loading",
    "stream_generate": "dflash_mlx.generation",
    "stream_many": "dflash_mlx.generation",
}

# Here, because both must happen before anything imports mlx.
load_fast_blas()
set_mlx_defaults()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
