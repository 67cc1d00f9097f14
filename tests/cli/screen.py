"""A small terminal: enough of a VT100 to see what a person would see."""

import re

_TOKEN = re.compile(r"\x1b\[([\d;]*)([A-Za-z])|\x1b([78D])|(.)", re.DOTALL)


class Screen:
    """Characters on `rows` x `columns`. Like a real terminal it wraps only when a character follows the last column."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self.history: list[str] = []
        self.lines = [[" "] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.wrap = False
        self.saved = (0, 0, False)

    def isatty(self) -> bool:
        return True

    encoding = "utf-8"

    def flush(self) -> None:
        pass

    def write(self, data: str) -> None:
        for match in _TOKEN.finditer(data):
            count, control, escape, character = match.groups()
            if control:
                if control != "m":
                    self._control(control, int(count or 0))
            elif escape:
                self._escape(escape)
            else:
                self._put(character)

    def text(self) -> list[str]:
        """All rows ever shown, without blanks at their ends."""
        shown = [*self.history, *("".join(line).rstrip() for line in self.lines)]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def _control(self, name: str, count: int) -> None:
        if name == "J":
            assert count == 0
            self.lines[self.row][self.column :] = [" "] * (self.columns - self.column)
            for row in range(self.row + 1, self.rows):
                self.lines[row] = [" "] * self.columns
        elif name == "K":
            assert count == 2
            self.lines[self.row] = [" "] * self.columns
        elif name == "C":
            self.column = min(self.columns - 1, self.column + max(count, 1))
        elif name == "A":
            self.row = max(0, self.row - max(count, 1))
        elif name == "B":
            self.row = min(self.rows - 1, self.row + max(count, 1))
        else:
            raise AssertionError(f"the terminal does not know {name}")
        self.wrap = False

    def _escape(self, name: str) -> None:
        if name == "7":
            self.saved = (self.row, self.column, self.wrap)
        elif name == "8":
            self.row, self.column, self.wrap = self.saved
        else:
            self.wrap = False
            self._down()

    def _down(self) -> None:
        if self.row == self.rows - 1:
            self.history.append("".join(self.lines.pop(0)).rstrip())
            self.lines.append([" "] * self.columns)
        else:
            self.row += 1

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column, self.wrap = 0, False
        elif character == "\n":
            self.column, self.wrap = 0, False
            self._down()
        else:
            if self.wrap:
                self.column, self.wrap = 0, False
                self._down()
            self.lines[self.row][self.column] = character
            if self.column == self.columns - 1:
                self.wrap = True
            else:
                self.column += 1
