"""How long what is left will take: from what was measured before, else from a short probe of this machine."""

import time

import mlx.core as mx
import numpy as np

from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.training.batches import Blocks, make_batch
from dflash_mlx.training.checkpoint import TrainState, budget_share
from dflash_mlx.training.data import data_finished
from dflash_mlx.training.estimate import Estimate
from dflash_mlx.training.loading import Loaded
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.store import Conversation, ConversationStore
from dflash_mlx.training.trainer import make_step
from dflash_mlx.training.writer import Limits, Plan, write_batch


def time_line(
    loaded: Loaded,
    drafter: DFlashDrafter,
    store: ConversationStore,
    state: TrainState | None,
    options: TrainOptions,
    plan: Estimate,
    *,
    rows: int,
) -> str:
    """A line that says what each unfinished stage will take. Budgets in minutes are taken at their word."""
    parts = []
    if options.conversations is not None:
        parts.append(f"data read from {options.conversations.name}")
    elif not data_finished(store, options):
        parts.append(f"data about {_words(data_minutes(loaded, store, options, rows=rows))}")
    if state is None or budget_share(options, state) < 1:
        parts.append(f"training about {_words(training_minutes(loaded, drafter, state, options, plan))}")
    if options.measure:
        parts.append(f"then measuring {options.measure} answers")
    return f"time: {', '.join(parts) or 'the export only'}"


def data_minutes(loaded: Loaded, store: ConversationStore, options: TrainOptions, *, rows: int) -> float:
    """Minutes that the rest of the data budget will take, if the target has that much to say."""
    minutes, tokens = options.data_budget
    left = []
    if minutes is not None:
        left.append(minutes - store.seconds / 60)
    if tokens is not None:
        rate = store.tokens / store.seconds if store.seconds else _writing_rate(loaded, options, rows=rows)
        left.append((tokens - store.tokens) / rate / 60)
    return max(0.0, min(left))


def training_minutes(
    loaded: Loaded, drafter: DFlashDrafter, state: TrainState | None, options: TrainOptions, plan: Estimate
) -> float:
    """Minutes that the rest of the training budget will take."""
    minutes, steps = options.training_budget
    done, spent = (state.step, state.seconds) if state else (0, 0.0)
    left = []
    if minutes is not None:
        left.append(minutes - spent / 60)
    if steps is not None:
        seconds = spent / done if done else _step_seconds(loaded, drafter, options, plan)
        left.append((steps - done) * seconds / 60)
    return max(0.0, min(left))


def _writing_rate(loaded: Loaded, options: TrainOptions, *, rows: int) -> float:
    """Tokens a second that the target writes in batches."""
    probe = 64 if _compiles() else 16
    start = len(loaded.frame.prefix)
    limits = Limits(min(options.max_length, start + probe), probe, 1)
    plan = Plan([list(loaded.frame.prefix)] * rows, True, np.ones(rows))
    seconds = 0.0
    for seed in (1, 2)[: 1 + _compiles()]:
        started = time.monotonic()
        write_batch(loaded.target, loaded.frame, plan, limits, seed=seed)
        seconds = time.monotonic() - started
    mx.clear_cache()
    return rows * (limits.max_length - start) / seconds


def _step_seconds(loaded: Loaded, drafter: DFlashDrafter, options: TrainOptions, plan: Estimate) -> float:
    """Seconds of a training step on conversations of full length: on a GPU from a whole part, else from one row."""
    gradients, _ = make_step(loaded.target, drafter, options, compute_dtype=loaded.compute_dtype, chunk=plan.chunk)
    rows = plan.micro_batch if _compiles() else 1
    rng = np.random.default_rng(0)
    length = options.max_length
    conversations = [
        Conversation(rng.integers(0, loaded.target.vocab_size, length).astype(np.int32), ((length // 8, length),))
        for _ in range(rows)
    ]
    blocks = Blocks(options.anchors, drafter.config.block_size, options.small_blocks)
    arrays = make_batch(conversations, blocks, rng, longest=length).arrays()
    parameters = drafter.parameters()
    seconds = 0.0
    for _ in range(1 + _compiles()):
        started = time.monotonic()
        mx.eval(gradients(parameters, *arrays))
        seconds = time.monotonic() - started
    # Tracing leaves the drafter with placeholders.
    drafter.update(parameters)
    mx.clear_cache()
    return seconds * options.batch_size / rows


def _compiles() -> bool:
    """Whether the first run of anything compiles it, so that only a second one tells its time."""
    return bool(mx.default_device() == mx.gpu)


def _words(minutes: float) -> str:
    if minutes < 1.5:
        return "a minute"
    return f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"
