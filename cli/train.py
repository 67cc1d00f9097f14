"""`dflash-mlx train`: make a drafter for a target."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_mlx.cli.output import note

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx train --model mlx-community/Qwen3-0.6B-4bit --out my-drafter

  dflash-mlx train --model ./my-fine-tune --out my-drafter --init-from ./drafter-of-the-base --minutes 20

  dflash-mlx train --model ./my-model --out my-drafter --heads dflash2

  dflash-mlx train --pair demo --out demo-drafter --data-tokens 20000000 --minutes 30 --stop-after-minutes 9

  dflash-mlx train --model ./my-fine-tune --out my-drafter --show 3
"""

_DATA, _DRAFTER, _TRAINING, _RESULT = "Data", "Drafter", "Training", "Result"


def _option(names: str | tuple[str, ...], text: str, panel: str | None = None) -> Any:
    names = (names,) if isinstance(names, str) else names
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=True)


def train_command(
    out: Annotated[Path, _option("--out", "Folder for the drafter and the state of the run.")],
    model: Annotated[str | None, _option("--model", "Target: a folder or a Hub id.")] = None,
    pair: Annotated[str | None, _option("--pair", "Target: that of a known pair, such as demo.")] = None,
    dtype: Annotated[str, _option("--dtype", "auto, float32, bfloat16 or float16.")] = "auto",
    seed: Annotated[int, _option("--seed", "Seed of data, weights and order.")] = 0,
    stop_after_minutes: Annotated[
        float | None, _option("--stop-after-minutes", "Stop cleanly after this time; the same command continues.")
    ] = None,
    show: Annotated[int | None, _option("--show", "Print this many stored conversations and stop.")] = None,
    data_minutes: Annotated[
        float | None, _option("--data-minutes", "Time for writing data (30 if no budget is given).", _DATA)
    ] = None,
    data_tokens: Annotated[int | None, _option("--data-tokens", "Tokens of data to write.", _DATA)] = None,
    data_batch: Annotated[int | None, _option("--data-batch", "Conversations written at once.", _DATA)] = None,
    max_length: Annotated[int, _option("--max-length", "Longest conversation, in tokens.", _DATA)] = 512,
    max_user_tokens: Annotated[
        int, _option("--max-user-tokens", "Longest user turn that the target writes.", _DATA)
    ] = 128,
    greedy_share: Annotated[float, _option("--greedy-share", "Share of greedy answers.", _DATA)] = 0.75,
    turns: Annotated[int, _option("--turns", "Answers in a conversation.", _DATA)] = 1,
    topics: Annotated[
        Path | None, _option("--topics", "Text: beginnings of user turns, a line each; the target goes on.", _DATA)
    ] = None,
    topics_share: Annotated[float, _option("--topics-share", "Share of user turns begun by a topic.", _DATA)] = 0.5,
    prompts: Annotated[
        Path | None, _option("--prompts", "User turns to answer: text (a line each) or JSONL.", _DATA)
    ] = None,
    conversations: Annotated[
        Path | None, _option("--conversations", "Finished conversations (JSONL), taken as they are.", _DATA)
    ] = None,
    thinking: Annotated[str, _option("--thinking", "auto, on or off, for templates that can think.", _DATA)] = "auto",
    loop_share: Annotated[
        float, _option("--loop-share", "Largest share of answers that repeat themselves.", _DATA)
    ] = 0.1,
    heads: Annotated[
        str, _option("--heads", "dflash, or dflash2: convolutions in the layers and a selector of paths.", _DRAFTER)
    ] = "dflash",
    conv_kernel_size: Annotated[
        int | None, _option("--conv-kernel-size", "dflash2: rows that a convolution mixes (2).", _DRAFTER)
    ] = None,
    conv_group_size: Annotated[
        int | None, _option("--conv-group-size", "dflash2: channels that share a kernel's change (16).", _DRAFTER)
    ] = None,
    selector_rank: Annotated[
        int | None, _option("--selector-rank", "dflash2: size of the selector's codes (32 to 256).", _DRAFTER)
    ] = None,
    selector_top_k: Annotated[
        int | None, _option("--selector-top-k", "dflash2: tokens it chooses among (16).", _DRAFTER)
    ] = None,
    layers: Annotated[int, _option("--layers", "Layers of the drafter.", _DRAFTER)] = 5,
    block_size: Annotated[int, _option("--block-size", "Anchor and drafts of a block.", _DRAFTER)] = 16,
    taps: Annotated[
        str | None, _option("--taps", "Target layers to read, such as 1,8,14,20,27, or how many.", _DRAFTER)
    ] = None,
    sliding_window: Annotated[
        int | None, _option("--sliding-window", "Window of the drafter's attention.", _DRAFTER)
    ] = None,
    mask_token: Annotated[int | None, _option("--mask-token", "Id that stands for an unknown token.", _DRAFTER)] = None,
    init_from: Annotated[
        Path | None, _option("--init-from", "Start from this drafter (its shape counts).", _DRAFTER)
    ] = None,
    minutes: Annotated[
        float | None, _option("--minutes", "Time for training (60 if no budget is given).", _TRAINING)
    ] = None,
    steps: Annotated[int | None, _option("--steps", "Training steps.", _TRAINING)] = None,
    learning_rate: Annotated[float, _option("--learning-rate", "Highest learning rate.", _TRAINING)] = 8e-4,
    batch_size: Annotated[int, _option("--batch-size", "Conversations a step.", _TRAINING)] = 48,
    micro_batch: Annotated[
        int | None,
        _option("--micro-batch", "Conversations on the device at once. (default: found by trying)", _TRAINING),
    ] = None,
    anchors: Annotated[int, _option("--anchors", "Blocks drawn from a conversation a step.", _TRAINING)] = 64,
    small_blocks: Annotated[
        float,
        _option(
            "--small-blocks",
            "Share of them with fewer rows than --block-size, as rounds with few drafts have.",
            _TRAINING,
        ),
    ] = 0.5,
    optimizer: Annotated[str, _option("--optimizer", "adamw or muon.", _TRAINING)] = "adamw",
    weights: Annotated[str, _option("--weights", "Position weights: dpace or decay.", _TRAINING)] = "dpace",
    alpha: Annotated[float, _option("--alpha", "Smoothing of the D-PACE weights.", _TRAINING)] = 0.5,
    gamma: Annotated[float | None, _option("--gamma", "Length of the decay weights.", _TRAINING)] = None,
    warmup: Annotated[float, _option("--warmup", "Share of the steps that warm up.", _TRAINING)] = 0.04,
    weight_decay: Annotated[float, _option("--weight-decay", "Decoupled weight decay.", _TRAINING)] = 0.0,
    clip: Annotated[float, _option("--clip", "Largest norm of the gradient.", _TRAINING)] = 1.0,
    holdout: Annotated[float, _option("--holdout", "Share of conversations kept for measuring.", _TRAINING)] = 0.02,
    checkpoint_seconds: Annotated[
        float, _option("--checkpoint-seconds", "Time between saved states.", _TRAINING)
    ] = 60.0,
    eval_seconds: Annotated[float, _option("--eval-seconds", "Time between measurements.", _TRAINING)] = 120.0,
    measure: Annotated[int, _option("--measure", "Held-out prompts for the decode loop at the end.", _RESULT)] = 200,
    measure_tokens: Annotated[int, _option("--measure-tokens", "Longest answer there.", _RESULT)] = 256,
    quantize: Annotated[int | None, _option("--quantize", "Bits of the exported weights.", _RESULT)] = None,
    draft_vocabulary: Annotated[
        int | None,
        _option("--draft-vocabulary", "Draft only this many tokens: the most frequent ones of the answers.", _RESULT),
    ] = None,
    license: Annotated[str | None, _option("--license", "License for the model card.", _RESULT)] = None,
    push: Annotated[str | None, _option("--push", "Upload to this Hub repository.", _RESULT)] = None,
) -> None:
    """Make a drafter for a model: it writes conversations, a drafter learns from them, and the result is measured.

    Everything is kept in --out. The same command continues after a stop or a kill.
    """
    given = dict(locals())
    del given["show"]
    from dflash_mlx.training.options import TrainOptions

    given |= parse_taps(given.pop("taps"))
    options = TrainOptions(**given)
    if show is not None:
        from dflash_mlx.training.pipeline import show_data

        show_data(options, show)
        return
    from dflash_mlx.training.pipeline import run

    result = run(options)
    if result.stage == "done":
        typer.echo(str(result.out))
        target = ("--pair", options.pair) if options.pair else ("--model", str(options.model))
        words = ("dflash-mlx", "chat", *target, "--draft-model", str(result.out))
        note(f"try it: {shlex.join(words)}", copyable=True)


def parse_taps(text: str | None) -> dict[str, Any]:
    """`--taps`: a list of layers, or one number for how many."""
    from dflash_mlx.errors import UsageError

    if text is None:
        return {}
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"taps should be layer numbers with commas, or how many; got {text!r}.") from None
    return {"num_taps": numbers[0]} if len(numbers) == 1 else {"taps": numbers}
