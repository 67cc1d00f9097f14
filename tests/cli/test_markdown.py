"""Markdown on a terminal: what is shown, in which style, whatever the pieces in which it comes."""

import random
import textwrap

import pytest
from screen import Screen

from dflash_mlx.cli import live
from dflash_mlx.cli.live import LiveText
from dflash_mlx.cli.markdown import Markdown

BOLD, ITALIC, DIM, CODE, HEADING = "1", "3", "2", "36", "1;35"


def spans(*pieces: str) -> list[tuple[str, str]]:
    """Neighbours of one style as one."""
    markdown, joined = Markdown(), []
    for text, style in [*(span for piece in pieces for span in markdown.feed(piece)), *markdown.finish()]:
        if joined and joined[-1][1] == style:
            joined[-1] = (joined[-1][0] + text, style)
        else:
            joined.append((text, style))
    return joined


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain words", [("plain words", "")]),
        ("a **b c** d", [("a ", ""), ("b c", BOLD), (" d", "")]),
        ("*a* and _b_", [("a", ITALIC), (" and ", ""), ("b", ITALIC)]),
        ("***a***", [("a", f"{BOLD};{ITALIC}")]),
        ("**a *b* c**", [("a ", BOLD), ("b", f"{BOLD};{ITALIC}"), (" c", BOLD)]),
        ("use `a * b` now", [("use ", ""), ("a * b", CODE), (" now", "")]),
        ("``a`b``", [("a`b", CODE)]),
        ("2 * 3 * 4, 2*3*4, a_b_c", [("2 * 3 * 4, 2*3*4, a_b_c", "")]),
        ("# Title\ntext", [("Title", HEADING), ("\ntext", "")]),
        ("#hashtag", [("#hashtag", "")]),
        ("- one\n* two\n  + three", [("• one\n• two\n  • three", "")]),
        ("1. one\n2. two", [("1. one\n2. two", "")]),
        ("> so\nit is", [("│ so", DIM), ("\nit is", "")]),
        ("---\n", [("─" * 24, DIM), ("\n", "")]),
        ("**not closed\nnext", [("not closed", BOLD), ("\nnext", "")]),
        ("```py\nx = *a\n# b\n```\nend", [("```py", DIM), ("\n", ""), ("x = *a", CODE), ("\n", ""), ("# b", CODE),
                                         ("\n", ""), ("```", DIM), ("\nend", "")]),
        ("| a | b |\n|---|---|", [("| a | b |\n|---|---|", "")]),
        ("a *", [("a *", "")]),
        ("-", [("-", "")]),
        ("", []),
    ],
)  # fmt: skip
def test_what_is_shown(text, shown):
    assert spans(text) == shown
    assert spans(*text) == shown, "a character at a time"


def test_little_is_held_back():
    """Words are shown as they come: only what may become a marker waits."""
    markdown = Markdown()
    for piece in ("some ", "words", " and ", "more"):
        assert "".join(text for text, _ in markdown.feed(piece)) == piece


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_rows_break_between_words(monkeypatch, columns):
    """Styles take no room: the rows are those of the text without markers."""
    rng = random.Random(columns)
    words = ["word", "**bold**", "`code`", "*some*", "longer-than-others", "a"]
    text = " ".join(rng.choice(words) for _ in range(200))
    screen = Screen(columns, 50)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(live, "terminal_width", lambda: columns)
    monkeypatch.setattr(live, "_SECONDS_BETWEEN_DRAWINGS", 0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with LiveText(markdown=True) as shown:
        rest = text
        while rest:
            size = rng.randrange(1, 9)
            shown.write(rest[:size], "status")
            rest = rest[size:]
    assert shown.text == text, "what is said to the model stays as it was written"
    bare = text.replace("*", "").replace("`", "")
    expected = textwrap.wrap(bare, columns, break_on_hyphens=False)
    assert [row.rstrip() for row in screen.text()] == expected


def test_pipes_get_the_text_as_it_is(capsys):
    with LiveText(markdown=True) as shown:
        shown.write("**a** `b`\n", "")
    assert capsys.readouterr().out == "**a** `b`\n"
