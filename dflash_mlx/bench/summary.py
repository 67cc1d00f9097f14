"""From the runs of a benchmark to its figures. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dflash_mlx.bench.runner import Mode, PromptResult


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a group of prompts. None where nothing was measured.

    Medians are taken over the prompts, each prompt's own figure being the median of its repeats. Of the two speedups
    `speedup_median` is the median of the prompts' ratios (each prompt counts alike), and `speedup_total` compares
    tokens a second over all runs together (slow prompts count more); where the answers are identical it is
    plain decoding's total time over drafted decoding's. Both are of decoding, after the first token;
    `speedup_wall` is the same as `speedup_total` with prompt processing counted in.
    """

    group: str
    prompts: int
    plain_tps: float | None
    drafted_tps: float | None
    speedup_median: float | None
    speedup_total: float | None
    speedup_wall: float | None
    plain_first_s: float | None
    drafted_first_s: float | None
    mean_acceptance_length: float | None
    acceptance_rate: float | None
    identical: int | None


def summarize(results: Sequence[PromptResult], *, draft: bool = True) -> list[Summary]:
    """A Summary for each category, in order of appearance, and then one for all ("all").

    Prompts that were not run in every mode are left out, so that both modes' figures are of the same prompts.
    """
    complete = [r for r in results if r.of("plain") and (r.of("drafted") or not draft)]
    categories = dict.fromkeys(result.prompt.category for result in complete)
    groups = [(name, [r for r in complete if r.prompt.category == name]) for name in categories]
    if complete:
        groups.append(("all", complete))
    return [_summary(name, group, draft=draft) for name, group in groups]


def _summary(name: str, group: Sequence[PromptResult], *, draft: bool) -> Summary:
    return Summary(
        group=name,
        prompts=len(group),
        plain_tps=_median([r.tps("plain") for r in group]),
        drafted_tps=_median([r.tps("drafted") for r in group]),
        speedup_median=_median([r.speedup for r in group]),
        speedup_total=_ratio(_total_tps(group, "plain"), _total_tps(group, "drafted")),
        speedup_wall=_ratio(_wall_tps(group, "plain"), _wall_tps(group, "drafted")),
        plain_first_s=_median([r.first_s("plain") for r in group]),
        drafted_first_s=_median([r.first_s("drafted") for r in group]),
        mean_acceptance_length=_median([r.acceptance("mean_acceptance_length") for r in group]),
        acceptance_rate=_median([r.acceptance("acceptance_rate") for r in group]),
        identical=sum(r.first_difference is None for r in group) if draft else None,
    )


def _total_tps(group: Sequence[PromptResult], mode: Mode) -> float | None:
    """Tokens a second of decoding, over all runs together."""
    runs = [run for result in group for run in result.of(mode)]
    seconds = sum(run.decode_s for run in runs)
    return sum(run.decode_tokens for run in runs) / seconds if seconds > 0 else None


def _wall_tps(group: Sequence[PromptResult], mode: Mode) -> float | None:
    """Tokens a second from the request to the last token, over all runs together."""
    runs = [run for result in group for run in result.of(mode)]
    seconds = sum(run.wall_s for run in runs)
    return sum(len(run.token_ids) for run in runs) / seconds if seconds > 0 else None


def _ratio(plain: float | None, drafted: float | None) -> float | None:
    return drafted / plain if plain and drafted else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
