"""`dflash-mlx parity`: whether drafting changes answers on this machine."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_mlx.bench.prompts import built_in, choose_category, read_prompts, short_prompts
from dflash_mlx.cli import options
from dflash_mlx.cli.output import LoadProgress, say

if TYPE_CHECKING:
    from dflash_mlx.parity import ParityReport

PROMPT = "Name one colour."  # short, and with several good first words

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx parity --pair demo

  dflash-mlx parity --pair demo --prompts mine.jsonl --max-tokens 256 --samples 0

  dflash-mlx parity --model ./my-model --draft-model ./my-drafter --json
"""


def parity_command(
    pair: options.Pair = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    block_size: options.BlockSize = None,
    dtype: options.Precision = options.DType.auto,
    exact: options.Exact = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help='Prompts of your own: a JSON object a line, with "prompt" and "category".'
        ),
    ] = None,
    category: Annotated[
        str | None,
        typer.Option("--category", metavar="NAME", help="Only these kinds of prompts. (default: chat,code,math)"),
    ] = None,
    max_tokens: options.MaxTokens = 64,
    samples: Annotated[
        int,
        typer.Option(
            "--samples", metavar="N", min=0, help="Sampled answers to count, for each of the two rules. 0: none."
        ),
    ] = 200,
    as_json: options.Json = False,
) -> None:
    """Compare drafted answers with mlx-lm's plain decoding, on your machine and with your pair.

    Greedy answers are compared token by token. Where they differ, plain decoding's two best tokens should be nearly
    tied. Sampled answers are counted and compared with the target's exact probabilities. The last line is the verdict.
    The exit code is 1 if drafting changed an answer.
    """
    known = read_prompts(prompts) if prompts else built_in() if category else short_prompts()
    chosen = choose_category(known, category)
    choice = options.ModelChoice(
        pair=pair,
        model=model,
        draft_model=draft_model,
        block_size=block_size,
        dtype=dtype,
        exact=exact,
        can_be_plain=False,
    )
    loaded = choice.open()
    from dflash_mlx.parity import ParityReport, check_greedy, check_sampled

    with LoadProgress() as progress:

        def follow(what: str, done: int, of: int) -> None:
            progress.report(what, done / of)

        greedy = check_greedy(
            loaded, chosen, max_tokens=max_tokens, progress=lambda n, of: follow("comparing greedy answers", n, of)
        )
        sampled = [
            check_sampled(
                loaded,
                PROMPT,
                samples=samples,
                seeded=seeded,
                progress=lambda n, of: follow("counting sampled answers", n, of),
            )
            for seeded in (False, True)
            if samples
        ]
    report = ParityReport(loaded.name, str(loaded.dtype).removeprefix("mlx.core."), greedy, sampled)
    if as_json:
        print(json.dumps(report.to_json(), ensure_ascii=False, indent=2))
    else:
        _print(report)
    if not report.lossless:
        raise typer.Exit(1)


def _print(report: "ParityReport") -> None:
    for result in report.greedy:
        words = f"{result.tokens} tokens, identical"
        if result.first_difference is not None:
            words = f"parts at token {result.first_difference}, where plain decoding's gap was {result.gap:.3g}"
        say(f"{result.name + ':':<12}{words} (rounding moves gaps by up to {result.rounding:.2g})")
    for counted in report.sampled:
        say(
            f"{counted.samples} samples {counted.acceptance_rule}: total variation {counted.total_variation:.3f} "
            f"(chance alone: about {counted.expected_variation:.3f}), chi-square p = {counted.p_value:.3g}"
        )
    say(report.verdict())
