"""Small drawings as SVG: bars and lines with axes. Colours come from the page's style, so that dark pages work.

All are 400 units wide, which is about the width of a phone: text keeps its size there, and grows little elsewhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 400.0
_ROW = 22.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 48.0, 14.0, 18.0, 44.0
_HEIGHT = 250.0
_LETTER = 8.0  # the width of a letter in the wider fonts
_LONG = 20  # letters of a label that still stands beside its bar
_SERIES = 6  # colours that the page's style knows; further series have them again, hollow and dashed
_BESIDE = 3.0  # between the points of several series that stand at the same place


@dataclass(frozen=True)
class Bar:
    """A bar with a label to its left; low and high: how sure it is. below: it lies on the bad side of the mark."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None
    below: bool = False


@dataclass(frozen=True)
class Point:
    """A point of a line; low and high: its range."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """A line, or points without one. colour: a number, the same for the same thing in all drawings."""

    name: str
    points: Sequence[Point]
    joined: bool = True
    colour: int = 0


@dataclass
class _Drawing:
    height: float
    title: str
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.parts.append(f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}" class="{kind}"/>')

    def text(self, x: float, y: float, words: str, *, anchor: str = "middle", kind: str = "label") -> None:
        place = f'x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" class="{kind}"'
        self.parts.append(f"<text {place}>{escape(words)}</text>")

    def rect(self, x: float, y: float, width: float, height: float, kind: str, words: str) -> None:
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(max(width, 0.5))}" height="{_n(height)}" rx="2" class="{kind}"'
        self.parts.append(f"<rect {place}><title>{escape(words)}</title></rect>")

    def dot(self, x: float, y: float, kind: str, words: str) -> None:
        self.parts.append(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="3.2" class="{kind}"><title>{escape(words)}</title></circle>'
        )

    def path(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        drawn = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self.parts.append(f'<polyline points="{drawn}" class="{kind}"/>')

    def to_svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {_n(WIDTH)} {_n(self.height)}" role="img" aria-label="{escape(self.title)}" '
            f'xmlns="http://www.w3.org/2000/svg">{"".join(self.parts)}</svg>'
        )


def ticks(high: float, *, about: int = 5) -> list[float]:
    """Round numbers from 0 to the first one that is at least `high`, about this many steps."""
    if not high > 0:
        return [0.0, 1.0]
    rough = high / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    count = math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(count + 1)]


def bar_chart(title: str, bars: Sequence[Bar], *, unit: str, mark: float | None = None) -> str:
    """Horizontal bars, one below the other; `mark` is a value to compare with, drawn as a line."""
    left = 16 + _LETTER * max(len(bar.label) for bar in bars)
    # Long labels stand above their bars.
    above = max(len(bar.label) for bar in bars) > _LONG
    row = _ROW + 16 if above else _ROW
    if above:
        left = 10.0
    top, bottom = _TOP, _TOP + len(bars) * row
    drawing = _Drawing(bottom + _BOTTOM, title)
    high = max(max(bar.value, bar.high or 0.0) for bar in bars)
    steps = ticks(max(high, mark or 0.0))
    # The number beside the longest bar needs room, too.
    scale = (WIDTH - _RIGHT - 40 - left) / steps[-1]
    for step in steps:
        drawing.line(left + step * scale, top, left + step * scale, bottom, "grid")
        drawing.text(left + step * scale, bottom + 17, f"{step:g}")
    drawing.text((left + WIDTH - _RIGHT) / 2, bottom + 36, unit)
    texts = _Drawing(0, "")  # over everything else
    for index, bar in enumerate(bars):
        y = top + (index + 1) * row - _ROW
        words = f"{bar.label}: {bar.value:.3g} {unit}"
        if above:
            texts.text(left, y - 1, _cut(bar.label, WIDTH - left), anchor="start")
        else:
            texts.text(left - 6, y + 15.5, bar.label, anchor="end")
        drawing.rect(left, y + 4, bar.value * scale, _ROW - 8, "bar bad" if bar.below else "bar", words)
        end = bar.value
        if bar.low is not None and bar.high is not None:
            drawing.line(left + bar.low * scale, y + _ROW / 2, left + bar.high * scale, y + _ROW / 2, "range")
            end = max(end, bar.high)
        beside = left + end * scale + 4
        if mark is not None and beside - 4 <= left + mark * scale <= beside + 4 * _LETTER:
            beside = left + mark * scale + 5  # the mark would go through the number
        texts.text(beside, y + 15.5, f"{bar.value:.2f}", anchor="start", kind="value")
    if mark is not None:
        drawing.line(left + mark * scale, top - 4, left + mark * scale, bottom, "mark")
    drawing.parts += texts.parts
    return drawing.to_svg()


def line_chart(title: str, series: Sequence[Series], *, x: str, y: str, percent: bool = False) -> str:
    """Lines or points over a numeric axis, with ranges where they are known. The legend is below it."""
    points = [point for one in series for point in one.points]
    xs = sorted({point.x for point in points})
    steps = [0.0, 0.25, 0.5, 0.75, 1.0] if percent else ticks(max(max(p.y, p.high or 0.0) for p in points))
    legend = _legend_rows(series)
    drawing = _Drawing(_HEIGHT + 16 * len(legend), title)
    left, bottom = _LEFT, _HEIGHT - _BOTTOM
    first, last = (xs[0], xs[-1]) if len(xs) > 1 else (xs[0] - 1, xs[0] + 1)
    across = (WIDTH - _RIGHT - left - 20) / (last - first)
    up = (bottom - _TOP) / steps[-1]

    def place(point: Point) -> tuple[float, float]:
        return left + 10 + (point.x - first) * across, bottom - point.y * up

    for step in steps:
        drawing.line(left, bottom - step * up, WIDTH - _RIGHT, bottom - step * up, "grid")
        words = f"{step:.0%}" if percent else f"{step:g}"
        drawing.text(left - 6, bottom - step * up + 4, words, anchor="end")
    for value in _apart(xs, across):
        drawing.text(left + 10 + (value - first) * across, bottom + 17, f"{value:g}")
    drawing.text((left + WIDTH) / 2, bottom + 36, x)
    drawing.text(left, _TOP - 6, y, anchor="start", kind="unit")
    for index, one in enumerate(series):
        colour = _colour(one.colour)
        beside = 0.0 if one.joined else (index - (len(series) - 1) / 2) * _BESIDE
        if one.joined and len(one.points) > 1:
            drawing.path([place(point) for point in one.points], f"line {colour}")
        for point in one.points:
            at, height = place(point)
            at += beside
            if point.low is not None and point.high is not None:
                drawing.line(at, bottom - point.low * up, at, bottom - point.high * up, f"spread {colour}")
            shown = f"{point.y:.1%}" if percent else f"{point.y:.4g}"
            drawing.dot(at, height, f"dot {colour}", f"{one.name}: {point.x:g}, {shown}")
    _draw_legend(drawing, legend)
    return drawing.to_svg()


def _legend_rows(series: Sequence[Series]) -> list[list[tuple[int, str, float]]]:
    """(colour, name, x) of each entry, in as many lines as they need."""
    rows: list[list[tuple[int, str, float]]] = []
    x = WIDTH
    for one in series:
        name = _cut(one.name, WIDTH - _LEFT - 24)
        needed = 30 + _LETTER * len(name)
        if x + needed > WIDTH - 4:
            rows.append([])
            x = _LEFT
        rows[-1].append((one.colour, name, x))
        x += needed
    return rows


def _draw_legend(drawing: _Drawing, rows: Sequence[Sequence[tuple[int, str, float]]]) -> None:
    for line, row in enumerate(rows):
        for colour, name, x in row:
            y = _HEIGHT + 8 + 16 * line
            drawing.rect(x, y - 8, 10, 10, f"key {_colour(colour)}", name)
            drawing.text(x + 15, y + 1, name, anchor="start")


def _colour(number: int) -> str:
    """The class of a series' parts."""
    return f"s{number % _SERIES}{' again' if number >= _SERIES else ''}"


def _apart(values: Sequence[float], scale: float, *, least: float = 30.0) -> list[float]:
    """The values whose labels have room beside each other."""
    kept: list[float] = []
    for value in values:
        if not kept or (value - kept[-1]) * scale >= least:
            kept.append(value)
    return kept


def _cut(words: str, room: float) -> str:
    """Words that fit into this many units."""
    most = max(4, int((room - 8) / _LETTER))
    return words if len(words) <= most else words[: most - 1] + "…"


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
