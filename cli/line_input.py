"""Lines from a person or a pipe: prompts, multi-line input, and a history that survives."""

import contextlib
import json
import select
import sys
from collections.abc import Callable
from pathlib import Path

from dflash_mlx.cli.output import is_terminal
from dflash_mlx.cli.prompt import at_keyboard
from dflash_mlx.hub.leftovers import write_atomically

try:
    import readline
except ImportError:  # Some builds of Python come without it; plain input still works.
    readline = None  # type: ignore[assignment]

_KEPT = 1000
_FENCE = '"""'


class LineInput:
    """Reads turns. On a terminal with line editing, history and a prompt; from a pipe, as they come.

    complete: what a line may become, for the Tab key; see `chat_commands.completions`.
    """

    def __init__(self, history: Path, complete: Callable[[str], list[str]] | None = None) -> None:
        self.interactive = at_keyboard()
        self._history = history
        self._splits_pastes = True
        if self.interactive and readline is not None:
            readline.set_auto_history(False)
            for entry in read_history(history):
                readline.add_history(entry)
            self._bind_keys(complete)

    def _bind_keys(self, complete: Callable[[str], list[str]] | None) -> None:
        """Tab completes. What is pasted stays one turn: GNU readline knows how, and Python turns it off."""
        edits_like_bsd = "libedit" in (readline.__doc__ or "")
        if not edits_like_bsd:
            readline.parse_and_bind("set enable-bracketed-paste on")
            self._splits_pastes = False
        if complete is not None:
            readline.set_completer_delims("")
            readline.set_completer(lambda text, state: [*complete(text), None][state])
            readline.parse_and_bind("bind ^I rl_complete" if edits_like_bsd else "tab: complete")

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
                line = sys.stdin.readline() if sys.stdin is not None else ""
                return line.rstrip("\r\n") if line else None
            if not is_terminal(sys.stdout):
                # input() would write its prompt to stdout, where only answers belong.
                sys.stderr.write(prompt)
                sys.stderr.flush()
                prompt = ""
            return self._pasted_after(input(prompt))
        except EOFError:
            return None

    def _pasted_after(self, line: str) -> str:
        """The line, and those that were pasted with it where line editing does not keep them together."""
        edited = is_terminal(sys.stdout)
        with contextlib.suppress(EOFError):
            while (self._splits_pastes or not edited) and _more_was_pasted():
                line += "\n" + input()
        return line

    def _remember(self, turn: str) -> None:
        if readline is not None:
            readline.add_history(turn)
        # History is a comfort: a full disk or a read-only home must not end the conversation.
        with contextlib.suppress(OSError):
            write_history(self._history, [*read_history(self._history), turn])


def _more_was_pasted() -> bool:
    """Whether a further line is there already; nobody types one that fast."""
    try:
        return bool(select.select([sys.stdin.fileno()], [], [], 0)[0])
    except (OSError, ValueError):
        return False


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
