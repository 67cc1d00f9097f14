"""The target writes conversations: many rows at once, all at the same position, each in its own part of the chat.

Every row starts at position 0 and all rows step together, so that one plain cache with a batch dimension serves and no
padding or mask is needed, whatever lengths the openings have: what a row must say (an opening, the template's fixed
parts) is forced token by token while other rows choose. Rows that are done leave the batch from time to time.

`decoding.engine` is not used: it looks at every answer after every round, which with a thousand of them takes the host
longer than a GPU takes for the round.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from dflash_mlx.targets.target import Target
from dflash_mlx.training.store import CUT, GREEDY, LOOPED, Conversation
from dflash_mlx.training.template import ChatFrame

# Where a row is: saying what it must, in a user turn, in an answer, ...
SCRIPT, USER, OPENING, ANSWER, NEXT_USER, DONE = range(6)
# The host looks at the rows every this many steps: to collect tokens, end loops and shrink the batch.
CHECK_EVERY = 32
# The batch shrinks when no more than this share of its rows is still writing.
SHRINK_AT = 0.8
# An answer that repeats a period of at most 32 tokens over the last 96 is ended.
LOOP_WINDOW, LOOP_PERIOD = 96, 32
_PREFILL_CHUNK = 128


@dataclass(frozen=True)
class Plan:
    """What the rows of a batch start with.

    scripts: forced openings, each of at least one token; user_follows: whether a row's user turn goes on after its
    script (else its answer begins); temperatures: (B,) of the answers, 0 is greedy.
    """

    scripts: list[list[int]]
    user_follows: bool
    temperatures: np.ndarray


@dataclass(frozen=True)
class Limits:
    max_length: int
    max_user_tokens: int
    turns: int


def write_batch(target: Target, frame: ChatFrame, plan: Plan, limits: Limits, *, seed: int) -> list[Conversation]:
    """Let the target write a conversation a row; those without a full first answer token are left out.

    The same arguments give the same conversations, but for rounding.
    """
    tokens, states, flags = _run(target, frame, plan, limits, seed)
    found = []
    for row in range(len(plan.scripts)):
        conversation = _conversation(tokens[row], states[row], int(flags[row]), frame)
        if conversation is not None:
            found.append(conversation)
    return found


def _run(
    target: Target, frame: ChatFrame, plan: Plan, limits: Limits, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids (B, max_length), the part each belongs to (same shape; DONE after the end) and flags (B,)."""
    rows = len(plan.scripts)
    longest = max(len(script) for script in plan.scripts)
    common = min(min(len(script) for script in plan.scripts), limits.max_length - 1)
    table = np.zeros((rows, max(longest, limits.max_length)), np.int32)
    for row, script in enumerate(plan.scripts):
        table[row, : len(script)] = script
    tokens = np.zeros((rows, limits.max_length), np.int32)
    states = np.full((rows, limits.max_length), DONE, np.int8)
    flags = np.where(plan.temperatures == 0, GREEDY, 0)
    tokens[:, :common], states[:, :common] = table[:, :common], SCRIPT

    batch = _Rows(target, frame, plan, limits, table)
    batch.prefill(common)
    alive: np.ndarray = np.arange(rows)
    for at in range(common, limits.max_length, CHECK_EVERY):
        upto = min(at + CHECK_EVERY, limits.max_length)
        chosen, parts = batch.advance(at, upto, seed)
        tokens[alive, at:upto], states[alive, at:upto] = chosen, parts
        finished = parts[:, -1] == DONE
        if upto >= LOOP_WINDOW:
            window = slice(upto - LOOP_WINDOW, upto)
            looping = (states[alive, window] == ANSWER).all(axis=1) & repeats(tokens[alive, window])
            flags[alive[looping & ~finished]] |= LOOPED
            finished |= looping
        if finished.all():
            break
        left = np.flatnonzero(~finished)
        if len(left) <= SHRINK_AT * len(alive) and batch.select(left):
            alive = alive[left]
        elif finished.any():
            batch.finish(finished)
    ended = (states[:, -1] == DONE) | np.isin(tokens[:, -1], list(frame.eos_ids))
    open_ended = ~ended & (flags & LOOPED == 0)
    return tokens, states, np.where(open_ended, flags | CUT, flags)


class _Rows:
    """The rows still in the batch: the target's cache and each row's place, on the device."""

    def __init__(self, target: Target, frame: ChatFrame, plan: Plan, limits: Limits, table: np.ndarray) -> None:
        self.target, self.table = target, table
        self.cache = target.make_cache()
        count = len(plan.scripts)
        self.fixed = {
            "script_length": mx.array([len(script) for script in plan.scripts], dtype=mx.int32),
            "temperature": mx.array(plan.temperatures.astype(np.float32)),
        }
        zeros = mx.zeros((count,), dtype=mx.int32)
        # part; tokens so far in that part; answers finished.
        self.place: tuple[mx.array, ...] = (zeros + SCRIPT, zeros, zeros)
        self.after_script = USER if plan.user_follows else ANSWER
        self.choose = partial(_choose, frame=frame, limits=limits, after_script=self.after_script)
        self.last: mx.array | None = None

    def prefill(self, count: int) -> None:
        """Feed the first `count` tokens, which all rows are forced to say."""
        fed = mx.array(self.table[:, :count])
        for at in range(0, count - 1, _PREFILL_CHUNK):
            self.target.forward(fed[:, at : min(at + _PREFILL_CHUNK, count - 1)], self.cache)
            mx.eval([c.state for c in self.cache])
        self.last = fed[:, count - 1]
        # A place is that of the token to come: some rows' scripts may be over already.
        over = self.fixed["script_length"] <= count
        self.place = (mx.where(over, self.after_script, SCRIPT), *self.place[1:])

    def advance(self, start: int, stop: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose the tokens at positions start to stop - 1. Returns ids and parts, (B, stop - start)."""
        steps = []
        for position in range(start, stop):
            assert self.last is not None
            logits = self.target.forward(self.last[:, None], self.cache)[:, -1]
            key = mx.array([seed & 0xFFFFFFFF, position], dtype=mx.uint32)
            forced = mx.array(self.table[:, position])
            packed, self.last, *place = self.choose(
                logits, key, mx.array(position), forced, *self.place, *self.fixed.values()
            )
            self.place = tuple(place)
            steps.append(packed)
            mx.async_eval(packed)
        together = np.array(mx.stack(steps, axis=1))
        return together & 0xFFFFFF, together >> 24

    def finish(self, rows: np.ndarray) -> None:
        """Let `rows` (B,) bool write no more."""
        self.place = (mx.where(mx.array(rows), DONE, self.place[0]), *self.place[1:])

    def select(self, rows: np.ndarray) -> bool:
        """Keep only `rows` (indices). False if the cache is of a kind that cannot be cut."""
        index = mx.array(rows)
        if not all(_select_cache(layer_cache, index, check=True) for layer_cache in self.cache):
            return False
        for layer_cache in self.cache:
            _select_cache(layer_cache, index, check=False)
        self.place = tuple(x[index] for x in self.place)
        self.fixed = {name: x[index] for name, x in self.fixed.items()}
        self.last = self.last[index] if self.last is not None else None
        self.table = self.table[rows]
        mx.eval([c.state for c in self.cache], self.place, self.fixed, self.last)
        return True


def _choose(
    logits: mx.array,
    key: mx.array,
    position: mx.array,
    forced: mx.array,
    part: mx.array,
    count: mx.array,
    turn: mx.array,
    script_length: mx.array,
    temperature: mx.array,
    *,
    frame: ChatFrame,
    limits: Limits,
    after_script: int,
) -> tuple[mx.array, ...]:
    """One step of every row: the token at `position`, and where the row stands after it.

    logits (B, V), everything else (B,) but the key and the position. Returns the token packed with its part
    (token | part << 24), the token, and the new part, count and turn.
    """
    heat = mx.where(part == USER, 1.0, mx.maximum(temperature, 1e-3))
    scores = logits.astype(mx.float32) / heat[:, None]
    drawn = mx.random.categorical(scores, key=key).astype(mx.int32)
    best = mx.argmax(logits, axis=-1).astype(mx.int32)
    token = mx.where((part == ANSWER) & (temperature == 0), best, drawn)

    if frame.answer_opening:
        # The user turn ends where the model ends it, or at the limit: from here on the template speaks.
        ends = _is_one_of(token, {frame.answer_opening[0], *frame.eos_ids})
        over = (part == USER) & (ends | (count >= limits.max_user_tokens))
        part, count = mx.where(over, OPENING, part), mx.where(over, 0, count)
        token = mx.where(part == OPENING, _look_up(frame.answer_opening, count), token)
    if frame.user_opening:
        token = mx.where(part == NEXT_USER, _look_up(frame.user_opening, count), token)
    token = mx.where(part == SCRIPT, forced, token)
    packed = token | (part << 24)

    count = count + 1
    turn = turn + ((part == ANSWER) & _is_one_of(token, frame.eos_ids))
    after = part
    after = mx.where((part == SCRIPT) & (position + 1 >= script_length), after_script, after)
    if frame.answer_opening:
        after = mx.where((part == OPENING) & (count >= len(frame.answer_opening)), ANSWER, after)
    else:
        after = mx.where((part == USER) & (count >= limits.max_user_tokens), ANSWER, after)
        after = mx.where((part == USER) & _is_one_of(token, frame.eos_ids), DONE, after)
    if frame.user_opening:
        after = mx.where((part == NEXT_USER) & (count >= len(frame.user_opening)), USER, after)
    ended = (part == ANSWER) & _is_one_of(token, frame.eos_ids)
    onwards = NEXT_USER if frame.user_opening else DONE
    after = mx.where(ended, mx.where(turn < limits.turns, onwards, DONE), after)
    return packed, token, after, mx.where(after != part, 0, count), turn


def _is_one_of(token: mx.array, ids: Any) -> mx.array:
    result = mx.zeros(token.shape, dtype=mx.bool_)
    for i in sorted(ids):
        result = result | (token == i)
    return result


def _look_up(table: tuple[int, ...], index: mx.array) -> mx.array:
    return mx.array(table, dtype=mx.int32)[mx.clip(index, 0, len(table) - 1)]


def _select_cache(layer_cache: Any, rows: mx.array, *, check: bool) -> bool:
    """Cut one layer's cache to `rows`; with `check` only say whether that is possible."""
    if isinstance(getattr(layer_cache, "caches", None), (list, tuple)):
        return all(_select_cache(child, rows, check=check) for child in layer_cache.caches)
    if hasattr(layer_cache, "keys") and hasattr(layer_cache, "values"):
        if not check:
            layer_cache.keys, layer_cache.values = tree_map(lambda x: x[rows], (layer_cache.keys, layer_cache.values))
        return True
    if hasattr(layer_cache, "filter"):
        if not check:
            layer_cache.filter(rows)
        return True
    return False


def repeats(window: np.ndarray) -> np.ndarray:
    """Rows of (B, W) token ids that are one period of at most LOOP_PERIOD tokens over and over, (B,) bool."""
    found = np.zeros(len(window), bool)
    for period in range(1, LOOP_PERIOD + 1):
        found |= (window[:, period:] == window[:, :-period]).all(axis=1)
    return found


def _conversation(tokens: np.ndarray, states: np.ndarray, flags: int, frame: ChatFrame) -> Conversation | None:
    """A row as a conversation, ending with its last answer; None for one that is not worth keeping.

    Dropped: rows without an answer, and those whose user turn holds a special token, which no user writes.
    """
    user = tokens[states == USER]
    if len(np.intersect1d(user, list(frame.special_ids | frame.eos_ids))):
        return None
    if (states == USER).sum() == 0 and (states == OPENING).any():
        return None
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (states == ANSWER).astype(np.int8), [0]])))
    spans = tuple((int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))
    if not spans:
        return None
    return Conversation(tokens[: spans[-1][1]].copy(), spans, flags)


__all__ = ["CUT", "GREEDY", "LOOPED", "Limits", "Plan", "repeats", "write_batch"]
