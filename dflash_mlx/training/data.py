"""Stage 1: conversations in the target's own words, until the budget of minutes or tokens is spent."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from dflash_mlx.errors import DFlashError
from dflash_mlx.targets.target import Target
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.sources import (
    encode_conversation,
    encode_prompts,
    read_conversations,
    read_prompts,
    read_topics,
)
from dflash_mlx.training.store import Conversation, ConversationStore
from dflash_mlx.training.template import ChatFrame, encode_text
from dflash_mlx.training.writer import Limits, Plan, write_batch

# After this many batches in a row that brought nothing new the target has nothing more to say.
_MOST_EMPTY_BATCHES = 3
# Sampled answers are drawn at a temperature from this range.
_SAMPLED_HEAT = (0.7, 1.0)


class PlanSource(Protocol):
    """Says what the rows of batch number `index` start with; None when there is nothing left to say."""

    def __call__(self, index: int, rng: np.random.Generator) -> Plan | None: ...


@dataclass
class Outcome:
    """Why the data stage returned: `finished`, or stopped by the deadline and to be continued."""

    finished: bool


def make_data(
    store: ConversationStore,
    target: Target,
    tokenizer: Any,
    frame: ChatFrame,
    options: TrainOptions,
    *,
    rows: int,
    deadline: float | None,
    progress: Progress,
) -> Outcome:
    """Fill the store. `deadline` is a time.monotonic() after which no further batch is begun."""
    if options.conversations is not None:
        _take_conversations(store, target, tokenizer, frame, options)
        return Outcome(finished=True)
    source = plan_source(tokenizer, frame, options, rows=rows)
    limits = Limits(options.max_length, options.max_user_tokens, options.turns)
    minutes, tokens = options.data_budget
    empty = 0
    while not data_finished(store, options):
        if deadline is not None and time.monotonic() >= deadline:
            return Outcome(finished=False)
        started = time.monotonic()
        seed = _batch_seed(options.seed, store.next_batch)
        plan = source(store.next_batch, np.random.default_rng(seed))
        if plan is None:
            break
        batch = write_batch(target, frame, plan, limits, seed=seed)
        counts = store.add_batch(
            batch,
            loop_share=options.loop_share,
            seconds=time.monotonic() - started,
            vocab_size=target.vocab_size,
        )
        mx.clear_cache()
        empty = 0 if counts["stored"] else empty + 1
        if empty == _MOST_EMPTY_BATCHES:
            raise DFlashError(
                f"{empty} batches in a row brought no new conversation (of the last one {counts['duplicate']} were "
                f"known and {counts['loop']} repeated themselves). Give prompts with --prompts, or raise --loop-share."
            )
        share = data_share(store, minutes, tokens)
        rate = store.tokens / max(store.seconds, 1e-9)
        progress.update(
            share,
            f"{len(store.conversations):,} conversations, {store.tokens:,} tokens, {rate:,.0f} tokens/s",
        )
    return Outcome(finished=True)


def data_share(store: ConversationStore, minutes: float | None, tokens: int | None) -> float:
    """How much of the budget is spent, 0 to 1."""
    by_time = store.seconds / 60 / minutes if minutes else 0.0
    by_tokens = store.tokens / tokens if tokens else 0.0
    return min(1.0, max(by_time, by_tokens))


def data_finished(store: ConversationStore, options: TrainOptions) -> bool:
    return data_share(store, *options.data_budget) >= 1


def plan_source(tokenizer: Any, frame: ChatFrame, options: TrainOptions, *, rows: int) -> PlanSource:
    """The default (the target invents the user too), topics that begin a share of them, or a file of prompts."""
    if options.prompts is not None:
        longest = options.max_length - 16
        scripts = encode_prompts(read_prompts(options.prompts), tokenizer, thinking=options.thinking, longest=longest)
        if not scripts:
            raise DFlashError(f"every prompt in {options.prompts} is longer than {longest} tokens; raise --max-length.")
        return _from_prompts(scripts, options, rows=rows)
    free = list(frame.prefix)
    openings = [free]
    if options.topics is not None:
        openings = [[*free, *encode_text(tokenizer, topic)] for topic in read_topics(options.topics)]
        openings = [opening for opening in openings if len(opening) <= options.max_length // 2] or [free]

    def plan(index: int, rng: np.random.Generator) -> Plan:
        del index
        chosen = rng.integers(0, len(openings), rows)
        temperatures = _temperatures(rows, options.greedy_share, rng)
        begun = rng.random(rows) < options.topics_share
        starts = [openings[i] if given else free for i, given in zip(chosen, begun, strict=True)]
        return Plan(starts, True, temperatures)

    return plan


def _from_prompts(scripts: list[list[int]], options: TrainOptions, *, rows: int) -> PlanSource:
    """Each prompt once, in batches of similar length; every pass over the file has its own order and draws."""
    by_length = sorted(range(len(scripts)), key=lambda i: len(scripts[i]))
    groups = [by_length[at : at + rows] for at in range(0, len(by_length), rows)]

    def plan(index: int, rng: np.random.Generator) -> Plan | None:
        # A greedy answer to the same prompt is the same answer: one pass is all there is.
        if index >= len(groups):
            return None
        order = np.random.default_rng(options.seed).permutation(len(groups))
        group = groups[order[index]]
        return Plan([scripts[i] for i in group], False, _temperatures(len(group), options.greedy_share, rng))

    return plan


def _temperatures(rows: int, greedy_share: float, rng: np.random.Generator) -> np.ndarray:
    """Of a batch's answers: 0 (greedy) for the given share of rows, the others sampled."""
    sampled = np.round(rng.uniform(*_SAMPLED_HEAT, rows), 2)
    return np.where(rng.permutation(rows) < round(greedy_share * rows), 0.0, sampled)


def _take_conversations(
    store: ConversationStore, target: Target, tokenizer: Any, frame: ChatFrame, options: TrainOptions
) -> None:
    """Finished conversations from a file, in one shard."""
    if store.next_batch:
        return
    assert options.conversations is not None
    chats = read_conversations(options.conversations)
    encoded = (
        encode_conversation(chat, tokenizer, frame, thinking=options.thinking, max_length=options.max_length)
        for chat in chats
    )
    counts = store.add_batch(
        [conversation for conversation in encoded if conversation is not None],
        loop_share=1.0,
        seconds=0.0,
        vocab_size=target.vocab_size,
    )
    if not counts["stored"]:
        raise DFlashError(f"no conversation in {options.conversations} could be read through the chat template.")


def batch_rows(target: Target, options: TrainOptions, *, memory_bytes: int, kind: str) -> int:
    """Rows that the target writes at once: as many as fit 40% of the memory, and no more than pay off.

    Raises DFlashError where not even one fits, or not as many as `options.data_batch` asks for.
    """
    cache = target.make_cache()
    mx.eval(target.forward(mx.array([[0]]), cache)[:, -1])
    held = sum(int(getattr(c, "nbytes", 0)) for c in cache)
    # Plain caches grow in blocks of 256 positions, so this is what 256 positions take.
    row = held / 256 * options.max_length * 1.5 + target.vocab_size * 16
    fitting = int(0.4 * memory_bytes / row)
    wanted = options.data_batch or 1
    if fitting < wanted:
        raise DFlashError(
            f"writing {wanted} conversations at once takes about {wanted * row / 1e9:.1f} GB of memory and "
            f"{0.4 * memory_bytes / 1e9:.1f} GB can be used for it here. Lower --data-batch or --max-length."
        )
    return options.data_batch or min({"cuda": 2048, "metal": 256}.get(kind, 32), fitting)


def show(store: ConversationStore, tokenizer: Any, count: int, write: Callable[[str], None]) -> None:
    """Write `count` conversations, evenly spread, as text with their answers marked."""
    total = len(store.conversations)
    for i in _spread(total, count):
        conversation = store.conversations[i]
        write(f"--- conversation {i + 1} of {total}: {_describe(conversation)}")
        at = 0
        for start, end in conversation.spans:
            write(tokenizer.decode(conversation.tokens[at:start].tolist()) + ">>>")
            write(tokenizer.decode(conversation.tokens[start:end].tolist()) + "<<<")
            at = end


def _describe(conversation: Conversation) -> str:
    answered = sum(end - start for start, end in conversation.spans)
    words = [f"{len(conversation.tokens)} tokens, {answered} answered", "greedy" if conversation.greedy else "sampled"]
    if conversation.looped:
        words.append("cut at a loop")
    return ", ".join(words)


def _spread(total: int, count: int) -> Iterator[int]:
    for i in range(min(total, count)):
        yield i * total // min(total, count)


def _batch_seed(seed: int, batch: int) -> int:
    return int(np.random.SeedSequence([seed, batch]).generate_state(1)[0])


__all__ = ["batch_rows", "data_finished", "data_share", "make_data", "plan_source", "show"]
