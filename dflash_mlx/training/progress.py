"""Progress on stderr: a live bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

_LINE_EVERY_SECONDS = 15.0


class Progress:
    """One stage's progress. Use as a context manager; `quiet` shows nothing."""

    def __init__(self, stage: str, *, quiet: bool = False) -> None:
        self.stage, self.quiet = stage, quiet
        self.console = Console(stderr=True)
        self._last_line = 0.0
        self._first: tuple[float, float] | None = None  # when the first update came, and its share
        self._bar: RichProgress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> "Progress":
        if self.console.is_terminal and not self.quiet:
            self._bar = RichProgress(
                TextColumn("{task.description:<9}"),
                BarColumn(bar_width=30),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=self.console,
            )
            self._task = self._bar.add_task(self.stage, total=1.0, note="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, share: float, note: str) -> None:
        """share: of the stage's budget, 0 to 1. note: what to say beside it."""
        note += self._left(share)
        if self._bar is not None:
            self._bar.update(self._task, completed=share, note=note)
        elif not self.quiet and (time.monotonic() - self._last_line >= _LINE_EVERY_SECONDS or share >= 1):
            self._last_line = time.monotonic()
            self._print(f"{self.stage}: {share:.0%}, {note}")

    def _left(self, share: float) -> str:
        """How long the rest takes, if it goes on as since the first update; nothing while that is a guess."""
        now = time.monotonic()
        if self._first is None:
            self._first = (now, share)
        began, at_first = self._first
        done = share - at_first
        if done <= 0.005 or share >= 1:
            return ""
        seconds = (now - began) * (1 - share) / done
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif not self.quiet:
            self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
