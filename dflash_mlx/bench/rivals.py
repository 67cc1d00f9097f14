"""Other packages' loops as contestants, where they are installed: the same target, the same drafter, the same process.

- `dflash` is the MLX loop of DFlash's authors. It always verifies a whole block.
- `mlx-dspark` is the package of that name; its loop for DFlash drafters, which verifies a whole block, too.

Each gets models of its own, in the pair's precision and without this project's kernels, so nobody changes another's.
"""

import importlib
import json
import queue
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from dflash_mlx.bench.contestants import asked
from dflash_mlx.decoding.stats import Acceptance
from dflash_mlx.drafters.checkpoint import load_drafter, read_checkpoint
from dflash_mlx.drafters.convert import public_names, zlab_config
from dflash_mlx.errors import UsageError
from dflash_mlx.generation import GenerationResponse, Prompt
from dflash_mlx.pair import ModelPair
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.targets.loading import load_target


class Models(NamedTuple):
    """A target as mlx-lm loads it, and a drafter of the package that runs it."""

    target: nn.Module
    drafter: Any


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A package's loop and its models; pair: whose prompts and tokenizer it is given."""

    name: str
    words: str
    pair: ModelPair
    models: Models
    package: ModuleType


class OfficialLoop(Rival):
    """The MLX loop of the package `dflash`."""

    def answer(self, prompt: Prompt, params: SamplingParams) -> Iterator[GenerationResponse]:
        tokens, limit = asked(self.pair, prompt, params)
        acceptance, count = Acceptance(), 0
        block = int(self.models.drafter.config.block_size)
        pieces = self.package.stream_generate(
            self.models.target,
            self.models.drafter,
            self.pair.tokenizer,
            tokens,
            max_tokens=limit,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
        )
        for piece in pieces:
            # None where nothing was drafted; otherwise it counts the target's own token, too.
            drafted = piece.accepted is not None
            places = min(block, limit - count + 1) - 1 if drafted else 0
            kept = max(0, piece.accepted - 1) if drafted else 0
            count += len(piece.tokens)
            acceptance.record(width=places, depth=places, num_accepted=kept, tokens=len(piece.tokens))
            yield GenerationResponse(
                text=piece.text,
                token_ids=list(piece.tokens),
                prompt_tokens=len(tokens),
                mode="dflash",
                generation_tokens=count,
                peak_memory_gb=mx.get_peak_memory() / 1e9,
                acceptance=acceptance,
                width=places,
                depth=places,
                num_accepted=kept,
                finish_reason=piece.finish_reason,
            )


class Dspark(Rival):
    """mlx-dspark's loop for DFlash drafters. It calls back instead of yielding, so it runs in a thread of its own."""

    def answer(self, prompt: Prompt, params: SamplingParams) -> Iterator[GenerationResponse]:
        tokens, limit = asked(self.pair, prompt, params)
        told: queue.Queue[Any] = queue.Queue()
        acceptance = Acceptance()

        def count_round(*, drafted: int, accepted: int, committed: int, **_: Any) -> None:
            acceptance.record(width=drafted, depth=drafted, num_accepted=accepted, tokens=committed)

        def run() -> None:
            try:
                told.put(
                    self.package.dflash_generate(
                        self.models.target,
                        self.pair.tokenizer,
                        self.models.drafter,
                        prompt_ids=tokens,
                        max_new_tokens=limit,
                        temperature=params.temperature,
                        top_p=params.top_p,
                        top_k=params.top_k,
                        seed=params.seed,
                        on_text=told.put,
                        on_round=count_round,
                    )
                )
            except BaseException as error:
                told.put(error)

        threading.Thread(target=run, daemon=True).start()
        while isinstance(found := told.get(), str):
            yield GenerationResponse(text=found, token_ids=[], prompt_tokens=len(tokens), mode="dflash")
        if isinstance(found, BaseException):
            raise found
        yield GenerationResponse(
            text="",
            token_ids=found.token_ids[:limit],
            prompt_tokens=len(tokens),
            mode="dflash",
            # It may give a few tokens more than it was asked for; they took their time like the others.
            generation_tokens=len(found.token_ids),
            peak_memory_gb=mx.get_peak_memory() / 1e9,
            acceptance=acceptance,
            finish_reason=found.finish_reason,
        )


# Their modules. What `dflash` depends on is much, pinned, and not needed for its loop.
RIVALS = {"dflash": "dflash.model_mlx", "mlx-dspark": "mlx_dspark"}
_INSTALL = {"dflash": "pip install --no-deps dflash", "mlx-dspark": "pip install mlx-dspark"}


def open_rival(package: str, pair: ModelPair) -> OfficialLoop | Dspark:
    """The contestant that runs `package`. Raises UsageError where that is not installed or cannot run this pair."""
    if package not in RIVALS:
        raise UsageError(f"--against-package {package}: expected one of {', '.join(RIVALS)}.")
    if len(pair.folders) < 2 or not pair.method.startswith("dflash"):
        raise UsageError(f"--against-package {package} needs a pair with a DFlash drafter; this one has none.")
    try:
        version = metadata.version(package)
        module = importlib.import_module(RIVALS[package])
    except ImportError as error:
        raise UsageError(
            f"--against-package {package} needs that package, which is not there ({error}). Install it beside "
            f"this one: {_INSTALL[package]}"
        ) from error
    words = f"the package {package} {version} with models of its own"
    target = load_target(pair.folders[0], dtype=str(pair.dtype).removeprefix("mlx.core."))[0].model
    with tempfile.TemporaryDirectory() as folder:
        _write_drafter(pair, Path(folder))
        if package == "dflash":
            # It only loads by a name of the Hub; a folder's own name is what that call returns.
            module.snapshot_download = lambda place, **_: place  # type: ignore[attr-defined]
            models = Models(target, module.load_draft(folder))
            return OfficialLoop(name=package, words=words, pair=pair, models=models, package=module)
        drafter, _ = importlib.import_module("mlx_dspark.load").load_dflash(folder, quantize=False)
    models = Models(importlib.import_module("mlx_dspark.target").Target(target, pair.tokenizer), drafter)
    module = importlib.import_module("mlx_dspark.generate")
    return Dspark(name=package, words=words, pair=pair, models=models, package=module)


def _write_drafter(pair: ModelPair, folder: Path) -> None:
    """The pair's drafter with plain weights over the whole vocabulary, which is all that others read."""
    source = pair.folders[1]
    checkpoint = read_checkpoint(source)
    if checkpoint.config.own_head:
        raise UsageError("--against-package: other packages cannot run this drafter, which has a head of its own.")
    config = zlab_config(checkpoint.raw)
    config.pop("quantization", None)
    config["dflash_config"].pop("draft_token_ids", None)
    drafter = load_drafter(source, dtype=pair.dtype, keep_quantized=False)
    weights = public_names(dict(tree_flatten(drafter.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
