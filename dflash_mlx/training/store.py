"""The conversations on disk: one compressed .npz a batch, written whole or not at all.

A shard holds `tokens` (uint16, or uint32 for large vocabularies), `lengths`, `spans` (answers as [start, end) in their
conversation) with `span_counts`, `flags` and `meta` (JSON). The shards present are the state: the next batch is the
lowest number without one, so a shard that was deleted is written again.
"""

import hashlib
import json
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_mlx.errors import CheckpointError
from dflash_mlx.training.state import write_atomic

GREEDY, LOOPED, CUT = 1, 2, 4
# What reading a damaged shard may raise.
_BROKEN = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)


@dataclass(frozen=True)
class Conversation:
    """Token ids with the spans [start, end) that the target answered; an answer's end token is part of it.

    flags: GREEDY (chosen without sampling), LOOPED (cut because it repeated itself), CUT (reached the length limit).
    """

    tokens: np.ndarray
    spans: tuple[tuple[int, int], ...]
    flags: int = 0

    @property
    def greedy(self) -> bool:
        return bool(self.flags & GREEDY)

    @property
    def looped(self) -> bool:
        return bool(self.flags & LOOPED)

    def prompt_key(self) -> int:
        """A 64-bit hash of everything before the first answer."""
        return _hash(self.tokens[: self.spans[0][0]])

    def answer_key(self) -> int:
        """A 64-bit hash of the answers."""
        return _hash(np.concatenate([self.tokens[a:b] for a, b in self.spans]))


class ConversationStore:
    """The conversations in a folder. Adding one whose prompt or whose answer is already there does nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conversations: list[Conversation] = []
        self.tokens = 0
        self.seconds = 0.0
        self.looped = 0
        self.next_batch = 0
        self._seen: set[int] = set()
        for path in sorted(folder.glob("shard-*.npz")):
            conversations, meta = read_shard(path)
            for conversation in conversations:
                self._remember(conversation)
            self.seconds += float(meta.get("seconds", 0.0))
        self._seek()

    def add_batch(
        self, batch: Iterable[Conversation], *, loop_share: float, seconds: float, vocab_size: int
    ) -> dict[str, int]:
        """Store what is new of a batch, as the next shard. Returns how many were stored and dropped, and why.

        At most `loop_share` of all stored conversations are ones that were cut because they repeated themselves.
        """
        counts = {"stored": 0, "duplicate": 0, "loop": 0, "tokens": 0}
        stored: list[Conversation] = []
        for conversation in batch:
            if conversation.looped and self.looped >= loop_share * (len(self.conversations) + 1):
                counts["loop"] += 1
            elif not self._remember(conversation):
                counts["duplicate"] += 1
            else:
                stored.append(conversation)
                counts["stored"] += 1
                counts["tokens"] += len(conversation.tokens)
        seconds = round(seconds, 3)
        meta = {"seconds": seconds, **counts}
        write_shard(self._path(self.next_batch), stored, meta, wide=vocab_size > 65536)
        self.seconds += seconds
        self._seek()
        return counts

    def _path(self, batch: int) -> Path:
        return self.folder / f"shard-{batch:06d}.npz"

    def _seek(self) -> None:
        while self._path(self.next_batch).exists():
            self.next_batch += 1

    def _remember(self, conversation: Conversation) -> bool:
        keys = {conversation.prompt_key(), conversation.answer_key()}
        if keys & self._seen:
            return False
        self._seen |= keys
        self.conversations.append(conversation)
        self.tokens += len(conversation.tokens)
        self.looped += conversation.looped
        return True

    def split(self, holdout: float) -> tuple[list[Conversation], list[Conversation]]:
        """(training, held out). A conversation's side hangs on its prompt alone, so it stays when data is added."""
        limit = int(holdout * 2**64)
        training: list[Conversation] = []
        held: list[Conversation] = []
        for conversation in self.conversations:
            (held if _scramble(conversation.prompt_key()) < limit else training).append(conversation)
        return training, held


def write_shard(path: Path, conversations: list[Conversation], meta: dict[str, Any], *, wide: bool) -> None:
    kind = np.uint32 if wide else np.uint16
    arrays = {
        "tokens": np.concatenate([np.zeros(0, kind), *(c.tokens.astype(kind) for c in conversations)]),
        "lengths": np.array([len(c.tokens) for c in conversations], np.int32),
        "spans": np.array([span for c in conversations for span in c.spans], np.int32).reshape(-1, 2),
        "span_counts": np.array([len(c.spans) for c in conversations], np.int32),
        "flags": np.array([c.flags for c in conversations], np.uint8),
        "meta": np.frombuffer(json.dumps(meta).encode(), np.uint8),
    }

    def write(part: Path) -> None:
        with part.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type, unused-ignore]

    write_atomic(path, write)


def read_shard(path: Path) -> tuple[list[Conversation], dict[str, Any]]:
    """The conversations of a shard and its meta. Raises CheckpointError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            names = ("tokens", "lengths", "spans", "span_counts", "flags", "meta")
            arrays = [file[name] for name in names]
        if not all(isinstance(array, np.ndarray) for array in arrays):
            raise ValueError("not all of its parts are arrays")  # but bytes, which NumPy gives where it knows no format
        return _conversations(*arrays[:-1]), json.loads(arrays[-1].tobytes())
    except _BROKEN as error:
        raise CheckpointError(
            f"{path} is damaged: {error}. Delete it; the same command writes it again where the budget allows."
        ) from error


def _conversations(
    tokens: np.ndarray, lengths: np.ndarray, spans: np.ndarray, span_counts: np.ndarray, flags: np.ndarray
) -> list[Conversation]:
    conversations = []
    at = span_at = 0
    for length, count, flag in zip(lengths.tolist(), span_counts.tolist(), flags.tolist(), strict=True):
        pairs = tuple((int(a), int(b)) for a, b in spans[span_at : span_at + count])
        conversations.append(Conversation(tokens[at : at + length], pairs, flag))
        at, span_at = at + length, span_at + count
    return conversations


def _hash(tokens: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(tokens.astype(np.uint32).tobytes(), digest_size=8).digest(), "little")


def _scramble(key: int) -> int:
    """Another hash of a hash, so that the held-out choice shares nothing with other uses of the key."""
    return int.from_bytes(hashlib.blake2b(key.to_bytes(8, "little"), digest_size=8, salt=b"holdout").digest(), "little")
