"""The exported drafter in the real decode loop, on held-out prompts; a stop loses an answer at most."""

import hashlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.bench.contestants import Local
from dflash_mlx.bench.record import Run
from dflash_mlx.bench.run import time_answer
from dflash_mlx.checks import check_pair, check_shapes
from dflash_mlx.drafters.checkpoint import load_drafter
from dflash_mlx.pair import ModelPair
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.targets.target import Target
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.state import read_json, write_json
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


@dataclass
class MeasureLog:
    """What has been measured of one export, kept in a file after each answer.

    answers: an object each with rounds, tokens (gained by the rounds), histogram (rounds by drafts kept) and seconds.
    """

    path: Path
    key: str
    replay: dict[str, Any] | None = None
    answers: list[dict[str, Any]] = field(default_factory=list)

    def save(self) -> None:
        write_json(self.path, {"key": self.key, "replay": self.replay, "answers": self.answers})


def open_log(path: Path, folder: Path, held_out: list[Conversation], *, max_tokens: int) -> MeasureLog:
    """The log at `path` if it is of the checkpoint in `folder`, these prompts and this length; else an empty one."""
    digest = hashlib.sha256(json.dumps([max_tokens, *(c.prompt_key() for c in held_out)]).encode())
    for name in ("config.json", "model.safetensors"):
        with (folder / name).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    key = digest.hexdigest()[:32]
    before = read_json(path) or {}
    if before.get("key") != key:
        return MeasureLog(path, key)
    return MeasureLog(path, key, before["replay"], before["answers"])


def measure_pair(
    pair: ModelPair,
    held_out: list[Conversation],
    log: MeasureLog,
    *,
    max_tokens: int,
    deadline: float | None,
    progress: Progress,
) -> bool:
    """Greedy answers to the held-out prompts that are not in the log yet, with full blocks.

    Returns whether all are there now; False when `deadline` (time.monotonic()) came first.
    """
    drafting = Local(name="drafted", pair=pair, width=pair.block_size - 1)
    while len(log.answers) < len(held_out):
        if deadline is not None and time.monotonic() >= deadline:
            return False
        conversation = held_out[len(log.answers)]
        prompt = conversation.tokens[: conversation.spans[0][0]].tolist()
        log.answers.append(_record(time_answer(drafting, prompt, SamplingParams(max_tokens=max_tokens))))
        log.save()
        rounds, tokens = (sum(a[key] for a in log.answers) for key in ("rounds", "tokens"))
        progress.update(
            len(log.answers) / len(held_out),
            f"{len(log.answers)} prompts, acceptance length {tokens / max(rounds, 1):.3f}",
        )
    return True


def _record(run: Run) -> dict[str, Any]:
    assert run.acceptance is not None
    return {key: run.acceptance[key] for key in ("rounds", "tokens", "histogram")} | {"seconds": round(run.decode_s, 4)}


def summarize(answers: list[dict[str, Any]], *, width: int, max_tokens: int) -> dict[str, Any] | None:
    """Acceptance over all rounds of the answers, and tokens a second. None without rounds."""
    rounds, tokens, seconds = (sum(answer[key] for answer in answers) for key in ("rounds", "tokens", "seconds"))
    if not rounds:
        return None
    kept = [sum(sum(answer["histogram"][position:]) for answer in answers) for position in range(1, width + 1)]
    return {
        "mean_acceptance_length": round(tokens / rounds, 4),
        "per_position": [round(k / rounds, 4) for k in kept],
        "prompts": len(answers),
        "rounds": rounds,
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 2) if seconds else None,
        "width": width,
        "max_tokens": max_tokens,
    }
