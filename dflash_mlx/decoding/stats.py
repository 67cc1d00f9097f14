"""What the rounds of one answer achieved."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Acceptance:
    """Running totals over the rounds of one answer.

    `tokens` is what the rounds emitted (kept drafts and the target's own tokens); `single_steps` counts the
    tokens that came without drafts: the first one and those while drafting paused. Together they are the
    answer's token count.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    single_steps: int = 0
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=64))
    _verified: list[int] = field(default_factory=list)
    _kept: list[int] = field(default_factory=list)
    _histogram: list[int] = field(default_factory=list)

    def record(self, *, width: int, depth: int, num_accepted: int, tokens: int) -> None:
        """Count a round that verified `width` drafts, of which `depth` could be kept, kept `num_accepted` and emitted
        `tokens` tokens."""
        if width == 0:
            self.single_steps += tokens
            return
        self.rounds += 1
        self.drafted += width
        self.accepted += num_accepted
        self.tokens += tokens
        self.recent.append((depth, num_accepted))
        for counts, upto in ((self._verified, depth), (self._kept, num_accepted)):
            counts.extend([0] * (upto - len(counts)))
            for i in range(upto):
                counts[i] += 1
        self._histogram.extend([0] * (num_accepted + 1 - len(self._histogram)))
        self._histogram[num_accepted] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens a drafted round gained (the papers' tau); 0 before the first round."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Drafts kept / drafts verified; 0 before the first round."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def per_position(self) -> list[float]:
        """For draft position 1, 2, ...: the share of rounds verifying that position which kept it."""
        kept = self._kept + [0] * (len(self._verified) - len(self._kept))
        return [k / v for k, v in zip(kept, self._verified, strict=True)]

    @property
    def histogram(self) -> list[int]:
        """Number of rounds by num_accepted, from 0."""
        return list(self._histogram)

    def to_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "per_position": [round(rate, 4) for rate in self.per_position],
            "histogram": self.histogram,
            "single_steps": self.single_steps,
        }
