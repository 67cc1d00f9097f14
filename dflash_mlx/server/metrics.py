"""Figures for Prometheus, in its text format (version 0.0.4)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
BETWEEN_TOKENS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
TOKENS_A_SECOND = (1, 2, 5, 10, 20, 40, 80, 160, 320, 640)

Labels = tuple[tuple[str, str], ...]


@dataclass
class Histogram:
    """Counts of values by upper bound, Prometheus' way: each bucket includes the smaller ones."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.bounds)

    def observe(self, value: float) -> None:
        self.count += 1
        self.total += value
        for i, bound in enumerate(self.bounds):
            self.counts[i] += value <= bound


@dataclass
class Metrics:
    """What the HTTP side counts; the worker counts the rest."""

    requests: dict[Labels, int] = field(default_factory=dict)
    request_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queued_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    first_token_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    tokens_a_second: Histogram = field(default_factory=lambda: Histogram(TOKENS_A_SECOND))

    def count_request(self, route: str, status: int, seconds: float) -> None:
        labels = (("route", route), ("status", str(status)))
        self.requests[labels] = self.requests.get(labels, 0) + 1
        self.request_seconds.observe(seconds)


def counter(name: str, meaning: str, values: Mapping[Labels, float]) -> list[str]:
    return _family(name, "counter", meaning, values.items())


def gauge(name: str, meaning: str, value: float) -> list[str]:
    return _family(name, "gauge", meaning, [((), value)])


def histogram(name: str, meaning: str, found: Histogram) -> list[str]:
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} histogram"]
    for bound, count in zip(found.bounds, found.counts, strict=True):
        lines.append(f'{name}_bucket{{le="{bound:g}"}} {count}')
    return [
        *lines,
        f'{name}_bucket{{le="+Inf"}} {found.count}',
        f"{name}_sum {found.total:.6g}",
        f"{name}_count {found.count}",
    ]


def _family(name: str, kind: str, meaning: str, values: Iterable[tuple[Labels, float]]) -> list[str]:
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
    for labels, value in values:
        inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
        lines.append(f"{name}{{{inner}}} {value:.10g}" if inner else f"{name} {value:.10g}")
    return lines


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
