"""How long the drafter's blocks are accepted on held-out answers: by replay, and by the real decode loop."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.drafters.dflash2 import DFlash2Drafter
from dflash_mlx.targets.target import Target
from dflash_mlx.training.batches import LENGTH_STEP, candidates, padded_length, usable
from dflash_mlx.training.forward import draft_hidden, target_features
from dflash_mlx.training.selector import walk
from dflash_mlx.training.store import Conversation

# Anchors of a sequence are drafted this many at a time, so that a few shapes serve all lengths.
_ANCHORS = 128


@dataclass(frozen=True)
class Replay:
    """Acceptance on recorded greedy answers. per_position: share of rounds that kept draft 1, 2, ..."""

    mean_acceptance_length: float
    per_position: list[float]
    top1: list[float]
    conversations: int

    def to_json(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "per_position": [round(x, 4) for x in self.per_position],
            "top1": [round(x, 4) for x in self.top1],
            "conversations": self.conversations,
        }


def greedy_only(held: list[Conversation], count: int, longest: int) -> list[Conversation]:
    """Up to `count` held-out conversations whose answers are the target's greedy ones."""
    return [c for c in held if c.greedy and usable(c, longest)][:count]


def draft_all(
    target: Target, drafter: DFlashDrafter, tokens: np.ndarray, positions: np.ndarray, *, padded: int, chunk: int
) -> np.ndarray:
    """Drafted ids (A, K - 1) of blocks anchored at `positions` (A,) of `tokens` (T,), padded to `padded` tokens."""
    row = np.zeros((1, padded), np.int32)
    row[0, : len(tokens)] = tokens
    features = target_features(target, mx.array(row), drafter.config.target_layer_ids)
    features = features.astype(drafter.fc.weight.dtype)
    drafted = []
    for at in range(0, len(positions), _ANCHORS):
        anchors = np.zeros((1, _ANCHORS), np.int32)
        part = positions[at : at + _ANCHORS]
        anchors[0, : len(part)] = part
        anchor_tokens = mx.array(row[0][anchors])
        hidden = draft_hidden(drafter, target.embed, features, anchor_tokens, mx.array(anchors))[0, :, 1:]
        drafted.append(greedy_drafts(target, drafter, hidden, anchor_tokens[0], chunk=chunk)[: len(part)])
    return np.array(mx.concatenate(drafted))


def greedy_drafts(
    target: Target, drafter: DFlashDrafter, hidden: mx.array, anchor_tokens: mx.array, *, chunk: int
) -> mx.array:
    """The drafts (A, W) of blocks with hidden states (A, W, D) after anchor_tokens (A,), as the decode loop's.

    The logits live `chunk` rows at a time.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    selector = drafter.candidate_selector if isinstance(drafter, DFlash2Drafter) else None
    parts = []
    for at in range(0, rows.shape[0], chunk):
        logits = drafter.adjust_logits(target.head(rows[at : at + chunk]))
        columns = mx.argmax(logits, axis=-1, keepdims=True) if selector is None else selector.candidates(logits)
        parts.append((columns, mx.take_along_axis(logits, columns, axis=-1)))
    columns, unary = (mx.concatenate(list(part)).reshape(*hidden.shape[:2], -1) for part in zip(*parts, strict=True))
    return columns[..., 0] if selector is None else walk(selector, hidden, columns, unary, anchor_tokens)


def replay(
    target: Target, drafter: DFlashDrafter, conversations: list[Conversation], *, longest: int, chunk: int
) -> Replay | None:
    """Walk the recorded answers as the decode loop would: draft, keep what agrees, go on after it.

    Exact where the target's greedy choice is the recorded token. None without conversations.
    """
    block = drafter.config.block_size
    kept = np.zeros(block - 1)
    right = np.zeros(block - 1)
    possible = np.zeros(block - 1)
    gained = rounds = used = 0
    for conversation in conversations:
        tokens = conversation.tokens[:longest].astype(np.int32)
        positions, ends = candidates(conversation, len(tokens))
        if not len(positions):
            continue
        padded = padded_length(len(tokens), max(longest, LENGTH_STEP))
        drafted = draft_all(target, drafter, tokens, positions, padded=padded, chunk=chunk)
        behind = positions[:, None] + np.arange(1, block)
        valid = behind < ends[:, None]
        agrees = (drafted == tokens[np.minimum(behind, len(tokens) - 1)]) & valid
        right += agrees.sum(axis=0)
        possible += valid.sum(axis=0)
        accepted = np.cumprod(agrees, axis=1)
        used += 1
        at = 0
        while at < len(positions):
            keep = int(accepted[at].sum())
            left = int(ends[at] - 1 - positions[at])
            kept += accepted[at]
            gained += min(keep + 1, left)
            rounds += 1
            # Candidates of several answers follow each other; a round never crosses into the next answer.
            at += min(keep + 1, left)
    if not rounds:
        return None
    return Replay(gained / rounds, (kept / rounds).tolist(), (right / np.maximum(possible, 1)).tolist(), used)
