"""Loss and acceptance over time as an SVG picture, written by hand."""

from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 720, 220, 64, 36, 60
_STYLE = "font-family:sans-serif;font-size:12px;fill:#333"


@dataclass(frozen=True)
class Curve:
    """Points (x, y) with a title; x is in training steps."""

    title: str
    colour: str
    points: Sequence[tuple[float, float]]


def draw_curves(curves: Sequence[Curve]) -> str:
    """An SVG with one panel a curve; curves without two points are left out."""
    shown = [curve for curve in curves if len(curve.points) >= 2]
    height = _TOP + len(shown) * (_HEIGHT + _GAP)
    panels = [_panel(curve, _TOP + i * (_HEIGHT + _GAP)) for i, curve in enumerate(shown)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH + _LEFT + 24} {height}" '
        f'width="{_WIDTH + _LEFT + 24}" height="{height}">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(panels)
        + "\n</svg>\n"
    )


def _panel(curve: Curve, top: float) -> str:
    xs, ys = [p[0] for p in curve.points], [p[1] for p in curve.points]
    low, high = min(ys), max(ys)
    margin = 0.05 * (high - low) or 0.5
    low, high = low - margin, high + margin
    left, right = min(xs), max(xs)

    def place(x: float, y: float) -> str:
        across = _LEFT + (x - left) / ((right - left) or 1) * _WIDTH
        return f"{across:.1f},{top + (high - y) / (high - low) * _HEIGHT:.1f}"

    lines = [f'<text x="{_LEFT}" y="{top - 10}" style="{_STYLE};font-weight:bold">{_escape(curve.title)}</text>']
    for i in range(5):
        value = low + (high - low) * i / 4
        y = top + (high - value) / (high - low) * _HEIGHT
        lines.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" style="{_STYLE}">{value:.2f}</text>')
        step = left + (right - left) * i / 4
        across = _LEFT + _WIDTH * i / 4
        lines.append(
            f'<text x="{across:.1f}" y="{top + _HEIGHT + 18}" text-anchor="middle" style="{_STYLE}">{step:,.0f}</text>'
        )
    points = " ".join(place(x, y) for x, y in curve.points)
    lines.append(f'<polyline points="{points}" fill="none" stroke="{curve.colour}" stroke-width="2"/>')
    return "\n".join(lines)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
