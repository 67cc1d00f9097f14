"""Stage 3: export, measuring and the report. Done again whenever the command runs, from what is already known."""

import json
import platform
from typing import Any

import mlx.core as mx

import dflash_mlx
from dflash_mlx.drafters.config import DFLASH2_FIELDS
from dflash_mlx.runtime import backend
from dflash_mlx.training.evaluate import greedy_only
from dflash_mlx.training.export import dflash2_fields, export_drafter, push, write_report
from dflash_mlx.training.loading import Loaded
from dflash_mlx.training.measure import load_exported, measure_pair, open_log, summarize
from dflash_mlx.training.options import TrainOptions
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.store import ConversationStore
from dflash_mlx.training.trainer import Trainer
from dflash_mlx.training.trees import count_parameters
from dflash_mlx.training.vocabulary import ChosenTokens, choose_tokens


def finish(
    loaded: Loaded,
    trainer: Trainer,
    store: ConversationStore,
    options: TrainOptions,
    deadline: float | None,
    *,
    quiet: bool,
) -> dict[str, Any] | None:
    """Export the drafter to `options.out`, measure it there and write the report.

    Returns what train.json holds, or None when `deadline` (time.monotonic()) came before all was measured. What a
    checkpoint's measuring already found is kept, so that running again costs little. Raises DFlashError.
    """
    training, held = store.split(options.holdout)
    chosen = None
    if options.draft_vocabulary is not None:
        chosen = choose_tokens(
            training,
            held,
            options.draft_vocabulary,
            eos_ids=loaded.frame.eos_ids,
            vocab_size=loaded.target.vocab_size,
            least=trainer.drafter.config.selector_top_k,
        )
    held = greedy_only(held, max(options.measure, options.eval_conversations), options.max_length)
    with Progress("measure", quiet=quiet) as progress:
        _export(trainer, options, chosen)
        prompts = held[: options.measure]
        log = open_log(options.out / "work" / "measured.json", options.out, prompts, max_tokens=options.measure_tokens)
        if log.replay is None:
            result = trainer.evaluate(held, progress)
            log.replay = result.to_json() if result else None
            log.save()
        facts = collect_facts(loaded, trainer, store, options, chosen) | {"replay": log.replay}

        def report() -> None:
            width = trainer.drafter.config.block_size - 1
            facts["measured"] = summarize(log.answers, width=width, max_tokens=options.measure_tokens)
            write_report(options.out, facts, losses=trainer.state.losses, replays=trainer.state.replays)

        report()
        if len(log.answers) < len(prompts):
            pair = load_exported(loaded.target, loaded.tokenizer, options.out, dtype=loaded.dtype)
            finished = measure_pair(
                pair, prompts, log, max_tokens=options.measure_tokens, deadline=deadline, progress=progress
            )
            report()
            if not finished:
                progress.say(f"stopped after {len(log.answers)} of {len(prompts)} prompts; the same command continues")
                return None
        if options.push:
            progress.say(f"uploaded to {push(options.out, options.push)}")
    return facts


def _export(trainer: Trainer, options: TrainOptions, chosen: ChosenTokens | None) -> None:
    trainer.load_weights()
    config = json.loads((options.init_from / "config.json").read_text()) if options.init_from else None
    export_drafter(
        trainer.drafter,
        options.out,
        config=config,
        quantize=options.quantize,
        draft_token_ids=chosen.ids if chosen else (),
    )
    mx.clear_cache()


def collect_facts(
    loaded: Loaded, trainer: Trainer, store: ConversationStore, options: TrainOptions, chosen: ChosenTokens | None
) -> dict[str, Any]:
    """What the model card and train.json say."""
    machine = backend()
    _, held = store.split(options.holdout)
    config = trainer.drafter.config
    recipe = options.training_identity() | {
        "layers": config.num_hidden_layers,
        "block_size": config.block_size,
        "taps": list(config.target_layer_ids),
        "mask_token": config.mask_token_id,
        "sliding_window": config.sliding_window,
        "max_length": options.max_length,
        "greedy_share": options.greedy_share,
    }
    kind = "dflash2" if config.is_dflash2 else "dflash"
    recipe = {name: value for name, value in recipe.items() if name not in DFLASH2_FIELDS} | dflash2_fields(config)
    recipe["heads"] = kind
    if options.init_from:
        recipe["init_from"] = options.init_from.name
    return {
        "target": loaded.name,
        "license": options.license,
        "parameters": count_parameters(trainer.state.parameters),
        "quantize": options.quantize,
        "draft_vocabulary": chosen.to_json() if chosen else None,
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
            "origin": _origin(options),
        },
        "recipe": recipe,
    }


def _origin(options: TrainOptions) -> str:
    if options.conversations:
        return f"from {options.conversations.name}"
    if options.prompts:
        return f"answered by the target, user turns from {options.prompts.name}"
    if options.topics:
        return (
            "written by the target itself, user turns included; "
            f"{options.topics_share:.0%} of those begin as {options.topics.name} says"
        )
    return "written by the target itself, user turns included"
