"""`dflash-mlx train`: data, training, measuring and export, each continued where an earlier run was stopped."""

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.errors import DFlashError
from dflash_mlx.runtime import backend, keep_few_graphs
from dflash_mlx.training.batches import usable
from dflash_mlx.training.checkpoint import TrainState, budget_share, fresh_state, load_state
from dflash_mlx.training.config import make_drafter
from dflash_mlx.training.data import batch_rows, data_finished, make_data, show
from dflash_mlx.training.estimate import Estimate, estimate
from dflash_mlx.training.evaluate import greedy_only
from dflash_mlx.training.finish import finish
from dflash_mlx.training.forward import feature_sizes
from dflash_mlx.training.loading import Loaded, load
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.probe import time_line
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.state import locked, remove_parts, require_same
from dflash_mlx.training.store import ConversationStore
from dflash_mlx.training.trainer import Trainer

# Conversations whose features are measured before a training.
_SIZED = 32


@dataclass(frozen=True)
class TrainResult:
    """How far a run came. `stage` is the one that is not finished ("data", "training", "measuring"), or "done".

    `facts` is what train.json holds, when done.
    """

    stage: str
    out: Path
    facts: dict[str, Any] | None = None


def run(options: TrainOptions, *, quiet: bool = False) -> TrainResult:
    """Do what is left of the three stages. Run again with the same options to continue. Raises DFlashError."""
    deadline = None if options.stop_after_minutes is None else time.monotonic() + 60 * options.stop_after_minutes
    keep_few_graphs()
    work = options.out / "work"
    others, begun = _other_files(options.out, work), work.exists()
    with locked(work):
        remove_parts(options.out)
        try:
            loaded = load(options, quiet=quiet)
        except DFlashError:
            if not begun:
                shutil.rmtree(work)
                with suppress(OSError):  # where there are other files, it stays
                    options.out.rmdir()
            raise
        drafter = make_drafter(loaded.target, loaded.tokenizer, loaded.frame, options)
        machine = backend()
        plan = estimate(
            loaded.target, drafter, options, memory_bytes=machine.memory_bytes, itemsize=int(loaded.compute_dtype.size)
        )
        rows = batch_rows(loaded.target, options, memory_bytes=machine.memory_bytes, kind=machine.kind)
        _require_same_options(work, loaded, options)
        store = ConversationStore(work / "data")
        state = load_state(work / "state.safetensors")
        if not quiet:
            with Progress("plan") as progress:
                if others:
                    progress.say(f"note: {options.out} holds other files ({others}); the drafter is put beside them")
                for line in plan.lines(machine.memory_bytes, options.out):
                    progress.say(line)
                progress.say(time_line(loaded, drafter, store, state, options, plan, rows=rows))

        if not data_finished(store, options) and not _data_stage(loaded, store, options, rows, deadline, quiet=quiet):
            return TrainResult("data", options.out)
        trainer = _training_stage(loaded, drafter, store, state, options, plan, deadline, quiet=quiet)
        if budget_share(options, trainer.state) < 1:
            return TrainResult("training", options.out)
        facts = finish(loaded, trainer, store, options, deadline, quiet=quiet)
        return TrainResult("done" if facts else "measuring", options.out, facts)


def _other_files(out: Path, work: Path) -> str:
    """What a folder holds that is not from training: a few names, or nothing."""
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() and not work.exists() else []
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _require_same_options(work: Path, loaded: Loaded, options: TrainOptions) -> None:
    """Refuse to continue what was made with other options. Options of what is not begun yet are free to change."""
    target = {"target": loaded.identity()}
    state = work / "state.safetensors"
    require_same(
        work / "data.json",
        target | options.data_identity(),
        what="data",
        begun=any((work / "data").glob("shard-*.npz")),
        remove=str(work),
    )
    require_same(
        work / "training.json",
        target | options.training_identity(),
        what="training",
        begun=state.exists(),
        remove=str(state),
    )


def show_data(options: TrainOptions, count: int) -> None:
    """Print stored conversations to stdout. Raises DFlashError when there are none."""
    store = ConversationStore(options.out / "work" / "data")
    if not store.conversations:
        raise DFlashError(f"no conversations in {options.out / 'work' / 'data'} yet; run the command without --show.")
    show(store, load(options).tokenizer, count, print)


def _data_stage(
    loaded: Loaded, store: ConversationStore, options: TrainOptions, rows: int, deadline: float | None, *, quiet: bool
) -> bool:
    with Progress("data", quiet=quiet) as progress:
        outcome = make_data(
            store,
            loaded.target,
            loaded.tokenizer,
            loaded.frame,
            options,
            rows=rows,
            deadline=deadline,
            progress=progress,
        )
        if not outcome.finished:
            progress.say("stopped while writing data; the same command continues")
    mx.clear_cache()
    return outcome.finished


def _training_stage(
    loaded: Loaded,
    drafter: DFlashDrafter,
    store: ConversationStore,
    state: TrainState | None,
    options: TrainOptions,
    plan: Estimate,
    deadline: float | None,
    *,
    quiet: bool,
) -> Trainer:
    training, held = store.split(options.holdout)
    training = [c for c in training if usable(c, options.max_length)]
    if not training:
        raise DFlashError(
            f"{len(store.conversations)} conversations leave none to train on; raise --data-minutes or --data-tokens."
        )
    if state is None:
        mx.random.seed(options.seed)
        new = make_drafter(loaded.target, loaded.tokenizer, loaded.frame, options)
        texts = (mx.array(c.tokens[None, : options.max_length].astype("int32")) for c in training[:_SIZED])
        sizes = feature_sizes(loaded.target, texts, new.config.target_layer_ids)
        state = fresh_state(new, options, feature_sizes=sizes)
    trainer = Trainer(
        target=loaded.target,
        drafter=drafter,
        options=options,
        state=state,
        state_path=options.out / "work" / "state.safetensors",
        compute_dtype=loaded.compute_dtype,
        micro_batch=plan.micro_batch,
        chunk=plan.chunk,
    )
    if budget_share(options, state) < 1:
        with Progress("training", quiet=quiet) as progress:
            mx.reset_peak_memory()
            held = greedy_only(held, options.eval_conversations, options.max_length)
            if not trainer.run(training, held, deadline=deadline, progress=progress):
                progress.say(f"stopped at step {state.step:,}; the same command continues")
            progress.say(f"peak memory of the training: {mx.get_peak_memory() / 1e9:.1f} GB")
    return trainer
