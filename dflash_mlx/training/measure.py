"""The exported drafter in the real decode loop, on held-out prompts."""

import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.checks import check_pair, check_shapes
from dflash_mlx.decoding.stats import Acceptance
from dflash_mlx.drafters.dflash import load_drafter
from dflash_mlx.generation import generate
from dflash_mlx.pair import ModelPair
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.targets.target import Target
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.store import Conversation


def load_exported(target: Target, tokenizer: Any, folder: Path, *, dtype: mx.Dtype) -> ModelPair:
    """Target and exported drafter as a checked pair. Raises CheckpointError and PairError."""
    drafter = load_drafter(folder, dtype=dtype, keep_quantized=mx.default_device() == mx.gpu)
    check_shapes(target, drafter)
    pair = ModelPair(
        name=str(folder),
        target=target,
        drafter=drafter,
        tokenizer=tokenizer,
        dtype=dtype,
        block_size=drafter.config.block_size,
        folders=(folder,),
    )
    pair.checks = check_pair(target, drafter, dtype=dtype)
    return pair


def measure_pair(
    pair: ModelPair,
    held_out: list[Conversation],
    *,
    max_tokens: int,
    deadline: float | None,
    progress: Progress,
) -> dict[str, Any] | None:
    """Greedy answers to the held-out prompts with full blocks: acceptance over all rounds, and tokens a second.

    Stops early, with what it has, at `deadline` (time.monotonic()). None without prompts.
    """
    width = pair.block_size - 1
    tokens = rounds = prompts = 0
    kept = [0.0] * width
    seconds = 0.0
    for i, conversation in enumerate(held_out):
        if deadline is not None and time.monotonic() >= deadline:
            break
        prompt = conversation.tokens[: conversation.spans[0][0]].tolist()
        params = SamplingParams(max_tokens=max_tokens)
        answer = generate(pair, prompt, params, width=width)
        assert answer.acceptance is not None
        totals = _totals(answer.acceptance, width)
        rounds, tokens, prompts = rounds + totals[0], tokens + totals[1], prompts + 1
        kept = [a + b for a, b in zip(kept, totals[2], strict=True)]
        seconds += (answer.generation_tokens - 1) / max(answer.generation_tps, 1e-9) if answer.generation_tps else 0
        progress.update((i + 1) / len(held_out), f"{prompts} prompts, acceptance length {tokens / max(rounds, 1):.3f}")
    if not rounds:
        return None
    return {
        "mean_acceptance_length": round(tokens / rounds, 4),
        "per_position": [round(k / rounds, 4) for k in kept],
        "prompts": prompts,
        "rounds": rounds,
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2) if seconds else None,
        "width": width,
        "max_tokens": max_tokens,
    }


def _totals(acceptance: Acceptance, width: int) -> tuple[int, int, list[float]]:
    """Rounds, tokens gained by them, and how many rounds kept draft 1, 2, ..."""
    histogram = acceptance.histogram
    kept = [float(sum(histogram[position:])) for position in range(1, width + 1)]
    return acceptance.rounds, acceptance.tokens, kept
