"""Two answers beside each other on a terminal, each with a line of statistics under it."""

import sys
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dflash_mlx.cli.output import is_terminal, printable, terminal_width

NARROWEST = 72  # columns of a terminal that has room for two texts
_GAP = 2  # columns after each text
_AROUND = 4  # rows beside those of the texts: headings, statistics, and the prompt below


def fits() -> bool:
    """Whether texts can stand beside each other here: stdout is a terminal, and wide enough."""
    return is_terminal(sys.stdout) and terminal_width() >= NARROWEST


class Column:
    """One of the texts; takes the place of a `LiveText`."""

    def __init__(self, whole: "SideBySide", heading: str) -> None:
        self.heading, self.text, self.status = heading, "", ""
        self._whole = whole

    def __enter__(self) -> "Column":
        return self

    def __exit__(self, *_: object) -> None:
        self.status = ""

    def write(self, text: str, status: str) -> None:
        """Append `text` and show `status` below it."""
        self.text += text
        self.status = status
        self._whole.draw()


class SideBySide:
    """Texts in columns of the same width. While they grow, their newest rows are shown; at the end, all of them."""

    def __init__(self, headings: Sequence[str], *, console: Console | None = None) -> None:
        self.columns = [Column(self, heading) for heading in headings]
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, get_renderable=self._newest)

    def __enter__(self) -> "SideBySide":
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        self._console.print(self._table(rows=None))

    def draw(self) -> None:
        self._live.refresh()

    def _newest(self) -> Table:
        return self._table(rows=max(1, self._console.height - _AROUND))

    def _table(self, rows: int | None) -> Table:
        table = Table.grid(expand=True, padding=(0, _GAP, 0, 0), pad_edge=True)
        for _ in self.columns:
            table.add_column(ratio=1)
        table.add_row(*(Text(column.heading, style="bold") for column in self.columns))
        table.add_row(*(self._text(column, rows) for column in self.columns))
        if rows is not None:
            statistics = (column.status.strip() for column in self.columns)
            table.add_row(*(Text(line, style="dim", overflow="ellipsis", no_wrap=True) for line in statistics))
        return table

    def _text(self, column: Column, rows: int | None) -> Text:
        width = self._console.width // len(self.columns) - _GAP
        lines = Text(printable(column.text)).wrap(self._console, width)
        return Text("\n").join(lines if rows is None else lines[-rows:])
