"""The runs of a benchmark, with progress; what is finished when something stops them is kept."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_mlx.bench.prompts import BenchPrompt, padder
from dflash_mlx.cli.bench_progress import BenchProgress
from dflash_mlx.cli.output import note

if TYPE_CHECKING:
    from dflash_mlx.bench.energy import Energy
    from dflash_mlx.bench.record import Results
    from dflash_mlx.bench.run import Job, Setting
    from dflash_mlx.pair import ModelPair

_WARM_UP = "Name three uses of a brick, and say in a sentence each why they work."
# A GPU compiles for rounds of each size, and only a whole answer meets them.
_WARM_UP_TOKENS_ON_CPU = 16


@dataclass(frozen=True)
class Measurement:
    """What is to be measured. turns: of so many tokens; None: of whole answers. streams: numbers of requests at the
    same time. pair: whose tokenizer counts tokens."""

    results: "Results"
    contestants: dict[str, Any]
    prompts: Sequence[BenchPrompt]
    settings: "Sequence[Setting]"
    repeat: int
    turns: int | None
    streams: Sequence[int]
    pair: "ModelPair"


def measure(wanted: Measurement) -> BaseException | None:
    """Fill the results. Returns what stopped it: Ctrl-C, or an error after something was finished; None when nothing
    did."""
    from dflash_mlx.bench.energy import open_energy
    from dflash_mlx.bench.run import plan

    jobs = plan(wanted.prompts, wanted.settings, list(wanted.contestants), repeat=wanted.repeat)
    results = wanted.results
    results.prompts = list({id(job.result): job.result for job in jobs}.values())
    energy = open_energy()
    results.machine = {"energy": energy.source, "cooled_s": 0.0}
    try:
        _single(wanted, jobs, energy)
        _load(wanted)
        if all(result.runs for result in results.prompts):
            from dflash_mlx.bench.measured import look_closer

            note("looking closer at rounds and memory")
            results.machine |= look_closer(results, wanted.contestants)
    except KeyboardInterrupt as stopped:
        done = sum(len(result.runs) for result in results.prompts)
        kept = "the figures are of what was finished" if done else "nothing is written"
        note(f"stopped after {done} of {len(jobs)} runs; {kept}.", style="yellow")
        return stopped
    except Exception as error:  # another package's or MLX's, too: what was measured before it is not lost
        if not any(result.runs for result in results.prompts):
            raise
        return error
    return None


def _single(wanted: Measurement, jobs: "Sequence[Job]", energy: "Energy") -> None:
    """One answer at a time."""
    from dflash_mlx.bench.machine import cool_down, thermal_state
    from dflash_mlx.bench.run import run_jobs, warm_up
    from dflash_mlx.runtime import backend

    results = wanted.results
    note("warming up")
    first = wanted.settings[0].params
    tokens = min(_WARM_UP_TOKENS_ON_CPU, first.max_tokens) if backend().kind == "cpu" else first.max_tokens
    warm = warm_up(wanted.contestants, _WARM_UP, first, max_tokens=tokens)
    scale = first.max_tokens / tokens
    results.machine["heat_at_start"] = thermal_state()
    progress = BenchProgress(jobs, results, estimate={name: seconds * scale for name, seconds in warm.items()})
    progress.begin()

    def rest() -> None:
        results.machine["cooled_s"] += cool_down()

    pad = padder(lambda text: len(wanted.pair.encode_chat([{"role": "user", "content": text}])))
    try:
        for job, run in run_jobs(jobs, wanted.contestants, turns=wanted.turns, pad=pad, before=rest, meter=energy):
            progress.finished(job, run)
    finally:
        progress.close()
        results.machine["heat_at_end"] = thermal_state()


def _load(wanted: Measurement) -> None:
    """Several requests at the same time; the contestants take turns here, too."""
    from dflash_mlx.bench.load import requests_for, run_load
    from dflash_mlx.bench.run import order

    for turn, streams in enumerate(wanted.streams):
        texts = requests_for(wanted.prompts, streams)
        for name in order(list(wanted.contestants), turn):
            note(f"{streams} at the same time, {len(texts)} requests: {name}")
            run = run_load(wanted.contestants[name], texts, wanted.settings[0].params, streams=streams)
            wanted.results.load.append(run)
