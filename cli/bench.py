"""`dflash-mlx bench`: plain and drafted decoding side by side."""

import json
import os
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx import __version__
from dflash_mlx.bench.prompts import BUILT_IN, choose_category, read_prompts
from dflash_mlx.cli import options
from dflash_mlx.cli.output import is_terminal, note, styled, terminal_width

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_mlx.bench.runner import PromptResult
    from dflash_mlx.bench.summary import Summary
    from dflash_mlx.pair import ModelPair
    from dflash_mlx.sampling import SamplingParams

PROMPTS = "What to measure"
INTERRUPTED = 128 + 2

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx bench --pair demo

  dflash-mlx bench --pair demo --category code --max-tokens 256 --repeat 3

  dflash-mlx bench --model ./my-model --draft-model ./my-drafter --prompts mine.jsonl --json > result.json
"""


def bench_command(
    pair: options.Pair = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    no_draft: options.NoDraft = False,
    block_size: options.BlockSize = None,
    dtype: options.Precision = options.DType.auto,
    no_kernels: options.NoKernels = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='Prompts of your own: a JSON object a line, with "prompt" and "category".',
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    category: Annotated[
        str | None,
        typer.Option("--category", metavar="NAME", help="Only this kind: chat, code or math.", rich_help_panel=PROMPTS),
    ] = None,
    repeat: Annotated[
        int,
        typer.Option(
            "--repeat", metavar="N", min=1, help="Run everything N times and take medians.", rich_help_panel=PROMPTS
        ),
    ] = 1,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    as_json: options.Json = False,
) -> None:
    """Measure plain and drafted decoding in turns, over twelve built-in prompts or your own.

    Each prompt runs in both modes; the first runs warm the machine up and do not count. Speeds are of decoding, after
    the first token. Ctrl-C prints what is finished so far.
    """
    chosen = choose_category(read_prompts(prompts) if prompts else BUILT_IN, category)
    choice = options.ModelChoice(
        pair=pair,
        model=model,
        draft_model=draft_model,
        no_draft=no_draft,
        block_size=block_size,
        dtype=dtype,
        no_kernels=no_kernels,
    )
    opened = choice.open()
    from dflash_mlx import SamplingParams
    from dflash_mlx.bench.runner import PromptResult
    from dflash_mlx.bench.summary import summarize

    if temperature > 0 and seed is None:
        seed = 0
        note("at a temperature above 0 answers can only be compared with a seed: using --seed 0")
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    started = datetime.now(timezone.utc)
    results = [PromptResult(prompt=prompt) for prompt in chosen]
    finished = _measure(opened, results, params, repeat=repeat, draft=not no_draft)
    summaries = summarize(results, draft=not no_draft)
    if as_json:
        facts = _facts(opened, params, started, repeat=repeat, draft=not no_draft, finished=finished)
        _print_json(results, summaries, facts)
    else:
        _print_table(results, summaries)
    if not finished:
        raise typer.Exit(INTERRUPTED)


def _measure(
    pair: "ModelPair", results: "list[PromptResult]", params: "SamplingParams", *, repeat: int, draft: bool
) -> bool:
    """Fill `results`, with progress on stderr. False if the user stopped it."""
    from dflash_mlx.bench.runner import run_bench, warm_up

    total = len(results) * repeat * (2 if draft else 1)
    progress = _Progress(total)
    try:
        progress.show("warming up")
        warm_up(pair, results[0].prompt, params, draft=draft)
        for result, run in run_bench(pair, results, params, repeat=repeat, draft=draft):
            speed = f"{run.decode_tps:.1f} tok/s" if run.decode_tps else "one token"
            progress.show(f"{result.prompt.name} {run.mode}: {speed}", step=True)
    except KeyboardInterrupt:
        progress.close()
        note(f"stopped after {progress.done} of {total} runs; the figures are of what was finished.", style="yellow")
        return False
    progress.close()
    return True


class _Progress:
    """A line on stderr: redrawn on a terminal, a new one for each run elsewhere."""

    def __init__(self, total: int) -> None:
        self.done = 0
        self._total = total
        self._live = is_terminal(sys.stderr)

    def show(self, text: str, *, step: bool = False) -> None:
        self.done += step
        line = f"[{self.done}/{self._total}] {text}"
        if self._live:
            line = line[: terminal_width() - 1]
            sys.stderr.write("\r\x1b[2K" + styled(line, "dim", sys.stderr))
            sys.stderr.flush()
        else:
            note(line)

    def close(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def _print_table(results: "Sequence[PromptResult]", summaries: "Sequence[Summary]") -> None:
    from rich.console import Console

    from dflash_mlx.bench.report import closing_lines, plain_table, rich_table, rows

    lines = rows(results, summaries)
    if is_terminal(sys.stdout):
        Console().print(rich_table(lines, groups=len(summaries)))
    else:
        print(plain_table(lines))
    for line in closing_lines(summaries):
        print(line)


def _print_json(results: "Sequence[PromptResult]", summaries: "Sequence[Summary]", facts: dict[str, Any]) -> None:
    from dflash_mlx.bench.report import to_json

    print(json.dumps(to_json(results, summaries, facts), ensure_ascii=False, indent=1))


def _facts(
    pair: "ModelPair", params: "SamplingParams", started: datetime, *, repeat: int, draft: bool, finished: bool
) -> dict[str, Any]:
    """What someone needs to judge the figures, or to measure them again."""
    from dataclasses import asdict

    from dflash_mlx.runtime import backend

    return {
        "date": started.isoformat(timespec="seconds"),
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "finished": finished,
        "version": __version__,
        "machine": {**asdict(backend()), "cpu_count": os.cpu_count()},
        "pair": pair.name,
        "dtype": str(pair.dtype).removeprefix("mlx.core."),
        "block_size": pair.block_size if draft else None,
        "params": asdict(params),
        "repeat": repeat,
    }
