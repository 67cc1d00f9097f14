"""How a benchmark is going: a line on stderr with the standing so far and the time that is left."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dflash_mlx.cli.output import is_terminal, note, styled, terminal_width

if TYPE_CHECKING:
    from dflash_mlx.bench.record import Results, Run
    from dflash_mlx.bench.run import Job


class BenchProgress:
    """Redrawn on a terminal; elsewhere a line for each run."""

    def __init__(self, jobs: "Sequence[Job]", results: "Results", *, estimate: dict[str, float]) -> None:
        """estimate: seconds a run of each contestant may take, until one has run."""
        self.done, self.total = 0, len(jobs)
        self._left = Counter(job.contestant for job in jobs)
        self._took: dict[str, list[float]] = {name: [] for name in self._left}
        self._estimate = {name: [seconds] for name, seconds in estimate.items()}
        self._results = results
        self._last = time.monotonic()
        self._live = is_terminal(sys.stderr)

    def begin(self) -> None:
        """What is going to happen, before the first run."""
        note(f"{self.total} runs, {about(self._seconds_left())}; Ctrl-C keeps what is finished")

    def finished(self, job: "Job", run: "Run") -> None:
        """Count a run and say how it went."""
        now = time.monotonic()
        self._took[job.contestant].append(now - self._last)
        self._last = now
        self._left[job.contestant] -= 1
        self.done += 1
        where = f"{job.result.prompt.name} {job.setting.name}".rstrip()
        speed = f"{run.decode_tps:.1f} tok/s" if run.decode_tps else "one token"
        parts = [f"[{self.done}/{self.total}] {where} {job.contestant}: {speed}", self._standing()]
        if self.done < self.total:
            parts.append(f"{about(self._seconds_left())} left")
        self.show(" · ".join(part for part in parts if part))

    def show(self, line: str) -> None:
        """A line that the next one replaces."""
        if not self._live:
            note(line)
            return
        sys.stderr.write("\r\x1b[2K" + styled(line[: terminal_width() - 1], "dim", sys.stderr))
        sys.stderr.flush()

    def close(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

    def _standing(self) -> str:
        """The main contestant's speedup over the prompts that are finished."""
        from dflash_mlx.bench.statistics import middle

        results = self._results
        if results.main == results.baseline:
            return ""
        found = middle(result.speedup(results.main, results.baseline) for result in results.prompts)
        return f"so far {found:.2f}x" if found else ""

    def _seconds_left(self) -> float | None:
        from dflash_mlx.bench.run import seconds_left

        known = {name: runs or self._estimate.get(name, []) for name, runs in self._took.items()}
        return seconds_left(known, self._left)


def about(seconds: float | None) -> str:
    """A time in words, as exact as an estimate is."""
    if seconds is None:
        return "some time"
    if seconds < 60:
        return f"about {max(5, round(seconds / 5) * 5)} seconds"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {minutes} minute{'' if minutes == 1 else 's'}"
    return f"about {seconds / 3600:.1f} hours"
