"""The target of a training run: loaded, and told from others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper

from dflash_mlx.errors import UsageError
from dflash_mlx.hub.download import ensure_model
from dflash_mlx.hub.registry import find_pair, parse_source
from dflash_mlx.loading import load_pair
from dflash_mlx.targets.target import Target
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.template import ChatFrame, chat_frame


@dataclass
class Loaded:
    """The target and what a training needs to know of it. `name` is what the user called it."""

    name: str
    folder: Path
    target: Target
    tokenizer: TokenizerWrapper
    frame: ChatFrame
    dtype: mx.Dtype

    @property
    def compute_dtype(self) -> mx.Dtype:
        """What the drafter computes in: not in float16, in which DFlash drafters overflow."""
        return mx.bfloat16 if self.dtype == mx.float16 else self.dtype

    def identity(self) -> dict[str, Any]:
        """What tells this target from another: its config, not where it lies."""
        keys = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "rope_theta")
        found = {key: self.target.text_config(key) for key in keys}
        found["quantization"] = self.target.config.get("quantization")
        return found


def load(options: TrainOptions, *, quiet: bool = False) -> Loaded:
    """Load the target, downloaded first where needed. Raises DFlashError."""
    if options.pair is not None:
        source = find_pair(options.pair).target
    else:
        assert options.model is not None
        source = parse_source(options.model)
    with Progress("load", quiet=quiet) as progress:
        folder = ensure_model(source, report=lambda message, fraction: progress.update(fraction or 0.0, message))
    pair = load_pair(model=str(folder), draft=False, dtype=options.dtype)
    frame = chat_frame(pair.tokenizer, thinking=options.thinking)
    if frame.thinking and options.turns > 1:
        raise UsageError(
            "this model thinks before it answers, and its template drops earlier thoughts from the context: "
            "use --turns 1, or --thinking off."
        )
    name = folder.name if source.kind == "folder" else str(source)
    return Loaded(name, folder, pair.target, pair.tokenizer, frame, pair.dtype)
