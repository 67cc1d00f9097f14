"""Text that streams on a terminal with a line of statistics under it.

The line lives one row below the text. Before new text is written, everything below the cursor is erased; afterwards
the line is drawn again and the cursor goes back. A row is made first with IND (which scrolls at the bottom and keeps
the column), so that going down and up again meets the same place. All this only happens where the cursor's column is
certain: a terminal whose last column has just been filled wraps with the next character, and a movement would lose
that, so then the line waits for the next piece of text.

Words stay whole: one that would cross the last column is erased there and written again in the next row.
"""

import os
import re
import stat
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TextIO

from rich.cells import cell_len, set_cell_size

from dflash_mlx.cli.markdown import Markdown, Spans
from dflash_mlx.cli.output import is_terminal, printable, styled, terminal_width

_ERASE_BELOW = "\x1b[J"
_ERASE_LINE = "\r\x1b[2K"
_MAKE_ROW_BELOW = "\x1bD\x1b[A"
_SAVE, _RESTORE = "\x1b7", "\x1b8"
_CHANGE = re.compile(r"\x1b\[[\d;]*m")  # of style
_SECONDS_BETWEEN_DRAWINGS = 0.08


class LiveText:
    """Write an answer piece by piece to stdout, and a status line to stderr when a person watches it.

    Where stdout is a file, the text passes through unchanged and the status line stands alone.
    """

    def __init__(self, *, status: bool = True, echo: bool = True, markdown: bool = False) -> None:
        self._echo = echo
        self._text_on_screen = echo and is_terminal(sys.stdout)
        # What reads a pipe may write to this terminal, too (`| tee answer.txt`), in the middle of the line.
        self._live = status and is_terminal(sys.stderr) and not (echo and _is_pipe(sys.stdout))
        self._width = terminal_width()
        self._column = 0
        self._word = ""  # what stands before the cursor since the last space, and where it begins
        self._word_column = 0
        self._markdown = Markdown() if markdown and self._text_on_screen and not os.environ.get("NO_COLOR") else None
        self._style = self._word_style = ""  # now, and where the word at the cursor begins
        self._drawn = False
        self._drawn_at = 0.0
        self._status = ""
        self.text = ""

    def __enter__(self) -> "LiveText":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, text: str, status: str) -> None:
        """Append `text` to the answer and show `status` below it."""
        now = time.monotonic()
        self._status = status
        self.text += text
        if text and self._echo:
            self._erase()
            sys.stdout.write(self._shown(printable(text)) if self._text_on_screen else text)
            sys.stdout.flush()
        erased = self._text_on_screen and not self._drawn
        if self._live and (erased or now - self._drawn_at > _SECONDS_BETWEEN_DRAWINGS):
            self._draw()
            self._drawn_at = now

    def close(self) -> None:
        """Take the status line away and end the text's last line."""
        self._erase()
        if self._markdown is not None:
            sys.stdout.write(self._styled(self._markdown.finish()) + self._change_to(""))
            sys.stdout.flush()
        if self._text_on_screen and self._column:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._column = 0

    def _shown(self, text: str) -> str:
        """What to send to the terminal for `text`."""
        return self._wrapped(text) if self._markdown is None else self._styled(self._markdown.feed(text))

    def _styled(self, spans: Spans) -> str:
        return "".join(self._change_to(style) + self._wrapped(text) for text, style in spans)

    def _change_to(self, style: str) -> str:
        """Go on in another style. The word at the cursor keeps it, in case that it moves to the next row."""
        if style == self._style:
            return ""
        self._style = style
        change = f"\x1b[0;{style}m" if style else "\x1b[0m"
        self._word += change
        return change

    def _wrapped(self, text: str) -> str:
        """What to send to the terminal for `text`, so that rows break at spaces; follows the cursor's column."""
        return "".join(map(self._placed, text))

    def _placed(self, character: str) -> str:
        cells = cell_len(character)
        if character in "\n\t ":
            full = self._column >= self._width
            if character == "\n" or full:
                self._column = 0  # a space at the end of a full row is the end of that row
            else:
                next_stop = min(self._width - 1, (self._column // 8 + 1) * 8)
                self._column = next_stop if character == "\t" else self._column + 1
            self._begin_word()
            return "\n" if full else character
        before = ""
        if cells > 1:  # scripts with wide characters have no spaces: each of them may begin a row
            self._begin_word()
        if self._column + cells > self._width:
            before = self._begin_row()
        self._word += character
        self._column += cells
        return before + character

    def _begin_word(self) -> None:
        self._word, self._word_column, self._word_style = "", self._column, self._style

    def _begin_row(self) -> str:
        """Move the word at the cursor to a new row. One that is as long as a row is left to the terminal to break."""
        start, moved = self._word_column, self._word if self._word_column else ""
        self._word, self._word_column, self._column = moved, 0, cell_len(_CHANGE.sub("", moved))
        if not moved:
            return ""
        styled_word = f"\x1b[0;{self._word_style}m{moved}" if self._word_style else moved
        before = "\x1b[0m" if self._style or self._word_style else ""
        return f"{before}\r\x1b[{start}C{_ERASE_BELOW}\n{styled_word}"

    def _draw(self) -> None:
        self._width = terminal_width()
        if self._text_on_screen and self._column >= self._width:
            return
        line = fitting(self._status, self._width - 1)
        line = styled(line, "dim", sys.stderr)
        if self._text_on_screen:
            line = f"{_MAKE_ROW_BELOW}{_SAVE}\x1b[B{_ERASE_LINE}{line}{_RESTORE}"
            if self._style:  # not every terminal restores it
                line = f"\x1b[0m{line}\x1b[0;{self._style}m"
        else:
            line = _ERASE_LINE + line
        sys.stderr.write(line)
        sys.stderr.flush()
        self._drawn = True

    def _erase(self) -> None:
        if not self._drawn:
            return
        sys.stderr.write(_ERASE_BELOW if self._text_on_screen else _ERASE_LINE)
        sys.stderr.flush()
        self._drawn = False


def _is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):  # closed, or no file
        return False


def fitting(status: str, room: int) -> str:
    """As many parts of a status, with dots ( · ) between them, as fit into `room` cells; the first one is cut."""
    while cell_len(status) > room and " · " in status:
        status = status.rpartition(" · ")[0]
    return set_cell_size(status, min(cell_len(status), room))


@contextmanager
def quiet_keyboard() -> Iterator[None]:
    """Typed characters wait for the next prompt instead of appearing inside the answer. Ctrl-C still works."""
    try:
        descriptor = sys.stdin.fileno()
        # A job in the background must not touch the terminal: the system would stop it.
        foreground = os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # stdin may be closed, or no file
        foreground = False
    if not foreground:
        yield
        return
    before = termios.tcgetattr(descriptor)
    during = termios.tcgetattr(descriptor)
    during[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSADRAIN, during)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
