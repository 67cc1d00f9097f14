"""How good the automatic choice of drafts was, beside fixed choices in the same runs. Pure functions.

On a busy machine rounds of the same kind differ by far more than choices do. So each round counts as long as the median
of its kind took, whoever's round it was. What the choosing itself takes is not in that; the measured speeds hold it.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from dflash_mlx.bench.record import PromptResult, Results, Round, Run

# How a contestant says that its drafts are chosen as it decodes.
BY_SPEED = "width by measured speed"
_FIXED = re.compile(r"(width|tree)=\d+")


@dataclass(frozen=True)
class Chosen:
    """The automatic choice beside fixed ones.

    best: of `fixed` choices, the one with the most tokens a second over all prompts; share: the automatic one's speed
    of that. lowest, highest: its speed for a single prompt, of the best fixed choice that wrote the same answer; None
    where there was no such prompt. Another answer may be easier to draft.
    """

    best: str
    fixed: int
    share: float
    lowest: float | None
    highest: float | None


def judged(results: Results, prompts: Sequence[PromptResult]) -> Chosen | None:
    """None where the main contestant does not choose, or no fixed choice takes part."""
    fixed = [name for name in results.others if _FIXED.fullmatch(name)]
    if not fixed or BY_SPEED not in results.contestants[results.main]:
        return None
    contestants = [results.main, *fixed]
    times: dict[tuple[int, bool], list[float]] = {}
    for r in (r for result in prompts for name in contestants for run in result.of(name) for r in run.rounds):
        times.setdefault(_kind(r), []).append(r.ms)
    usual = {kind: median(found) for kind, found in times.items()}

    def speed(runs: Iterable[Run]) -> float:
        rounds = [r for run in runs for r in run.rounds]
        lasted = sum(usual[_kind(r)] for r in rounds)
        return sum(r.tokens for r in rounds) / lasted if lasted else 0.0

    overall = {name: speed(run for result in prompts for run in result.of(name)) for name in contestants}
    best = max(fixed, key=lambda name: overall[name])
    if not overall[best]:
        return None
    shares = []
    for result in prompts:
        rivals = [speed(result.of(name)) for name in fixed if result.first_difference(name, results.main) is None]
        if most := max(rivals, default=0.0):
            shares.append(speed(result.of(results.main)) / most)
    share = overall[results.main] / overall[best]
    return Chosen(best, len(fixed), share, min(shares, default=None), max(shares, default=None))


def _kind(r: Round) -> tuple[int, bool]:
    """Rounds take as long as others of as many drafts, in a chain or in a tree that branches."""
    return r.width, r.depth < r.width
