"""A benchmark's figures as a table, for people, and as one object, for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from dflash_mlx.bench.runner import PromptResult
from dflash_mlx.bench.summary import Summary

HEADER = ("prompt", "plain tok/s", "drafted tok/s", "speedup", "acceptance length", "acceptance rate", "identical")


def rows(results: Sequence[PromptResult], summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """A line of cells for each prompt that was run, then for each group's medians. "-" where nothing was measured."""
    lines = [_prompt_row(result) for result in results if result.runs]
    return lines + [_summary_row(summary) for summary in summaries]


def _prompt_row(result: PromptResult) -> tuple[str, ...]:
    compared = result.of("plain") and result.of("drafted")
    at = result.first_difference
    return (
        result.prompt.name,
        _number(result.tps("plain"), ".1f"),
        _number(result.tps("drafted"), ".1f"),
        _number(result.speedup, ".2f", "x"),
        _number(result.acceptance("mean_acceptance_length"), ".2f"),
        _number(result.acceptance("acceptance_rate"), ".0%"),
        "-" if not compared else "yes" if at is None else f"no, from {at}",
    )


def _summary_row(summary: Summary) -> tuple[str, ...]:
    return (
        f"{summary.group} (median)",
        _number(summary.plain_tps, ".1f"),
        _number(summary.drafted_tps, ".1f"),
        _number(summary.speedup_median, ".2f", "x"),
        _number(summary.mean_acceptance_length, ".2f"),
        _number(summary.acceptance_rate, ".0%"),
        "-" if summary.identical is None else f"{summary.identical} of {summary.prompts}",
    )


def closing_lines(summaries: Sequence[Summary]) -> list[str]:
    """The overall figures that no table row shows, and what the two speedups mean."""
    if not summaries:
        return []
    total = summaries[-1]
    lines = []
    if total.speedup_median is not None:
        lines.append(f"speedup, median of the prompts' ratios: {total.speedup_median:.2f}x")
    if total.speedup_total is not None:
        lines.append(f"speedup, all runs together: {total.speedup_total:.2f}x decoding")
        if total.speedup_wall is not None:
            lines[-1] += f", {total.speedup_wall:.2f}x with prompt processing"
    first = [
        f"{seconds * 1000:.0f} ms {mode}"
        for mode, seconds in (("plain", total.plain_first_s), ("drafted", total.drafted_first_s))
        if seconds is not None
    ]
    if first:
        lines.append(f"time to the first token, median: {', '.join(first)}")
    return lines


def rich_table(lines: Sequence[Sequence[str]], *, groups: int) -> Table:
    """The rows as a table for a terminal; the last `groups` of them are set apart."""
    table = Table(header_style="bold")
    for column, title in enumerate(HEADER):
        table.add_column(title, justify="left" if column == 0 else "right", no_wrap=column == 0)
    for index, line in enumerate(lines):
        if index == len(lines) - groups:
            table.add_section()
        style = "red" if line[-1].startswith("no") else ""
        table.add_row(*(Text(cell) for cell in line), style=style)
    return table


def plain_table(lines: Sequence[Sequence[str]]) -> str:
    """The rows as aligned text, for files and pipes."""
    table = [HEADER, *lines]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def to_json(results: Sequence[PromptResult], summaries: Sequence[Summary], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything: `facts` about the machine and the request, the figures of each group, and every run."""
    return {
        **facts,
        "summary": [asdict(summary) for summary in summaries],
        "prompts": [result.to_json() for result in results],
    }


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
