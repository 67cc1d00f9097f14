"""From runs to figures, and to the sentences that say what they mean. Pure functions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_mlx.bench.choices import judged
from dflash_mlx.bench.record import PromptResult, Results, Round, Run, ratio
from dflash_mlx.bench.statistics import Interval, median_interval, middle, quantile, ratio_interval

ALL = "all"
DRAFTED = "drafted"  # the contestant that drafts as this project does when nobody asks for anything else


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One contestant in one setting over a group of prompts. None where nothing was measured.

    Medians are taken over the prompts, each prompt's own figure being the median of its repeats. Speedups are over the
    baseline: `speedup` of decoding after the first token, `answer_speedup` of whole answers, both medians of the
    prompts' ratios (each prompt counts alike); `speedup_total` compares tokens a second of decoding over all runs
    together (slow prompts count more). slower: prompts whose whole answer took longer than the baseline's.
    identical: prompts whose tokens are the baseline's. round_ms: a round that verified drafts, of the baseline one
    without, in milliseconds. break_even: the acceptance length from which such rounds are faster than the baseline's.
    """

    setting: str
    group: str
    contestant: str
    prompts: int
    tps: float | None
    tps_interval: Interval | None
    prefill_tps: float | None
    first_s: float | None
    speedup: float | None
    speedup_interval: Interval | None
    answer_speedup: float | None
    answer_interval: Interval | None
    speedup_total: float | None
    slower: int | None
    mean_acceptance_length: float | None
    acceptance_rate: float | None
    round_ms: float | None
    break_even: float | None
    identical: int | None
    peak_memory_gb: float | None
    joules_per_token: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def analyse(results: Results) -> list[Figures]:
    """For each setting the categories in order of appearance, then all prompts; in each group every contestant.

    Prompts that did not run with every contestant are left out, so that all figures are of the same prompts.
    """
    found = []
    for setting in results.settings:
        complete = complete_in(results, setting)
        categories = dict.fromkeys(result.prompt.category for result in complete)
        groups = [(name, [r for r in complete if r.prompt.category == name]) for name in categories]
        for name, group in [*groups, (ALL, complete)] if complete else []:
            found += [_figures(results, setting, name, contestant, group) for contestant in results.contestants]
    return found


def complete_in(results: Results, setting: str) -> list[PromptResult]:
    """The prompts of a setting that every contestant has answered."""
    return [r for r in results.prompts if r.setting == setting and complete(results, r)]


def _figures(results: Results, setting: str, group: str, contestant: str, prompts: Sequence[PromptResult]) -> Figures:
    baseline = results.baseline
    other = contestant != baseline
    runs = [run for result in prompts for run in result.of(contestant)]
    decode = pairs_of(prompts, baseline, contestant, "decode_tps") if other else []
    answer = pairs_of(prompts, baseline, contestant, "answer_tps") if other else []
    speeds = [[tps for run in result.of(contestant) if (tps := run.decode_tps)] for result in prompts]
    ratios = [result.answer_speedup(contestant, baseline) for result in prompts] if other else []
    compared = other and contestant in results.comparable.get(setting, [])
    plain_ms = middle(result.plain_round_ms(baseline) for result in prompts)
    round_ms = middle(result.drafted_round_ms(contestant) for result in prompts) if other else plain_ms
    return Figures(
        setting=setting,
        group=group,
        contestant=contestant,
        prompts=len(prompts),
        tps=middle(result.tps(contestant) for result in prompts),
        tps_interval=median_interval([values for values in speeds if values]),
        prefill_tps=middle(run.prefill_tps for run in runs),
        first_s=middle(middle(run.first_s for run in result.of(contestant)) for result in prompts),
        speedup=middle(result.speedup(contestant, baseline) for result in prompts) if other else None,
        speedup_interval=ratio_interval(decode),
        answer_speedup=middle(ratios),
        answer_interval=ratio_interval(answer),
        speedup_total=_total_ratio(prompts, baseline, contestant) if other else None,
        slower=sum(1 for value in ratios if value is not None and value < 1) if other else None,
        mean_acceptance_length=middle(r.acceptance(contestant, "mean_acceptance_length") for r in prompts),
        acceptance_rate=middle(r.acceptance(contestant, "acceptance_rate") for r in prompts),
        round_ms=round_ms,
        break_even=ratio(plain_ms, round_ms) if other else None,
        identical=sum(r.first_difference(contestant, baseline) is None for r in prompts) if compared else None,
        peak_memory_gb=max((run.peak_memory_gb for run in runs if run.peak_memory_gb), default=None),
        joules_per_token=_joules_per_token(runs),
    )


def pairs_of(
    prompts: Sequence[PromptResult], below: str, above: str, speed: str
) -> list[tuple[list[float], list[float]]]:
    """For each prompt the speeds of two contestants in all repeats; prompts without any are left out."""
    both = [
        tuple([value for run in result.of(name) if (value := getattr(run, speed))] for name in (below, above))
        for result in prompts
    ]
    return [(one, other) for one, other in both if one and other]


def _total_ratio(prompts: Sequence[PromptResult], baseline: str, contestant: str) -> float | None:
    speeds = []
    for name in (baseline, contestant):
        runs = [run for result in prompts for run in result.of(name)]
        seconds = sum(run.decode_s for run in runs)
        speeds.append(sum(run.decode_tokens for run in runs) / seconds if seconds > 0 else 0.0)
    return speeds[1] / speeds[0] if all(speeds) else None


def _joules_per_token(runs: Sequence[Run]) -> float | None:
    known = [run for run in runs if run.joules is not None]
    tokens = sum(run.tokens for run in known)
    return sum(run.joules or 0.0 for run in known) / tokens if tokens else None


def rounds_of(results: Results, contestant: str) -> list[Round]:
    """All rounds that verified drafts."""
    return [r for result in results.prompts for run in result.of(contestant) for r in run.rounds if r.width]


def by_position(rounds: Sequence[Round], *, fewest: int = 5) -> list[float]:
    """For the draft at position 1, 2, ...: of the rounds that could have kept it, the share that did.

    It ends where there were fewer than `fewest` such rounds.
    """
    shares: list[float] = []
    while len(reached := [r for r in rounds if r.depth > len(shares)]) >= fewest:
        position = len(shares) + 1
        shares.append(sum(r.kept >= position for r in reached) / len(reached))
    return shares


@dataclass(frozen=True)
class RoundTime:
    """Milliseconds of the rounds of a width: the median, and the quarters below and above it."""

    width: int
    rounds: int
    ms: float
    low: float
    high: float


def by_width(rounds: Sequence[Round], *, fewest: int = 3) -> list[RoundTime]:
    """How long rounds took by the drafts they verified, where there were at least this many of them."""
    widths: dict[int, list[float]] = {}
    for r in rounds:
        widths.setdefault(r.width, []).append(r.ms)
    return [
        RoundTime(width, len(ms), *(quantile(ms, share) or 0.0 for share in (0.5, 0.25, 0.75)))
        for width, ms in sorted(widths.items())
        if len(ms) >= fewest
    ]


def unlike(results: Results) -> list[str]:
    """Where contestants did not do the same work: they read other prompts, or had read a part of them before."""
    lines = []
    for name in results.others:
        both = [(r.of(results.baseline)[0], r.of(name)[0]) for r in results.prompts if complete(results, r)]
        other = [(a, b) for a, b in both if b.prompt_tokens and a.prompt_tokens != b.prompt_tokens]
        if other:
            a, b = other[0]
            lines.append(
                f"{name} read other prompts for {len(other)} of {len(both)}, such as {b.prompt_tokens} tokens instead "
                f"of {a.prompt_tokens}: its chat template differs"
            )
        runs = [run for result in results.prompts for run in result.of(name)]
        if cached := sum(run.cached_tokens for run in runs):
            share = cached / max(1, sum(run.prompt_tokens for run in runs))
            lines.append(f"{name} had read {share:.0%} of the prompts before: its first tokens came that much earlier")
    return lines


def complete(results: Results, result: PromptResult) -> bool:
    """Whether every contestant has answered the prompt."""
    return all(result.of(name) for name in results.contestants)


def verdict(results: Results, figures: Sequence[Figures]) -> list[str]:
    """What was found, in sentences; the first one says it all. Empty when nothing was finished."""
    overall = {(f.setting, f.contestant): f for f in figures if f.group == ALL}
    if not overall:
        return []
    setting = next(iter(overall))[0]
    what = str(results.facts.get("label") or results.facts.get("pair") or "this pair")
    where = f" at {setting}" if setting else ""
    own = overall[setting, results.main]
    lines = [_headline(what, own, results.main, where)]
    if own.speedup is not None:
        lines.append(
            f"After the first token it is {as_fast(own.speedup)}{between(own.speedup_interval)}; "
            f"all runs together: {as_fast(own.speedup_total or own.speedup)}."
        )
    if own.identical is not None:
        lines.append(_identical(own.identical, own.prompts))
    for name in results.others:
        found = overall.get((setting, name))
        if name != results.main and found is not None and found.answer_speedup:
            lines.append(
                f"{name} answers {as_fast(found.answer_speedup)} as {results.baseline}"
                f"{between(found.answer_interval)}{_against(results, setting, name)}."
            )
    if (chosen := judged(results, complete_in(results, setting))) is not None:
        among = f"the best of {chosen.fixed} fixed ones" if chosen.fixed > 1 else "the fixed one"
        each = ""
        if chosen.lowest is not None and chosen.highest is not None:
            each = f" ({times(chosen.lowest)} to {times(chosen.highest)} of the best with the same answer to a prompt)"
        lines.append(
            f"If rounds of the same kind took equally long, the automatic choice would be {as_fast(chosen.share)} as "
            f"{chosen.best}, {among}{each}."
        )
    return lines


def _against(results: Results, setting: str, name: str) -> str:
    """The main contestant's speed over another one's."""
    prompts = complete_in(results, setting)
    pairs = pairs_of(prompts, name, results.main, "answer_tps")
    found = middle(result.answer_speedup(results.main, name) for result in prompts)
    if found is None or results.main == results.baseline:
        return ""
    return f"; {results.main} {as_fast(found)} as {name}{between(ratio_interval(pairs))}"


def _identical(identical: int, prompts: int) -> str:
    if identical == prompts:
        every = {1: "The answer is", 2: "Both answers are"}.get(prompts, f"All {prompts} answers are")
        return f"{every} identical to plain decoding's."
    some = "The answer is not" if prompts == 1 else f"{identical or 'None'} of {prompts} answers are"
    return f"{some} identical to plain decoding's; `dflash-mlx parity` says whether rounding explains that."


def _headline(what: str, own: Figures, main: str, where: str) -> str:
    if own.answer_speedup is None:
        speed = f"{own.tps:.1f} tokens a second" if own.tps else "one token an answer"
        ends = [f"{end:.1f}" for end in (own.tps_interval.low, own.tps_interval.high)] if own.tps_interval else []
        sure = f" ({' to '.join(ends)})" if len(set(ends)) == 2 else ""
        return f"On this machine {what} decodes {speed} without drafting{where}{sure}."
    speed = f"{as_fast(own.answer_speedup)} with {'drafting' if main == DRAFTED else main}{where}"
    if speed.startswith(_JUST_AS_FAST):
        speed += " as without it"
    slower = f"it was slower for {own.slower or 'none'} of {own.prompts} prompts"
    if own.prompts == 1:
        slower = "only one prompt was measured"
    return f"On this machine {what} answers {speed}{between(own.answer_interval)}; {slower}."


_JUST_AS_FAST = "just as fast"


def as_fast(value: float) -> str:
    """A ratio of speeds in words, to be followed by "as" and what it is compared with."""
    shown = times(value)
    return _JUST_AS_FAST if shown == "1.00" else f"{shown} times as fast"


def times(value: float) -> str:
    """A ratio for people: two digits that count, and near 1 as many as tell it from 1."""
    if 0.95 <= value < 1.05:
        return f"{value:.2f}"
    if 1 <= value < 9.95:
        return f"{value:.1f}"
    return f"{value:.2g}" if value < 1 else f"{value:.0f}"


def between(interval: Interval | None) -> str:
    """The interval in brackets with a space before it, with as many digits as its ends need to differ."""
    if interval is None:
        return ""
    low, high = times(interval.low), times(interval.high)
    if low == high:
        low, high = f"{interval.low:.3g}", f"{interval.high:.3g}"
    return f" ({low} to {high})" if low != high else ""
