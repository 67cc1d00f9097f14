"""`dflash-mlx doctor`: what was found on this machine, what is broken, what would make it faster."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from dflash_mlx import __version__
from dflash_mlx.cli import launch, options
from dflash_mlx.cli.doctor_rounds import examine_rounds, print_rounds
from dflash_mlx.cli.output import LoadProgress, can_draw, is_terminal, marked, styled, wrapped
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.hub.new_folder import nearest_existing, try_writing
from dflash_mlx.ranks import started_together
from dflash_on_mlx import explain, other_version

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx doctor

  dflash-mlx doctor --kernels

  dflash-mlx doctor --pair demo

  dflash-mlx doctor --json

  dflash-mlx doctor --hosts 10.0.0.1,10.0.0.2 --pair qwen3-8b
"""


def doctor_command(
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels", help="Race the kernels of dflash-mlx against MLX's own; takes a minute or two on a GPU."
        ),
    ] = False,
    hosts: launch.Hosts = None,
    hostfile: launch.HostFile = None,
    processes: launch.Processes = None,
    backend: launch.BackendName = None,
    pair: options.Pair = None,
    model: options.Model = None,
    draft_model: options.DraftModel = None,
    as_json: options.Json = False,
) -> None:
    """Say what dflash-mlx runs on here, what is broken, and what would make it faster.

    With --pair or --model: what a round of these models takes by the number of drafts, and which number is chosen.

    With --hosts or --hostfile: whether these machines can compute a model together. Their versions are compared, the
    connection is tried and timed, and with --pair or --model the checksums of the model's files are compared, too.
    The exit code is 1 when something is broken, else 0; with several machines it is always 0, as that of launch.
    """
    together = hosts is not None or hostfile is not None or processes is not None
    if (kernels or draft_model) and (together or started_together()):
        option = "--kernels" if kernels else "--draft-model"
        raise UsageError(f"{option} is about one machine; leave it out where there are several.")
    if together:
        named = [*(["--pair", pair] if pair else []), *(["--model", model] if model else [])]
        words = ["doctor", *named, *(["--json"] if as_json else [])]
        launch.launch(words, hosts=hosts, hostfile=hostfile, processes=processes, backend=backend)
        return
    if started_together() and _examine_together(pair, model, as_json=as_json):
        return
    report = examine()
    if kernels:
        report["kernels"] = race_kernels()
    if pair is not None or model is not None or draft_model is not None:
        choice = options.ModelChoice(pair=pair, model=model, draft_model=draft_model, can_be_plain=False)
        report["drafting"] = examine_rounds(choice)
    if as_json:
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        _print_report(report)
    if report["problems"]:
        raise typer.Exit(1)


def _examine_together(pair: str | None, model: str | None, *, as_json: bool) -> bool:
    """Look at all machines of a group; returns whether there are several. Raises UsageError."""
    from dflash_mlx.cli.doctor_machines import examine_machines, target_source
    from dflash_mlx.targets.machines import other_machines

    machines = other_machines()
    if machines is not None and not examine_machines(machines, target_source(pair, model), as_json=as_json):
        raise typer.Exit(1)
    return machines is not None


def examine() -> dict[str, Any]:
    """Look at everything; what cannot be looked at becomes a problem in words."""
    problems: list[str] = []
    found: dict[str, Any] = {"dflash_mlx": __version__}
    for look in (_installation, _backend, _speed, _tokenizers, _cache, _pairs):
        try:
            found |= look()
        except (DFlashError, ImportError, OSError, RuntimeError, ValueError) as error:
            problems.append(f"{_NAMES[look]}: {' '.join(str(error).split()) or type(error).__name__}")
    found["terminal"] = _terminal()
    return {**found, "advice": list(found.get("advice", ())), "problems": problems}


def race_kernels() -> list[dict[str, Any]]:
    """A race for each kind of matrix and of attention, with speedups by number of rows; none on a CPU."""
    from dflash_mlx.kernels.quantized_rows import layers as quantized_rows
    from dflash_mlx.kernels.rows_attention import layers as rows_attention
    from dflash_mlx.runtime import backend

    if backend().kind == "cpu":
        return []
    races = {**quantized_rows.races_typical(), **rows_attention.races_typical()}
    found: dict[str, Any] = {}
    with LoadProgress() as progress:
        for what, race in races.items():
            progress.report(f"racing {what}", len(found) / len(races))
            found[what] = race()
    return [
        {
            "race": what,
            "speedups": {rows: round(ordinary / own, 3) for rows, (ordinary, own) in verdict.seconds.items()},
            "milliseconds": {rows: round(own * 1000, 3) for rows, (_, own) in verdict.seconds.items()},
            "used_for": [rows for rows in verdict.seconds if verdict.won(rows)],
            "note": verdict.note,
        }
        for what, verdict in found.items()
    ]


def _print_races(races: list[dict[str, Any]]) -> None:
    """As a table in Markdown, for an issue."""
    from dflash_mlx.kernels.race import ROWS

    if not races:
        print("kernels:       none for a CPU")
        return
    print("How many times as fast as MLX's own operation the kernel is, by rows; * where it is used:\n")
    print("| race | " + " | ".join(map(str, ROWS)) + " |")
    print("|---|" + "---|" * len(ROWS))
    for race in races:
        cells = [
            f"{race['speedups'][rows]:.2f}{'*' if rows in race['used_for'] else ''}"
            if rows in race["speedups"]
            else "-"
            for rows in ROWS
        ]
        print(f"| {race['race']} | " + " | ".join(cells) + " |")
    for race in races:
        if race["note"]:
            print(f"\n{race['race']}: {race['note']}")
    print()


def _installation() -> dict[str, Any]:
    other = other_version()
    if other is not None:
        raise RuntimeError(explain(other))
    return {}


def _backend() -> dict[str, Any]:
    from dflash_mlx.runtime import MLX_SETTINGS, backend

    return {**backend().to_json(), "mlx_settings": {name: os.environ.get(name, "unset") for name in MLX_SETTINGS}}


def _speed() -> dict[str, Any]:
    """Time a product of the size that checking a block takes, in the precision used here."""
    import mlx.core as mx

    from dflash_mlx.runtime import backend

    dtype = mx.float32 if backend().kind == "cpu" else mx.bfloat16
    rows, size, repeats = 16, 1024, 10
    a, b = mx.ones((rows, size), dtype=dtype), mx.ones((size, size), dtype=dtype)
    mx.eval(a, b, a @ b)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        product = a @ b
        mx.eval(product)
        times.append(time.perf_counter() - start)
    if product[0, 0].item() != size:
        raise RuntimeError("a matrix product came out wrong; reinstall mlx")
    gflops = 2 * rows * size * size / min(times) / 1e9
    return {"matmul_gflops": round(gflops, 1), "dtype": str(dtype).rpartition(".")[2]}


def _tokenizers() -> dict[str, Any]:
    import mlx_lm.generate
    import mlx_lm.tokenizer_utils  # noqa: F401  what loading a model imports

    return {}


def _cache() -> dict[str, Any]:
    from dflash_mlx.hub.registry import cache_home

    home = cache_home()
    nearest = nearest_existing(home)
    if not nearest.is_dir():
        raise OSError(f"{nearest} is a file; set DFLASH_MLX_HOME to a folder")
    try:
        try_writing(nearest)
    except OSError as error:
        raise OSError(f"cannot write to {nearest} ({error.strerror}); set DFLASH_MLX_HOME to another folder") from error
    space = os.statvfs(nearest)
    return {"cache_folder": str(home), "cache_free_gb": round(space.f_bavail * space.f_frsize / 1e9, 1)}


def _pairs() -> dict[str, Any]:
    from dflash_mlx.hub.download import is_ready
    from dflash_mlx.hub.registry import find_pair, list_pairs

    demo = find_pair("demo")
    return {
        "known_pairs": len(list_pairs()),
        "demo_pair_on_disk": is_ready(demo.target) and is_ready(demo.drafter),
    }


_NAMES: dict[Callable[[], dict[str, Any]], str] = {
    _installation: "installation",
    _backend: "MLX",
    _speed: "computing",
    _tokenizers: "mlx-lm",
    _cache: "cache folder",
    _pairs: "known pairs",
}


def _terminal() -> dict[str, Any]:
    return {
        "stdout": is_terminal(sys.stdout),
        "stderr": is_terminal(sys.stderr),
        "unicode": can_draw(sys.stdout),
        "colour": is_terminal(sys.stdout) and not os.environ.get("NO_COLOR"),
    }


def _print_report(report: dict[str, Any]) -> None:
    def line(label: str, value: str | None) -> None:
        if value:
            print(wrapped(f"{label + ':':<15}{value}", sys.stdout))

    kinds = {"metal": "Metal (Apple GPU)", "cuda": "CUDA (NVIDIA GPU)", "cpu": "CPU"}
    line("dflash-mlx", report["dflash_mlx"])
    if "kind" in report:
        line("backend", kinds[report["kind"]])
        line("chip", report["chip"])
        line("memory", f"{report['memory_bytes'] / 2**30:.1f} GiB")
        line("system", report["os"])
        line("python", report["python"])
        line("mlx", f"{report['mlx_version']}, mlx-lm {report['mlx_lm_version']}")
        if report["kind"] == "cpu":
            line("blas", report["blas"] or "the one that MLX brings")
        else:
            full = report["mlx_settings"]["MLX_ENABLE_TF32"] == "0"
            line("float32", "full precision" if full else "TF32, by your MLX_ENABLE_TF32: answers may differ")
            line("mlx settings", ", ".join(f"{name}={value}" for name, value in report["mlx_settings"].items()))
    if "matmul_gflops" in report:
        line("speed", f"{report['matmul_gflops']:,.0f} GFLOP/s in {report['dtype']}, 16 rows at once")
    if "cache_folder" in report:
        line("models in", f"{report['cache_folder']} ({report['cache_free_gb']:.0f} GB free)")
    if "known_pairs" in report:
        on_disk = "on disk" if report["demo_pair_on_disk"] else "not downloaded yet; the first use fetches it"
        line("demo pair", on_disk)
    terminal = report["terminal"]
    live = "yes" if terminal["stderr"] else "no, so no live statistics"
    line("terminal", f"{live}{'' if terminal['unicode'] else '; without block characters'}")
    print()
    if "kernels" in report:
        _print_races(report["kernels"])
    if "drafting" in report:
        print_rounds(report["drafting"])
    for problem in report["problems"]:
        print(marked("broken:", problem, "red", sys.stdout))
    for advice in report["advice"]:
        print(marked("faster:", advice, "yellow", sys.stdout))
    if not report["problems"] and not report["advice"]:
        print(styled("Everything is in order.", "green", sys.stdout))
