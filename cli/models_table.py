"""The known pairs as a table that is as wide as its terminal at most. Nothing in it is broken or cut off."""

import os
import sys
from typing import Any

from dflash_mlx.cli.output import is_terminal, styled

_GAP = "  "
_TESTED = {"measured": "yes", "runs": "yes", "loads": "loads", "listed": "no"}
_NARROW = 80


def size_words(mb: int | None) -> str:
    """A size in words, from MB."""
    if mb is None:
        return "unknown"
    return f"{mb} MB" if mb < 1000 else f"{mb / 1000:.1f} GB"


def yes_or_no(value: bool | None) -> str:
    """A fact in words; None is one that is not known."""
    return "unknown" if value is None else "yes" if value else "no"


def demo_first(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The order in which pairs are shown."""
    return sorted(pairs, key=lambda pair: ("demo" not in pair["aliases"], pair["name"]))


def table_lines(pairs: list[dict[str, Any]], *, columns: int, show_fits: bool) -> list[str]:
    """A heading, and a line for each pair. The models' ids are there where `columns` has room for them."""
    table = {
        "name": [_name(pair) for pair in pairs],
        "memory": [_memory(pair["memory"]) for pair in pairs],
        "tested": [_TESTED[pair["verified"]] for pair in pairs],
        "on disk": [yes_or_no(pair["downloaded"]) for pair in pairs],
    }
    if show_fits:
        table["fits"] = [yes_or_no(pair["fits_memory"]) for pair in pairs]
    ids = {
        "target": [pair["target"] for pair in pairs],
        "drafter": [pair["drafter"] + (" (gated)" if pair["gated"] else "") for pair in pairs],
    }
    for heading, cells in ids.items():
        if _width({**table, heading: cells}) > columns:
            break
        table[heading] = cells
    widths = {heading: max(map(len, (heading, *cells))) for heading, cells in table.items()}
    rows = [table.keys(), *zip(*table.values(), strict=True)]
    return [
        _GAP.join(cell.ljust(width) for cell, width in zip(row, widths.values(), strict=True)).rstrip() for row in rows
    ]


def print_table(pairs: list[dict[str, Any]], *, show_fits: bool) -> None:
    """On a terminal its width counts; in a pipe the table is a narrow one, and --json has everything."""
    columns = os.get_terminal_size(sys.stdout.fileno()).columns if is_terminal(sys.stdout) else _NARROW
    heading, *lines = table_lines(demo_first(pairs), columns=columns or _NARROW, show_fits=show_fits)
    print(styled(heading, "bold", sys.stdout))
    for line in lines:
        print(line)


def _width(table: dict[str, list[str]]) -> int:
    return sum(max(map(len, (heading, *cells))) for heading, cells in table.items()) + len(_GAP) * (len(table) - 1)


def _name(pair: dict[str, Any]) -> str:
    return f"{pair['name']} ({', '.join(pair['aliases'])})" if pair["aliases"] else str(pair["name"])


def _memory(memory: dict[str, Any]) -> str:
    return ("~" if memory["estimated"] and memory["total_mb"] else "") + size_words(memory["total_mb"])
