"""Lines from a person or a pipe: prompts, multi-line input, and a history that survives."""

import contextlib
import json
import sys
from pathlib import Path

from dflash_mlx.cli.output import is_terminal
from dflash_mlx.hub.leftovers import write_atomically

try:
    import readline
except ImportError:  # Some builds of Python come without it; plain input still works.
    readline = None  # type: ignore[assignment]

_KEPT = 1000
_FENCE = '"""'


class LineInput:
    """Reads turns. On a terminal with line editing, history and a prompt; from a pipe, as they come."""

    def __init__(self, history: Path) -> None:
        self.interactive = sys.stdin.isatty()
        self._history = history
        if self.interactive and readline is not None:
            readline.set_auto_history(False)
            for entry in read_history(history):
                readline.add_history(entry)

    def read(self) -> str | None:
        """The next turn, None at the end of input. A KeyboardInterrupt passes through.

        A line that ends with a backslash goes on with the next one; text between two \"\"\" may span lines.
        """
        first = self._line("> ")
        if first is None:
            return None
        lines = [first]
        if first.lstrip().startswith(_FENCE):
            lines = self._fenced(first.lstrip()[len(_FENCE) :])
        else:
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(self._line(". ") or "")
        turn = "\n".join(lines)
        if self.interactive and turn.strip():
            self._remember(turn)
        return turn

    def _fenced(self, rest: str) -> list[str]:
        lines: list[str] = []
        while not rest.rstrip().endswith(_FENCE):
            lines.append(rest)
            following = self._line(". ")
            if following is None:
                return lines
            rest = following
        lines.append(rest.rstrip()[: -len(_FENCE)])
        return lines

    def _line(self, prompt: str) -> str | None:
        try:
            if not self.interactive:
                line = sys.stdin.readline()
                return line.rstrip("\r\n") if line else None
            if not is_terminal(sys.stdout):
                # input() would write its prompt to stdout, where only answers belong.
                sys.stderr.write(prompt)
                sys.stderr.flush()
                prompt = ""
            return input(prompt)
        except EOFError:
            return None

    def _remember(self, turn: str) -> None:
        if readline is not None:
            readline.add_history(turn)
        # History is a comfort: a full disk or a read-only home must not end the conversation.
        with contextlib.suppress(OSError):
            write_history(self._history, [*read_history(self._history), turn])


def read_history(path: Path) -> list[str]:
    """Turns of earlier conversations, oldest first; damaged lines are skipped."""
    entries: list[str] = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, str):
                    entries.append(entry)
    return entries


def write_history(path: Path, entries: list[str]) -> None:
    """Keep the last entries: a JSON string a line, readable by the user alone. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(entry) + "\n" for entry in entries[-_KEPT:]))
