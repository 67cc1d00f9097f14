"""`dflash-mlx train`: data, training, measuring and export, each continued where an earlier run was stopped."""

import json
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import dequantize_model

import dflash_mlx
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.errors import DFlashError
from dflash_mlx.hub.download import ensure_model
from dflash_mlx.hub.registry import find_pair, parse_source
from dflash_mlx.pair import load_pair
from dflash_mlx.runtime import backend
from dflash_mlx.targets.target import Target, wrap_model
from dflash_mlx.training.batches import usable
from dflash_mlx.training.checkpoint import budget_share, fresh_state, load_state
from dflash_mlx.training.config import make_drafter
from dflash_mlx.training.data import batch_rows, data_finished, make_data, show
from dflash_mlx.training.estimate import Estimate, estimate
from dflash_mlx.training.evaluate import greedy_only
from dflash_mlx.training.export import export_drafter, push, write_report
from dflash_mlx.training.measure import load_exported, measure_pair
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.state import locked, require_same
from dflash_mlx.training.store import ConversationStore
from dflash_mlx.training.template import ChatFrame, chat_frame
from dflash_mlx.training.trainer import Trainer
from dflash_mlx.training.trees import count_bytes, count_parameters

# A quantized target is expanded when it then takes no more than this share of the memory.
_EXPANDED_SHARE = 0.25


@dataclass(frozen=True)
class TrainResult:
    """How far a run came. `stage` is "data", "training" or "done"; `facts` is what train.json holds, when done."""

    stage: str
    out: Path
    facts: dict[str, Any] | None = None


@dataclass
class Loaded:
    """The target and what a training needs to know of it. `name` is what the user called it."""

    name: str
    folder: Path
    target: Target
    tokenizer: TokenizerWrapper
    frame: ChatFrame
    dtype: mx.Dtype


def run(options: TrainOptions, *, quiet: bool = False) -> TrainResult:
    """Do what is left of the three stages. Run again with the same options to continue. Raises DFlashError."""
    deadline = None if options.stop_after_minutes is None else time.monotonic() + 60 * options.stop_after_minutes
    work = options.out / "work"
    with locked(work):
        loaded = load(options)
        identity = {"target": target_identity(loaded)}
        require_same(work / "data.json", identity | options.data_identity(), what="data", remove=work)
        require_same(
            work / "training.json",
            identity | options.training_identity(),
            what="training",
            remove=work / "training.json and state.safetensors",
        )
        drafter = make_drafter(loaded.target, loaded.tokenizer, loaded.frame, options)
        machine = backend()
        plan = estimate(
            loaded.target, drafter, options, memory_bytes=machine.memory_bytes, itemsize=_itemsize(loaded.dtype)
        )
        with Progress("plan", quiet=quiet) as progress:
            for line in plan.lines(machine.memory_bytes, options.out):
                progress.say(line)

        store = ConversationStore(work / "data")
        if not data_finished(store, options) and not _data_stage(loaded, store, options, deadline, quiet=quiet):
            return TrainResult("data", options.out)
        trainer = _training_stage(loaded, drafter, store, options, plan, deadline, quiet=quiet)
        if budget_share(options, trainer.state) < 1:
            return TrainResult("training", options.out)
        facts = _export_stage(loaded, trainer, store, options, deadline, quiet=quiet)
        return TrainResult("done", options.out, facts)


def show_data(options: TrainOptions, count: int) -> None:
    """Print stored conversations to stdout. Raises DFlashError when there are none."""
    store = ConversationStore(options.out / "work" / "data")
    if not store.conversations:
        raise DFlashError(f"no conversations in {options.out / 'work' / 'data'} yet; run the command without --show.")
    show(store, load(options).tokenizer, count, print)


def load(options: TrainOptions) -> Loaded:
    """Load the target, downloaded first where needed."""
    if options.pair is not None:
        source = find_pair(options.pair).target
    else:
        assert options.model is not None
        source = parse_source(options.model)
    with Progress("load") as progress:
        folder = ensure_model(source, report=lambda message, fraction: progress.update(fraction or 0.0, message))
    pair = load_pair(model=str(folder), draft=False, dtype=options.dtype)
    frame = chat_frame(pair.tokenizer, thinking=options.thinking)
    name = folder.name if source.kind == "folder" else str(source)
    return Loaded(name, folder, _fast_target(pair.target, pair.dtype), pair.tokenizer, frame, pair.dtype)


def _fast_target(target: Target, dtype: mx.Dtype) -> Target:
    """On CUDA a quantized target expanded, if there is room: for many rows quantized products are slow there."""
    machine = backend()
    quantized = target.config.get("quantization") or target.config.get("quantization_config")
    if machine.kind != "cuda" or not quantized:
        return target
    weights = count_bytes(target.model.parameters())
    if weights * 16 / int(quantized.get("bits", 4)) > _EXPANDED_SHARE * machine.memory_bytes:
        return target
    model = dequantize_model(target.model)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return wrap_model(model, target.config)


def target_identity(loaded: Loaded) -> dict[str, Any]:
    """What tells one target from another: its config, not where it lies."""
    keys = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", "rope_theta")
    found = {key: loaded.target.text_config(key) for key in keys}
    found["quantization"] = loaded.target.config.get("quantization")
    return found


def _data_stage(
    loaded: Loaded, store: ConversationStore, options: TrainOptions, deadline: float | None, *, quiet: bool
) -> bool:
    machine = backend()
    rows = batch_rows(loaded.target, options, memory_bytes=machine.memory_bytes, kind=machine.kind)
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
    path = options.out / "work" / "state.safetensors"
    state = load_state(path)
    if state is None:
        mx.random.seed(options.seed)
        state = fresh_state(make_drafter(loaded.target, loaded.tokenizer, loaded.frame, options), options)
    trainer = Trainer(
        target=loaded.target,
        drafter=drafter,
        options=options,
        state=state,
        state_path=path,
        compute_dtype=loaded.dtype,
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


def _export_stage(
    loaded: Loaded,
    trainer: Trainer,
    store: ConversationStore,
    options: TrainOptions,
    deadline: float | None,
    *,
    quiet: bool,
) -> dict[str, Any]:
    _, held = store.split(options.holdout)
    held = greedy_only(held, max(options.measure, options.eval_conversations), options.max_length)
    with Progress("measure", quiet=quiet) as progress:
        final = trainer.evaluate(held, progress)
        config = json.loads((options.init_from / "config.json").read_text()) if options.init_from else None
        export_drafter(trainer.drafter, options.out, config=config, quantize=options.quantize)
        facts = collect_facts(loaded, trainer, store, options)
        facts["replay"] = final.to_json() if final else None
        losses, replays = trainer.state.losses, trainer.state.replays
        write_report(options.out, facts, losses=losses, replays=replays)
        if options.measure:
            pair = load_exported(loaded.target, loaded.tokenizer, options.out, dtype=loaded.dtype)
            facts["measured"] = measure_pair(
                pair, held[: options.measure], max_tokens=options.measure_tokens, deadline=deadline, progress=progress
            )
            write_report(options.out, facts, losses=losses, replays=replays)
        if options.push:
            progress.say(f"uploaded to {push(options.out, options.push)}")
    return facts


def collect_facts(loaded: Loaded, trainer: Trainer, store: ConversationStore, options: TrainOptions) -> dict[str, Any]:
    """What the model card and train.json say."""
    machine = backend()
    _, held = store.split(options.holdout)
    config = trainer.drafter.config
    origin = "written by the target itself, user turns included"
    if options.prompts or options.topics:
        origin = f"answered by the target, user turns from {(options.prompts or options.topics).name}"  # type: ignore[union-attr]
    if options.conversations:
        origin = f"from {options.conversations.name}"
    recipe = options.training_identity() | {
        "layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "taps": list(config.target_layer_ids),
        "max_length": options.max_length,
        "greedy_share": options.greedy_share,
    }
    if options.init_from:
        recipe["init_from"] = options.init_from.name
    return {
        "target": loaded.name,
        "license": options.license,
        "parameters": count_parameters(trainer.state.parameters),
        "steps": trainer.state.step,
        "training_minutes": trainer.state.seconds / 60,
        "data_minutes": store.seconds / 60,
        "device": f"{machine.chip} ({machine.kind}, {platform.system()})",
        "mlx_version": machine.mlx_version,
        "dflash_mlx_version": dflash_mlx.__version__,
        "data": {
            "conversations": len(store.conversations),
            "tokens": store.tokens,
            "greedy": sum(c.greedy for c in store.conversations),
            "looped": store.looped,
            "held_out": len(held),
            "origin": origin,
        },
        "recipe": recipe,
    }


def _itemsize(dtype: mx.Dtype) -> int:
    return int(dtype.size)
