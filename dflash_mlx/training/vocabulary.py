"""The tokens that a drafter may draft, chosen by how often the target uses them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_mlx.errors import UsageError
from dflash_mlx.training.store import Conversation


@dataclass(frozen=True)
class ChosenTokens:
    """Rising token ids, and the share of the answers' tokens that they cover: in training, and held out."""

    ids: tuple[int, ...]
    covered: float
    covered_held_out: float

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": len(self.ids),
            "covered": round(self.covered, 5),
            "covered_held_out": round(self.covered_held_out, 5),
        }


def choose_tokens(
    training: Iterable[Conversation],
    held_out: Iterable[Conversation],
    count: int,
    *,
    eos_ids: Iterable[int],
    vocab_size: int,
    least: int = 0,
) -> ChosenTokens:
    """The `count` tokens that are most frequent in the training answers, and the end-of-sequence tokens.

    Fewer where the answers use fewer; of equally frequent ones the lower ids. Raises UsageError for a `count` that
    leaves nothing out, and where fewer than `least` are found.
    """
    if not 0 < count < vocab_size:
        raise UsageError(
            f"draft-vocabulary should be from 1 to {vocab_size - 1}, fewer than the target's {vocab_size} tokens; "
            f"got {count}."
        )
    used = count_answers(training, vocab_size)
    best = np.argsort(-used, kind="stable")[:count]
    ids = sorted({*best[used[best] > 0].tolist(), *(i for i in eos_ids if 0 <= i < vocab_size)})
    if len(ids) < least:
        raise UsageError(
            f"the answers use {len(ids)} different tokens and the drafter's selector chooses among {least}. "
            "Leave --draft-vocabulary out."
        )
    held = count_answers(held_out, vocab_size)
    return ChosenTokens(tuple(ids), _share(used, ids), _share(held, ids))


def count_answers(conversations: Iterable[Conversation], vocab_size: int) -> np.ndarray:
    """How often each token stands in an answer, (vocab_size,)."""
    answers = [c.tokens[start:end] for c in conversations for start, end in c.spans]
    return np.bincount(np.concatenate([np.zeros(0, np.int64), *answers]).astype(np.int64), minlength=vocab_size)


def _share(counts: np.ndarray, ids: list[int]) -> float:
    return float(counts[ids].sum() / max(int(counts.sum()), 1))
