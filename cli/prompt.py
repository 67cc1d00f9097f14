"""What is asked: the prompt, files that are attached to it, and text that is piped in."""

import os
import re
import select
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_mlx.cli.output import note
from dflash_mlx.errors import PromptError, UsageError
from dflash_mlx.ranks import started_together

# Programs that start others often leave a pipe open to which nobody ever writes. So where a prompt is there already,
# the first piped text is waited for only this long; once something comes, it is read to its end.
SECONDS_FOR_A_PIPE = 2.0


def read_prompt(prompt: str | None, files: Sequence[Path] = ()) -> str:
    """The whole prompt: the argument, then the files, then what is piped in. Raises UsageError and PromptError.

    "-" as the prompt or as a file, or neither of them in a pipe, waits for stdin.
    """
    if prompt is None and not files and at_keyboard():
        raise UsageError('there is no prompt; give one ("Why is the sky blue?"), or pipe text into the command.')
    from_stdin = prompt == "-" or Path("-") in files or (prompt is None and not files)
    piped = _read_stdin() if from_stdin or _is_piped_in() else ""
    if from_stdin and not piped.strip():
        raise PromptError("the prompt is empty; nothing came in on stdin.")
    attached = [attachment(path) for path in files if path != Path("-")]
    parts = attached if prompt in (None, "-") else [_checked(str(prompt)), *attached]
    if piped.strip():
        parts.insert(0 if prompt == "-" else len(parts), piped.rstrip("\n"))
    return "\n\n".join(parts)


def attachment(path: Path) -> str:
    """A text file as a part of a prompt: its name, and its text between fences. Raises UsageError and PromptError."""
    text = read_text(path)
    if not text.strip():
        raise PromptError(f"{path} is empty; attach a file with text in it.")
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}"


def read_text(path: Path) -> str:
    """The text of a file that the user named. Raises UsageError and PromptError."""
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except UnicodeError:
        raise PromptError(f"{path} is not UTF-8 text; give a text file, or convert it with iconv first.") from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {path}: {reason}. Give the path of a text file.") from None


def at_keyboard() -> bool:
    """Whether stdin is a terminal; it can also be closed."""
    return sys.stdin is not None and sys.stdin.isatty()


def _is_piped_in() -> bool:
    """Whether someone gives text on stdin, beside a prompt: a pipe with something in it, or a file from its start.

    A file that was read in part belongs to the loop or script that reads it. Devices such as /dev/null say nothing.
    """
    if started_together():  # MLX's launcher keeps a pipe open to each of its programs
        return False
    try:
        descriptor = sys.stdin.fileno()
        kind = os.fstat(descriptor).st_mode
        if stat.S_ISREG(kind):
            return os.lseek(descriptor, 0, os.SEEK_CUR) == 0
        if not (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
            return False
        if select.select([descriptor], [], [], SECONDS_FOR_A_PIPE)[0]:
            return True
    except (AttributeError, OSError, ValueError):  # closed, or no file at all
        return False
    note(
        f"nothing came in on stdin within {SECONDS_FOR_A_PIPE:.0f} seconds, so the prompt goes alone. "
        "`-f -` waits for stdin; `< /dev/null` says that there is nothing."
    )
    return False


def _read_stdin() -> str:
    try:
        return sys.stdin.read() if sys.stdin is not None else ""
    except UnicodeError:
        raise _not_text() from None


def _checked(prompt: str) -> str:
    try:
        prompt.encode("utf-8")
    except UnicodeError:
        raise _not_text() from None
    if not prompt.strip():
        raise PromptError("the prompt is empty; write some text.")
    return prompt


def _not_text() -> PromptError:
    return PromptError("the prompt is not valid UTF-8 text; convert it first, for instance with iconv.")
