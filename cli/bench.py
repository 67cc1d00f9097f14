"""`dflash-mlx bench`: plain and drafted decoding side by side, and whoever else takes part."""

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_mlx import __version__
from dflash_mlx.bench.prompts import BenchPrompt, built_in, choose_category, read_prompts, take
from dflash_mlx.cli import bench_options, options
from dflash_mlx.cli.bench_measure import Measurement, measure
from dflash_mlx.cli.bench_options import (
    Variant,
    comparable,
    parse_concurrency,
    parse_sweeps,
    servers_of,
    settings_of,
    variants,
)
from dflash_mlx.cli.bench_report import print_comparison, read_result, require_writable, show, write
from dflash_mlx.cli.output import note
from dflash_mlx.drafters.methods import Method
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.bench.record import Results
    from dflash_mlx.bench.run import Setting
    from dflash_mlx.pair import ModelPair

INTERRUPTED = 128 + 2
LIMIT = 12

HELP = """Measure plain and drafted decoding in turns, and say which is faster and how sure that is.

Twelve built-in prompts of six categories take some minutes; suites and files give others. The first answers warm the
machine up and do not count. Ctrl-C keeps what is finished."""
EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx bench --pair demo --out report

  dflash-mlx bench --pair demo --category code --max-tokens 256 --repeat 3

  dflash-mlx bench --pair demo --against http://127.0.0.1:8081 --concurrency 1,4

  dflash-mlx bench --pair demo --sweep width=1,3,7 --sweep context=512,2048

  dflash-mlx bench --pair demo --suite humaneval --limit 20

  dflash-mlx bench compare before/results.json after/results.json
"""

bench_app = typer.Typer(
    help="\n\n".join(" ".join(paragraph.split()) for paragraph in HELP.split("\n\n")),
    rich_markup_mode="rich",
    no_args_is_help=False,
)


@bench_app.callback(invoke_without_command=True)
def bench_command(
    context: typer.Context,
    pair: options.Pair = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    method: options.MethodOption = Method.auto,
    no_draft: options.NoDraft = False,
    block_size: options.BlockSize = None,
    steps: options.Steps = 1,
    dtype: options.Precision = options.DType.auto,
    no_kernels: options.NoKernels = False,
    exact: options.Exact = False,
    width: options.Width = None,
    tree: options.Tree = False,
    also: bench_options.Also = None,
    against: bench_options.Against = None,
    against_model: bench_options.AgainstModel = None,
    against_mlx_lm: bench_options.AgainstMlxLm = False,
    against_package: bench_options.AgainstPackage = None,
    prompts: bench_options.Prompts = None,
    suite: bench_options.SuiteName = None,
    suite_file: bench_options.SuiteFile = None,
    category: bench_options.Category = None,
    limit: bench_options.Limit = LIMIT,
    repeat: bench_options.Repeat = 1,
    turns: bench_options.Turns = None,
    sweep: bench_options.Sweep = None,
    concurrency: bench_options.Concurrency = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = None,
    out: bench_options.Out = None,
    as_json: options.Json = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    no_draft = no_draft or method is Method.plain
    options.require_width(width, tree=tree, no_draft=no_draft)
    drafting, answering = parse_sweeps(sweep or [])
    choice = options.ModelChoice(
        pair=pair,
        model=model,
        draft_model=draft_model,
        method=method,
        no_draft=no_draft,
        block_size=block_size,
        steps=steps,
        dtype=dtype,
        no_kernels=no_kernels,
        exact=exact,
    )
    own = variants(choice, width=width, tree=tree, also=also or [], sweep=drafting)
    streams = parse_concurrency(concurrency) if concurrency else []
    chosen, prompts_from = _prompts(prompts, suite, suite_file, category, limit)
    servers = servers_of(against or [], against_model or [])
    if out is not None:
        require_writable(out)
    opened = _open(own)
    from dflash_mlx import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    settings = settings_of(params, answering)
    if any(setting.params.temperature > 0 for setting in settings) and seed is None:
        note("at a temperature above 0 answers can only be compared with a seed: using --seed 0")
    main = opened[own[0].name]
    others = _others(main, servers, against_package or [])
    contestants = _contestants(own, opened, others, mlx_lm=against_mlx_lm)
    facts = _facts(main, settings[0], repeat=repeat, draft=not no_draft) | {
        "turns": turns or 0,
        "label": pair or main.name,
        "prompts_from": prompts_from,
    }
    results = _results(own, contestants, settings, facts)
    stopped = measure(
        Measurement(results, contestants, chosen, settings, repeat=repeat, turns=turns, streams=streams, pair=main)
    )
    results.facts["finished"] = stopped is None
    from dflash_mlx.bench.analyse import analyse

    figures = analyse(results)
    # With nothing to keep, what an earlier run wrote there stays.
    if out is not None and any(result.runs for result in results.prompts):
        write(results, figures, out)
    show(results, figures, as_json=as_json)
    if isinstance(stopped, KeyboardInterrupt):
        raise typer.Exit(INTERRUPTED)
    if stopped is not None:
        raise stopped


@bench_app.command("compare")
def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="results.json of the first run, or its folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="That of the second run.")],
    as_json: options.Json = False,
) -> None:
    """Say what changed from one result to another, and whether that is more than noise.

    Example: dflash-mlx bench compare before/results.json after/results.json
    """
    print_comparison(read_result(a), read_result(b), as_json=as_json)


def _prompts(
    file: Path | None, suite: str | None, suite_file: Path | None, category: str | None, limit: int
) -> tuple[tuple[BenchPrompt, ...], str]:
    """What is asked, and where it comes from in words. Raises UsageError and DownloadError."""
    if suite_file is not None and suite is None:
        raise UsageError("--suite-file needs --suite NAME, which says how its rows become prompts.")
    if file is not None and suite is not None:
        raise UsageError("--prompts and --suite both say what to ask; give one of them.")
    if suite is not None:
        from dflash_mlx.bench.suites import find_suite, load_suite

        every: tuple[BenchPrompt, ...] = tuple(load_suite(suite, suite_file, report=note))
        words = find_suite(suite).title
    else:
        every, words = (read_prompts(file), file.name) if file else (built_in(), "the built-in prompts")
    found = choose_category(every, category)
    chosen = take(found, limit, shuffle=suite is not None)
    return chosen, f"{len(chosen)} of {len(every)} of {words}"


def _open(own: Sequence[Variant]) -> "dict[str, ModelPair]":
    """Each variant's pair; those that need the same models share them."""
    opened: dict[options.ModelChoice, Any] = {}
    for variant in own:
        if variant.choice not in opened:
            opened[variant.choice] = variant.choice.open()
    return {variant.name: opened[variant.choice] for variant in own}


def _contestants(
    own: Sequence[Variant], opened: "dict[str, ModelPair]", others: Iterable[Any], *, mlx_lm: bool
) -> dict[str, Any]:
    """Everybody who takes part, by name, the baseline first."""
    from dflash_mlx.bench.contestants import Local, MlxLm

    found: dict[str, Any] = {
        v.name: Local(name=v.name, pair=opened[v.name], draft=v.draft, width=v.width, tree=v.tree) for v in own
    }
    if mlx_lm:
        found["mlx-lm"] = MlxLm(name="mlx-lm", pair=opened[own[0].name])
    for other in others:
        if other.name in found:
            raise UsageError(f"{other.name} is to take part twice; name it once.")
        found[other.name] = other
    return found


def _others(pair: "ModelPair", servers: Sequence[tuple[str, str | None]], packages: Sequence[str]) -> Iterator[Any]:
    """Other packages, and servers, which are asked for their models."""
    from dflash_mlx.bench.server_client import connect

    if packages:
        from dflash_mlx.bench.rivals import open_rival

        yield from (open_rival(package, pair) for package in packages)
    for url, model in servers:
        yield connect(
            url,
            model=model,
            encode=lambda text: list(pair.tokenizer.encode(text, add_special_tokens=False)),
            key=os.environ.get("DFLASH_MLX_AGAINST_KEY"),
            likely=(pair.name, *(folder.name for folder in pair.folders[:1])),
        )


def _results(
    own: Sequence[Variant], contestants: dict[str, Any], settings: "Sequence[Setting]", facts: dict[str, Any]
) -> "Results":
    from dflash_mlx.bench.record import Results

    others = [name for name in contestants if name not in {variant.name for variant in own}]
    drafting = [variant.name for variant in own if variant.draft]
    return Results(
        facts=facts,
        contestants={name: one.words for name, one in contestants.items()},
        main=(drafting or others or [own[0].name])[0],
        comparable={s.name: comparable(own, others, s.params.temperature) for s in settings},
    )


def _facts(pair: "ModelPair", setting: "Setting", *, repeat: int, draft: bool) -> dict[str, Any]:
    """What someone needs to judge the figures, or to measure them again."""
    from dataclasses import asdict

    from dflash_mlx.bench.measured import machine_facts

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "version": __version__,
        "machine": machine_facts(os.cpu_count(), machines=pair.target.machines),
        "pair": pair.name,
        "dtype": str(pair.dtype).removeprefix("mlx.core."),
        "exact": pair.exact,
        "block_size": pair.block_size if draft else None,
        "params": asdict(setting.params),
        "repeat": repeat,
    }
