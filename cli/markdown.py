"""Markdown as it streams: what a stretch of text looks like on a terminal, without ever going back.

Headings, emphasis, code, lists, quotes and rules are shown by styles, and their markers go. Only what may become a
marker is held back, a few characters at most; everything else is shown at once. Tables stay as they are written.
"""

import re

# Spans of text with the SGR parameters of their style.
Spans = list[tuple[str, str]]
_BOLD, _ITALIC, _DIM, _CODE, _HEADING = "1", "3", "2", "36", "1;35"
_BLOCK = re.compile(r"(?P<indent>[ \t]*)(?:(?P<heading>#{1,6}) |(?P<item>[-*+]) (?=.)|(?P<quote>> ?))", re.DOTALL)
# The beginning of a line that may still become one of these, of a fence or of a rule.
_UNDECIDED = re.compile(r"[ \t]*(#{0,6}|[-*+] ?|>|`{1,2}|~{1,2}|[-*_](?: ?[-*_])*[ \t]*|(?:```|~~~)[^\n]*)")
_RULE = re.compile(r"[ \t]*([-*_])(?:[ \t]*\1){2,}[ \t]*")
_FENCE = re.compile(r"[ \t]*(```+|~~~+)[^\n]*")
_RULE_WIDTH = 24


class Markdown:
    """Text in, styled spans out."""

    def __init__(self) -> None:
        self._held = ""
        self._at_line_start = True
        self._fence = ""
        self._heading = False
        self._quote = False
        self._code = ""  # the backticks that a stretch of code waits for
        self._open: list[str] = []  # emphasis that is open: its markers
        self._before = " "

    def feed(self, text: str) -> Spans:
        """The next piece of text."""
        self._held += text
        return self._take(ended=False)

    def finish(self) -> Spans:
        """What was held back, when no more text comes."""
        return self._take(ended=True)

    def _take(self, *, ended: bool) -> Spans:
        spans: Spans = []
        while self._held:
            taken = self._line_start(spans, ended) if self._at_line_start else self._inline(spans, ended)
            if not taken:
                break
        return spans

    def _line_start(self, spans: Spans, ended: bool) -> bool:
        """What a line begins with; False where more text has to come first."""
        line, newline, _ = self._held.partition("\n")
        if not newline and not ended and _UNDECIDED.fullmatch(line):
            return False
        fence = _FENCE.fullmatch(line)
        if fence and (not self._fence or (fence[1].startswith(self._fence) and line.strip() == fence[1])):
            self._fence = "" if self._fence else fence[1]
            self._consume(len(line), spans, line, _DIM)
            self._at_line_start = False
        elif self._fence:
            self._at_line_start = False
        elif _RULE.fullmatch(line):
            self._consume(len(line), spans, "─" * _RULE_WIDTH, _DIM)
            self._at_line_start = False
        elif block := _BLOCK.match(self._held):
            self._block(block, spans)
        else:
            self._at_line_start = False
        return True

    def _block(self, block: "re.Match[str]", spans: Spans) -> None:
        if block["heading"]:
            self._heading, shown = True, ""
        elif block["item"]:
            shown = f"{block['indent']}• "
        else:
            self._quote, shown = True, f"{block['indent']}│ "
        self._consume(block.end(), spans, shown, _DIM if self._quote else "")
        # A quote may hold a list or a heading.
        self._at_line_start = bool(block["quote"])

    def _inline(self, spans: Spans, ended: bool) -> bool:
        """Text up to the next marker, or that marker."""
        special = "\n" if self._fence else "`\n" if self._code else "`*_\n"
        at = next((i for i, character in enumerate(self._held) if character in special), len(self._held))
        if at:
            self._consume(at, spans, self._held[:at], self._style())
            return True
        if self._held[0] == "\n":
            self._consume(1, spans, "\n", "")
            self._at_line_start, self._heading, self._quote = True, False, False
            self._code, self._open, self._before = "", [], " "
            return True
        run = self._held[: len(self._held) - len(self._held.lstrip(self._held[0]))]
        if len(run) == len(self._held) and not ended:
            return False
        self._marker(run, spans)
        return True

    def _marker(self, run: str, spans: Spans) -> None:
        """A run of backticks, asterisks or underscores: it opens or closes something, or is text."""
        after = self._held[len(run) : len(run) + 1] or " "
        if run[0] == "`":
            if self._code in ("", run):
                self._code = "" if self._code else run
                self._consume(len(run), spans, "", "")
            else:
                self._consume(len(run), spans, run, self._style())
            return
        inside_word = run[0] == "_" and self._before.isalnum() and after.isalnum()
        if run in self._open and not self._before.isspace() and not inside_word:
            self._open.remove(run)
        elif len(run) <= 3 and not after.isspace() and not inside_word and not self._joins_numbers(after):
            self._open.append(run)
        else:
            self._consume(len(run), spans, run, self._style())
            return
        self._consume(len(run), spans, "", "")

    def _joins_numbers(self, after: str) -> bool:
        """Whether an asterisk is a sign of multiplication."""
        return self._before.isalnum() and after.isalnum()

    def _style(self) -> str:
        if self._fence or self._code:
            return _CODE
        styles = [_HEADING] if self._heading else [_DIM] if self._quote else []
        lengths = {length for marker in self._open for length in ((1, 2) if len(marker) == 3 else (len(marker),))}
        return ";".join([*styles, *([_BOLD] if 2 in lengths else []), *([_ITALIC] if 1 in lengths else [])])

    def _consume(self, count: int, spans: Spans, shown: str, style: str) -> None:
        self._before = self._held[count - 1]
        self._held = self._held[count:]
        if shown:
            spans.append((shown, style))
