"""A benchmark's figures as tables, for terminals, files and issues."""

from collections.abc import Sequence
from statistics import mean

from rich.table import Table
from rich.text import Text

from dflash_mlx.bench.analyse import ALL, Figures, unlike
from dflash_mlx.bench.record import PromptResult, Results
from dflash_mlx.bench.statistics import middle, quantile

NOTHING = "-"


def number(value: float | None, form: str, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:{form}}{unit}"


def prompt_header(results: Results) -> list[str]:
    """Columns of the table of prompts: two contestants side by side with their comparison, or a speed for each."""
    speeds = [f"{name} tok/s" for name in results.contestants]
    own = results.main != results.baseline
    return ["prompt", *speeds, *(["speedup", "acceptance length", "identical"] if own else [])]


def prompt_rows(results: Results) -> list[list[str]]:
    """A line of cells for each prompt that was run."""
    return [_prompt_row(results, result) for result in results.prompts if result.runs]


def _prompt_row(results: Results, result: PromptResult) -> list[str]:
    name = f"{result.prompt.name} {result.setting}".rstrip()
    row = [name, *(number(result.tps(contestant), ".1f") for contestant in results.contestants)]
    main, baseline = results.main, results.baseline
    if main == baseline:
        return row
    compared = result.of(baseline) and result.of(main) and main in results.comparable.get(result.setting, [])
    at = result.first_difference(main, baseline)
    return [
        *row,
        number(result.speedup(main, baseline), ".2f", "x"),
        number(result.acceptance(main, "mean_acceptance_length"), ".2f"),
        NOTHING if not compared else "yes" if at is None else f"no, from {at}",
    ]


FIGURE_HEADER = (
    "group",
    "contestant",
    "tok/s",
    "speedup",
    "whole answer",
    "first token",
    "prompt tok/s",
    "acceptance length",
    "pays from",
    "round",
    "identical",
    "memory",
)


_FOR_NARROW = ("group", "contestant", "tok/s", "speedup", "first token", "acceptance length")


def figure_table(figures: Sequence[Figures], *, narrow: bool = False) -> tuple[list[str], list[list[str]]]:
    """Header and lines; narrow: the columns that fit into 80 letters."""
    columns = [i for i, title in enumerate(FIGURE_HEADER) if not narrow or title in _FOR_NARROW]
    lines = [[line[i] for i in columns] for line in figure_rows(figures)]
    return [FIGURE_HEADER[i] for i in columns], lines


def figure_rows(figures: Sequence[Figures]) -> list[list[str]]:
    """A line of cells for each contestant in each group, with intervals where there are any."""
    return [_figure_row(f) for f in figures]


def _figure_row(f: Figures) -> list[str]:
    sure = f" ({f.speedup_interval.low:.2f} to {f.speedup_interval.high:.2f})" if f.speedup_interval else ""
    return [
        f"{f.group} {f.setting}".rstrip(),
        f.contestant,
        number(f.tps, ".1f"),
        number(f.speedup, ".2f", "x") + sure,
        number(f.answer_speedup, ".2f", "x"),
        number(f.first_s, ".2f", " s"),
        number(f.prefill_tps, ".0f"),
        number(f.mean_acceptance_length, ".2f"),
        number(f.break_even, ".2f"),
        number(f.round_ms, ".1f", " ms"),
        NOTHING if f.identical is None else f"{f.identical} of {f.prompts}",
        number(f.peak_memory_gb, ".2f", " GB"),
    ]


def load_header() -> list[str]:
    return ["streams", "contestant", "tok/s", "first token", "slowest", "a token (mean)", "99 of 100 below"]


def load_rows(results: Results) -> list[list[str]]:
    """A line of cells for each number of streams and contestant.

    The time a token takes is a mean: of drafted tokens most come together with others.
    """
    rows = []
    for run in sorted(results.load, key=lambda run: run.streams):
        gap, slow = mean(run.gaps_s) if run.gaps_s else None, quantile(run.gaps_s, 0.99)
        rows.append(
            [
                str(run.streams),
                run.contestant,
                f"{run.tps:.1f}",
                number(middle(run.first_s), ".2f", " s"),
                number(max(run.first_s, default=None), ".2f", " s"),
                number(None if gap is None else gap * 1000, ".0f", " ms"),
                number(None if slow is None else slow * 1000, ".0f", " ms"),
            ]
        )
    return rows


def extra_lines(results: Results, figures: Sequence[Figures]) -> list[str]:
    """What no table shows: energy, where a round's time goes, and the memory's speed."""
    lines = []
    energy = [f"{f.contestant} {f.joules_per_token:.3g} J" for f in figures if f.group == ALL and f.joules_per_token]
    if energy:
        lines.append(f"energy a token: {', '.join(energy)} ({results.machine.get('energy')})")
    for name, split in (results.machine.get("splits") or {}).items():
        rest = "the parts overlap" if split["rest_ms"] is None else f"the rest {split['rest_ms']:.1f}"
        drafts = "1 draft" if split["width"] == 1 else f"{split['width']} drafts"
        lines.append(
            f"a round of {name} with {drafts}: {split['round_ms']:.1f} ms; timed alone, draft "
            f"{split['draft_ms']:.1f}, verification {split['verify_ms']:.1f}, {rest}"
        )
    if bandwidth := results.machine.get("bandwidth_gb_s"):
        shares = results.machine.get("bandwidth_shares") or {}
        words = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
        lines.append(f"memory: {bandwidth:.0f} GB/s measured; reading weights takes of that: {words or NOTHING}")
    if (cooled := results.machine.get("cooled_s") or 0) >= 1:
        lines.append(f"waited {cooled:.0f} s for the machine to cool down")
    return lines + unlike(results)


def rich_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """A table for a terminal; lines that report a difference are red."""
    table = Table(header_style="bold")
    for column, title in enumerate(header):
        table.add_column(title, justify="left" if column == 0 else "right", no_wrap=column == 0, overflow="fold")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line), style="red" if line[-1].startswith("no,") else "")
    return table


def plain_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Aligned text, for files and pipes."""
    table = [header, *lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """For an issue or a page."""
    rows = [header, ["---"] + ["---:"] * (len(header) - 1), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
