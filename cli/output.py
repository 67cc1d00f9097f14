"""Words and lines for people: what a response looks like, notes on stderr, progress while loading.

stdout carries results only. Everything here writes to stderr, in colour only on a terminal that wants it.
"""

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from dflash_mlx.generation import GenerationResponse

READING = "reading the prompt"
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "01234567"
# Group 1 is a command; else a part up to its dot, or the last one.
_COMMAND_OR_PART = re.compile(r"(`[^`]*`)|[^\s·][^·]* ·|(?<=· )[^·]+$")
_STYLES = {"dim": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def is_terminal(stream: TextIO) -> bool:
    """Whether a person watches the stream on something that understands cursor movements."""
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def styled(text: str, style: str, stream: TextIO) -> str:
    """`text` in a style, where the stream is a terminal and NO_COLOR is not set."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


def wrapped(text: str, stream: TextIO) -> str:
    """Text broken between words where `stream` is a narrow terminal.

    A line in columns, which have two or more spaces between them, goes on under its last column. Commands in backticks
    stay whole, so that they can be copied; so do parts with dots ( · ) between them, as long as they fit into a row.
    """
    if not is_terminal(stream):
        return text
    room = max(20, terminal_width() - 1)
    lines = []
    for line in text.split("\n"):
        columns = re.match(r"(.*\S)? {2,}(?=\S)", line)
        indent = columns.end() if columns and columns.end() < room - 20 else 0
        whole = _COMMAND_OR_PART.sub(lambda part: _glued(part[0]) if part[1] or len(part[0]) <= room else part[0], line)
        wrapper = textwrap.TextWrapper(
            room, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )
        lines.append(wrapper.fill(whole).replace("\0", " "))
    return "\n".join(lines)


def _glued(text: str) -> str:
    """Text with other characters in place of spaces, at which it is not broken."""
    return text.replace(" ", "\0")


def marked(mark: str, text: str, style: str, stream: TextIO) -> str:
    """A message that begins with a word in colour, such as "error:"."""
    return styled(mark, style, stream) + wrapped(f"{mark} {' '.join(text.split())}", stream).removeprefix(mark)


def note(text: str, *, style: str = "dim", copyable: bool = False) -> None:
    """Words on stderr, broken between words where a terminal is narrow. copyable: a command to copy, in one piece."""
    words = text if copyable else wrapped(text, sys.stderr)
    print(styled(words, style, sys.stderr), file=sys.stderr, flush=True)


def say(text: str, *, style: str | None = None) -> None:
    """A sentence of a result on stdout, broken between words where a terminal is narrow."""
    words = wrapped(text, sys.stdout)
    print(styled(words, style, sys.stdout) if style else words, flush=True)


def printable(text: str) -> str:
    """Text without control characters other than newline and tab: a model must not steer the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text)


def can_draw(stream: TextIO) -> bool:
    """Whether the stream's encoding has the block characters."""
    try:
        _BARS.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def picture(rounds: Iterable[tuple[int, int]], *, count: int = 16, unicode: bool = True) -> str:
    """The last rounds as bars, each a (width, num_accepted): the lowest for no draft kept, the highest for all."""
    bars = _BARS if unicode else _PLAIN_BARS
    shown = list(rounds)[-count:]
    return "".join(bars[round(kept / width * 7) if width else 0] for width, kept in shown)


def live_line(response: "GenerationResponse") -> str:
    """How the answer is going, for the line that is redrawn while it streams."""
    parts = [f"{response.generation_tps:5.1f} tok/s"]
    if response.acceptance is None:
        parts.append("plain decoding")
    else:
        parts += _acceptance(response)
        parts.append(picture(response.acceptance.recent, unicode=can_draw(sys.stderr)))
    return " · ".join(part for part in parts if part)


def summary(response: "GenerationResponse") -> list[str]:
    """How the answer went, after its end: `response` is the last one. One or two lines."""
    read = response.prompt_tokens - response.cached_tokens
    prompt = f"prompt {_tokens(response.prompt_tokens)}"
    if response.cached_tokens:
        prompt += f", {response.cached_tokens} of them already in memory"
    if read > 1:
        prompt += f", read at {response.prompt_tps:.0f} tok/s"
    limit = " (the limit)" if response.finish_reason == "length" else ""
    lines = [
        f"{_tokens(response.generation_tokens)}{limit} at {response.generation_tps:.1f} tok/s · {prompt} · "
        f"peak memory {response.peak_memory_gb:.1f} GB"
    ]
    acceptance = response.acceptance
    if acceptance is None:
        lines.append("plain decoding: no drafts")
    elif acceptance.rounds:
        rounds = "1 round" if acceptance.rounds == 1 else f"{acceptance.rounds} rounds"
        bars = picture(acceptance.recent, count=24, unicode=can_draw(sys.stderr))
        lines.append(f"{rounds}, {', '.join(_acceptance(response))} · {bars}")
    else:
        lines.append("no round used drafts")
    return lines


def _acceptance(response: "GenerationResponse") -> list[str]:
    acceptance = response.acceptance
    if acceptance is None or not acceptance.rounds:
        return []
    return [
        f"acceptance length {acceptance.mean_acceptance_length:.2f}",
        f"{acceptance.acceptance_rate:.0%} of drafts kept",
    ]


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


class LoadProgress:
    """Loading and downloading, as a line that is redrawn on a terminal, or a line for each new step elsewhere."""

    def __init__(self) -> None:
        self._live = is_terminal(sys.stderr)
        self._last_step = "starting MLX"

    def __enter__(self) -> "LoadProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

    def report(self, message: str, fraction: float | None) -> None:
        """Show a step and, where it is known, the part of it that is done."""
        if self._live:
            done = "" if fraction is None else f"  {_bar(fraction)} {fraction:4.0%}"
            room = max(20, terminal_width() - 1 - len(done))
            line = message if len(message) <= room else message[: room - 1] + "…"
            sys.stderr.write("\r\x1b[2K" + styled(line + done, "dim", sys.stderr))
            sys.stderr.flush()
            return
        # Counts within a message change all the time; a log wants each step once.
        step = re.sub(r"[\d.,]+", "", message)
        if step != self._last_step:
            self._last_step = step
            note(message)


def _bar(fraction: float, *, width: int = 20) -> str:
    full = round(min(max(fraction, 0.0), 1.0) * width)
    marks = "█░" if can_draw(sys.stderr) else "#."
    return marks[0] * full + marks[1] * (width - full)


def terminal_width() -> int:
    """Columns of the terminal behind stderr or stdout; 80 where that is unknown."""
    for stream in (sys.stderr, sys.stdout):
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(stream.fileno()).columns or 80
    return 80
