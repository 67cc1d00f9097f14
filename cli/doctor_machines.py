"""`doctor` on several machines: what each is and has, how they are connected, and what keeps them from working."""

import json
import sys
from dataclasses import asdict

from dflash_mlx.cli.output import marked, say
from dflash_mlx.errors import UsageError
from dflash_mlx.hub.registry import ModelSource, find_pair, parse_source
from dflash_mlx.targets.examination import Machine, problems
from dflash_mlx.targets.machines import Machines


def target_source(pair: str | None, model: str | None) -> ModelSource | None:
    """The target whose files are to be compared, if one is named. Raises UsageError."""
    if pair is not None and model is not None:
        raise UsageError("name either a pair or a model, not both (--pair or --model).")
    if pair is not None:
        return find_pair(pair).target
    return parse_source(model) if model is not None else None


def examine_machines(machines: Machines, source: ModelSource | None, *, as_json: bool) -> bool:
    """Look at all machines and print what was found; returns whether they can compute a model together."""
    found = machines.examine(source)
    wrong = problems(found)
    if as_json:
        print(json.dumps({"machines": [asdict(machine) for machine in found], "problems": wrong}, indent=2))
    else:
        _print(found, wrong, source)
    return not wrong


def _print(found: list[Machine], wrong: list[str], source: ModelSource | None) -> None:
    for machine in found:
        versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
        memory = f"{machine.memory_bytes / 2**30:.0f} GiB"
        say(f"rank {machine.rank}: {machine.host}, {machine.chip}, {memory}, {machine.os}; {versions}")
    first = found[0]
    say(
        f"connection: {first.small_ms:.2f} ms for a small sum over all machines, "
        f"{first.megabytes_a_second:,.0f} MB/s for large ones"
    )
    if source is not None:
        for machine in found:
            files = "not there; the first use fetches it" if machine.files is None else f"{len(machine.files)} files"
            say(f"{source} on rank {machine.rank}: {files}{f'; {machine.share}' if machine.share else ''}")
    print()
    for problem in wrong:
        print(marked("broken:", problem, "red", sys.stdout))
    if not wrong:
        say("The machines can compute a model together.", style="green")
