"""What a benchmark says when it is over: on the terminal, in a folder, and beside another one."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_mlx.cli.output import is_terminal, note, say, terminal_width
from dflash_mlx.errors import UsageError

if TYPE_CHECKING:
    from dflash_mlx.bench.analyse import Figures
    from dflash_mlx.bench.record import Results

_MOST_ROWS = 60  # prompts in the table on a terminal
_WIDE = 144  # columns that the table of figures needs
FILES = ("results.json", "report.html", "report.md")


def show(results: "Results", figures: "Sequence[Figures]", *, as_json: bool) -> None:
    """Print the verdict, then the tables; or everything as one JSON object. figures: what the results come to."""
    from dflash_mlx.bench.analyse import ALL, verdict
    from dflash_mlx.bench.render import text

    if as_json:
        print(_document(results, figures))
        return
    for number, line in enumerate(verdict(results, figures) or ["Nothing was finished."]):
        say(line, style="bold" if number == 0 else None)
    rows = text.prompt_rows(results)
    if 0 < len(rows) <= _MOST_ROWS:
        _table(text.prompt_header(results), rows)
    shown = figures if len(results.contestants) <= 2 else [f for f in figures if f.group == ALL]
    if shown:
        narrow = is_terminal(sys.stdout) and terminal_width() < _WIDE
        _table(*text.figure_table(shown, narrow=narrow))
    if results.load:
        _table(text.load_header(), text.load_rows(results))
    for line in text.extra_lines(results, figures):
        say(line)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console

    from dflash_mlx.bench.render.text import plain_table, rich_table

    print()
    if is_terminal(sys.stdout):
        Console().print(rich_table(header, rows))
    else:
        print(plain_table(header, rows))


def _document(results: "Results", figures: "Sequence[Figures]") -> str:
    """results.json: everything that was measured, and what it comes to."""
    from dflash_mlx.bench.analyse import verdict

    found = {"verdict": verdict(results, figures), "summary": [f.to_json() for f in figures]}
    return json.dumps(results.to_json() | found, ensure_ascii=False, indent=1)


def write(results: "Results", figures: "Sequence[Figures]", folder: Path) -> None:
    """results.json, report.html and report.md, each whole or not at all. Raises OSError."""
    from dflash_mlx.bench.render import markdown, page
    from dflash_mlx.hub.leftovers import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    texts = (
        _document(results, figures) + "\n",
        page.page(results, figures),
        markdown.report(results, figures),
    )
    for name, text in zip(FILES, texts, strict=True):
        write_atomically(folder / name, text)
    note(f"written: {', '.join(str(folder / name) for name in FILES)}")


def require_writable(folder: Path) -> None:
    """Find out before anything is measured whether a report can be written there. Raises UsageError."""
    from dflash_mlx.hub.new_folder import nearest_existing, try_writing

    try:
        try_writing(nearest_existing(folder))
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}. Name a folder you can write to.") from error


def read_result(path: Path) -> "Results":
    """A result from its file or its folder. Raises UsageError."""
    from dflash_mlx.bench.reading import from_json

    file = path / FILES[0] if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"cannot read the result in {file}: {reason}. Give the folder that `dflash-mlx bench --out` wrote, or "
            f"its {FILES[0]}."
        ) from error
    return from_json(found, str(file))


def print_comparison(a: "Results", b: "Results", *, as_json: bool) -> None:
    """The verdict first."""
    from dflash_mlx.bench.compare import compare, sentences

    found = compare(a, b)
    if as_json:
        print(json.dumps({"verdict": sentences(found)[0], **found.to_json()}, ensure_ascii=False, indent=1))
        return
    for number, line in enumerate(sentences(found)):
        say(line, style="bold" if number == 0 else None)
