"""Two results side by side: what changed, and whether it is more than noise. Pure functions."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash_mlx.bench.analyse import as_fast, between, complete_in, times
from dflash_mlx.bench.record import PromptResult, Results, Run
from dflash_mlx.bench.statistics import Interval, middle, ratio_interval
from dflash_mlx.errors import UsageError

# Two runs of one program on one machine differ by some per cent even where an interval says that they should not: the
# system places memory and clocks processors differently from one start to the next.
SMALLEST = 0.03
# Without the same baseline in both, the machine's own state (its heat, other programs) may account for this much.
SMALLEST_ALONE = 0.10
Speeds = Callable[[Run], float | None]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A figure of B over that of A. drift: how the baseline changed in the meantime, by which the ratio was divided.

    real: more than noise; None where too few prompts are in both.
    """

    what: str
    ratio: float
    interval: Interval | None
    drift: float | None
    real: bool | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """a and b: the main contestant of each result. tokens: prompts whose answers differ between the two."""

    a: str
    b: str
    prompts: int
    changes: list[Change]
    different_answers: int
    differences: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(a: Results, b: Results) -> Comparison:
    """What changed from A to B, prompt by prompt, for the contestants that the two results are about.

    Raises UsageError where they have no prompt in common.
    """
    shared = _shared(a, b)
    if not shared:
        raise UsageError("the two results have no prompt in common that both finished; measure the same prompts.")
    drifts = _drifts(a, b, shared)
    changes = [
        _change("the whole answer", a, b, shared, lambda run: run.answer_tps, drifts),
        _change("decoding", a, b, shared, lambda run: run.decode_tps, drifts),
        # Waiting is the other way round: less is better, so the ratio is of the inverse.
        _change("the first token", a, b, shared, lambda run: 1 / run.first_s if run.first_s else None, drifts),
    ]
    first = [(one.of(a.main)[0].token_ids, other.of(b.main)[0].token_ids) for one, other in shared]
    return Comparison(
        a=a.main,
        b=b.main,
        prompts=len(shared),
        changes=[change for change in changes if change is not None],
        different_answers=sum(one != other for one, other in first),
        differences=list(_differences(a, b)),
    )


def _shared(a: Results, b: Results) -> list[tuple[PromptResult, PromptResult]]:
    """The same prompt in the same setting, finished in both."""
    in_b = {(r.setting, r.prompt.text): r for setting in b.settings for r in complete_in(b, setting)}
    in_a = [r for setting in a.settings for r in complete_in(a, setting)]
    return [(r, in_b[r.setting, r.prompt.text]) for r in in_a if (r.setting, r.prompt.text) in in_b]


def _drifts(a: Results, b: Results, shared: Sequence[tuple[PromptResult, PromptResult]]) -> bool:
    """Whether both have the same baseline beside their main contestant, which tells how the machine changed."""
    if a.main == a.baseline and b.main == b.baseline:
        return False
    return a.baseline == b.baseline and all(one.of(a.baseline) and other.of(b.baseline) for one, other in shared)


def _change(
    what: str,
    a: Results,
    b: Results,
    shared: Sequence[tuple[PromptResult, PromptResult]],
    speed: Speeds,
    drifts: bool,
) -> Change | None:
    pairs = []
    drift = []
    for one, other in shared:
        before, after = _speeds(one, a.main, speed), _speeds(other, b.main, speed)
        if not before or not after:
            continue
        if drifts:
            machine = (middle(_speeds(other, b.baseline, speed)) or 1) / (middle(_speeds(one, a.baseline, speed)) or 1)
            drift.append(machine)
            after = [value / machine for value in after]
        pairs.append((before, after))
    found = middle((middle(after) or 0) / (middle(before) or 1) for before, after in pairs)
    if found is None:
        return None
    interval = ratio_interval(pairs)
    real = is_real(found, interval, smallest=SMALLEST if drifts else SMALLEST_ALONE)
    return Change(what=what, ratio=found, interval=interval, drift=middle(drift), real=real)


def is_real(found: float, interval: Interval | None, *, smallest: float = SMALLEST) -> bool | None:
    """More than noise: the interval leaves out 1, and the change is larger than two runs of one program differ by."""
    if interval is None:
        return None
    return not interval.holds(1.0) and abs(found - 1) > smallest


def _speeds(result: PromptResult, contestant: str, speed: Speeds) -> list[float]:
    return [value for run in result.of(contestant) if (value := speed(run))]


_WORDS = {
    "pair": "the pair",
    "dtype": "the precision",
    "exact": "--exact",
    "version": "the version",
    "block_size": "the block size",
    "turns": "tokens in a turn (0: whole answers)",
}


def _differences(a: Results, b: Results) -> list[str]:
    """What else differs between the two."""
    found = [
        f"{words}: {a.facts.get(key)} and {b.facts.get(key)}"
        for key, words in _WORDS.items()
        if a.facts.get(key) != b.facts.get(key) and None not in (a.facts.get(key), b.facts.get(key))
    ]
    for part in ("machine", "params"):
        one, other = a.facts.get(part) or {}, b.facts.get(part) or {}
        found += [
            f"{part} {key}: {one.get(key)} and {other.get(key)}"
            for key in dict.fromkeys([*one, *other])
            if one.get(key) != other.get(key)
        ]
    return found


def sentences(found: Comparison) -> list[str]:
    """The comparison for people; the first one is the verdict."""
    whole = found.changes[0] if found.changes else None
    if whole is None:
        return ["Nothing can be compared: one of the results has no speeds."]
    named = f"B ({found.b})" if found.a != found.b else "B"
    against = f"A ({found.a})" if found.a != found.b else "A"
    ratio = f"{as_fast(whole.ratio)} as {against}{between(whole.interval)}"
    if whole.real is None:
        few = "1 prompt is" if found.prompts == 1 else f"{found.prompts} prompts are"
        lines = [f"{named} answers {ratio}; {few} too few to say whether that is noise."]
    elif whole.real:
        lines = [f"{named} answers {ratio}: more than noise."]
    else:
        lines = [f"No change beyond noise: {named} answers {ratio}."]
    for change in found.changes:
        if change is whole:
            continue
        faster = f"{as_fast(change.ratio)}{between(change.interval)}"
        word = {None: "too few prompts to tell", True: "more than noise", False: "noise"}[change.real]
        lines.append(f"{change.what}: {faster}, {word}")
    if whole.drift is not None:
        changed = "" if times(whole.drift) == "1.00" else "; that is the machine, and has been taken out"
        lines.append(f"plain decoding was {as_fast(whole.drift)} in B as in A{changed}")
    same = found.prompts - found.different_answers
    lines.append(f"answers: {same} of {found.prompts} are the same tokens in both")
    lines += [f"different, too: {words}" for words in found.differences]
    return lines
