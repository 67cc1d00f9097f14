"""Batches of conversations with random anchors, prepared on the host while the device works."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from dflash_mlx.training.store import Conversation

# Sequence lengths are rounded up to a multiple of this, so that there are few shapes.
LENGTH_STEP = 64
_AHEAD = 4


@dataclass(frozen=True)
class Batch:
    """tokens: (B, T) int32, padded with 0. anchors, ends, sizes: (B, A) int32, where each block begins, where its
    labels end at the latest, and how many rows it has. An end of 0 marks an unused anchor.
    """

    tokens: np.ndarray
    anchors: np.ndarray
    ends: np.ndarray
    sizes: np.ndarray

    def arrays(self) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """The four of them, on the device."""
        return mx.array(self.tokens), mx.array(self.anchors), mx.array(self.ends), mx.array(self.sizes)


@dataclass(frozen=True)
class Place:
    """Where in the data the training is: the next batch to take."""

    epoch: int = 0
    index: int = 0


def usable(conversation: Conversation, length: int) -> bool:
    """Whether there is an anchor with a label after it within the first `length` tokens."""
    return any(min(end, length) - start >= 2 for start, end in conversation.spans)


def epoch_order(lengths: np.ndarray, batch_size: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Indices of each batch of an epoch: rows of similar length together, batches in random order.

    What is left over at the end is left out; another epoch leaves out others. Too few conversations for one batch are
    repeated.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    if len(order) < batch_size:
        return [np.resize(order, batch_size)]
    first = rng.integers(0, len(order) % batch_size + 1)
    order = order[np.argsort(lengths[order] // LENGTH_STEP, kind="stable")]
    count = len(order) // batch_size
    order = order[first : first + count * batch_size].reshape(count, batch_size)
    return list(order[rng.permutation(count)])


@dataclass(frozen=True)
class Blocks:
    """Which blocks are drawn of each conversation: `count` of `size` rows, a `small_share` of them of fewer rows.

    Rounds with few drafts take small blocks, in which a drafter that has only seen whole ones drafts worse.
    """

    count: int
    size: int
    small_share: float = 0.0

    def sizes(self, rng: np.random.Generator) -> np.ndarray:
        """(count,), of one conversation: `size`, or any number from 2 to below it."""
        if self.size == 2:
            return np.full(self.count, 2, np.int32)
        small = rng.random(self.count) < self.small_share
        return np.where(small, rng.integers(2, self.size, self.count), self.size).astype(np.int32)


def make_batch(conversations: list[Conversation], blocks: Blocks, rng: np.random.Generator, *, longest: int) -> Batch:
    """A batch with up to `blocks.count` different random anchors a row; rows are cut at `longest` tokens.

    What is random is drawn row after row, so that a batch in parts is the same.
    """
    length = padded_length(min(longest, max(len(c.tokens) for c in conversations)), longest)
    tokens = np.zeros((len(conversations), length), np.int32)
    starts = np.zeros((len(conversations), blocks.count), np.int32)
    ends = np.zeros_like(starts)
    sizes = np.zeros_like(starts)
    for row, conversation in enumerate(conversations):
        cut = conversation.tokens[:length]
        tokens[row, : len(cut)] = cut
        positions, limits = candidates(conversation, len(cut))
        chosen = rng.permutation(len(positions))[: blocks.count]
        starts[row, : len(chosen)], ends[row, : len(chosen)] = positions[chosen], limits[chosen]
        sizes[row] = blocks.sizes(rng)
    return Batch(tokens, starts, np.minimum(ends, starts + sizes), sizes)


def candidates(conversation: Conversation, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions that can be anchors (they and the token after them are in one answer), and where that answer ends."""
    spans = [(start, min(end, length)) for start, end in conversation.spans]
    spans = [(start, end) for start, end in spans if end - start >= 2]
    if not spans:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    positions = np.concatenate([np.arange(start, end - 1) for start, end in spans])
    return positions, np.concatenate([np.full(end - 1 - start, end) for start, end in spans])


def padded_length(length: int, longest: int) -> int:
    return min(-(-length // LENGTH_STEP) * LENGTH_STEP, max(longest, length))


def training_batches(
    conversations: list[Conversation],
    place: Place,
    *,
    batch_size: int,
    micro_batch: int,
    blocks: Blocks,
    longest: int,
    seed: int,
) -> Iterator[tuple[Place, list[Batch]]]:
    """From `place` on, for ever: the place after a batch, and the batch in parts of `micro_batch` rows.

    What a batch holds hangs on seed, epoch and index alone, so that a resumed run sees the same.
    """
    lengths = np.array([len(c.tokens) for c in conversations])
    epoch, index = place.epoch, place.index
    while True:
        order = epoch_order(lengths, batch_size, seed=seed, epoch=epoch)
        while index < len(order):
            rng = np.random.default_rng([seed, epoch, index])
            rows = sorted(order[index].tolist(), key=lambda i: int(lengths[i]))
            index += 1
            parts = [rows[at : at + micro_batch] for at in range(0, len(rows), micro_batch)]
            batches = [make_batch([conversations[i] for i in part], blocks, rng, longest=longest) for part in parts]
            yield Place(epoch, index), batches
        epoch, index = epoch + 1, 0


class Prefetch:
    """An iterator whose items a thread prepares ahead. Close it (or use `with`) to end the thread."""

    def __init__(self, source: Iterator[tuple[Place, list[Batch]]]) -> None:
        self._queue: queue.Queue[tuple[Place, list[Batch]] | BaseException] = queue.Queue(_AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(source,), daemon=True)
        self._thread.start()

    def _fill(self, source: Iterator[tuple[Place, list[Batch]]]) -> None:
        try:
            for item in source:
                if not self._put(item):
                    return
        except BaseException as error:
            self._put(error)

    def _put(self, item: tuple[Place, list[Batch]] | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def __iter__(self) -> Iterator[tuple[Place, list[Batch]]]:
        while True:
            item = self._queue.get()
            if isinstance(item, BaseException):
                raise item
            yield item
