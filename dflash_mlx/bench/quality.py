"""How good a model still is: its perplexity on built-in text, and how many drafts of a drafter it keeps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from dflash_mlx.bench.contestants import Local
from dflash_mlx.bench.prompts import short_prompts, take
from dflash_mlx.bench.run import time_answer
from dflash_mlx.pair import ModelPair
from dflash_mlx.sampling import SamplingParams

_LONGEST = 1024  # tokens of a text that count
Progress = Callable[[int, int], None]


def perplexity(pair: ModelPair, texts: Sequence[str] | None = None) -> tuple[float, int]:
    """exp of the mean negative log-likelihood of texts' tokens, and how many tokens that were.

    texts: the built-in benchmark prompts unless given. A small amount of text: good for comparing two precisions of
    one model, not for comparing models.
    """
    loss, count = 0.0, 0
    for text in texts or [prompt.text for prompt in short_prompts()]:
        tokens = pair.encode_prompt(text)[:_LONGEST]
        if len(tokens) < 2:
            continue
        logits = pair.target.forward(mx.array([tokens[:-1]]), pair.target.make_cache())[0].astype(mx.float32)
        chosen = mx.take_along_axis(logits, mx.array(tokens[1:])[:, None], axis=-1)[:, 0]
        loss += float((mx.logsumexp(logits, axis=-1) - chosen).sum())
        count += len(tokens) - 1
    return math.exp(loss / count), count


@dataclass(frozen=True)
class Kept:
    """What a target kept of a drafter's drafts."""

    mean_acceptance_length: float
    acceptance_rate: float


def acceptance(pair: ModelPair, *, prompts: int = 6, max_tokens: int = 48, progress: Progress | None = None) -> Kept:
    """Greedy answers to some built-in prompts with full blocks.

    Blocks are full so that the figure depends on the models and not on this machine's speed.
    """
    chosen = take(short_prompts(), prompts)
    drafting = Local(name="drafted", pair=pair, width=pair.block_size - 1)
    rounds = drafted = accepted = tokens = 0
    for done, prompt in enumerate(chosen):
        if progress:
            progress(done, len(chosen))
        found = time_answer(drafting, prompt.text, SamplingParams(max_tokens=max_tokens)).acceptance
        assert found is not None
        rounds += found["rounds"]
        drafted += found["drafted"]
        accepted += found["accepted"]
        tokens += found["tokens"]
    return Kept(tokens / max(rounds, 1), accepted / max(drafted, 1))
