"""`dflash-mlx doctor`: what was found on this machine, what is broken, what would make it faster."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from dflash_mlx import __version__
from dflash_mlx.cli import options
from dflash_mlx.cli.output import LoadProgress, can_draw, is_terminal, marked, styled, wrapped
from dflash_mlx.errors import DFlashError
from dflash_on_mlx import explain, other_version

EXAMPLES = """[bold]Examples[/bold]

  dflash-mlx doctor

  dflash-mlx doctor --kernels

  dflash-mlx doctor --json
"""


def doctor_command(
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels", help="Race the kernels of dflash-mlx against MLX's own; takes up to a minute on a GPU."
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Say what dflash-mlx runs on here, what is broken, and what would make it faster.

    The exit code is 1 when something is broken, else 0.
    """
    report = examine()
    if kernels:
        report["kernels"] = race_kernels()
    if as_json:
        print(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        _print_report(report)
    if report["problems"]:
        raise typer.Exit(1)


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
    """A race for each kind of matrix, with speedups by number of rows; none on a CPU."""
    from dflash_mlx.kernels.quantized_rows.layers import race_typical
    from dflash_mlx.runtime import backend

    if backend().kind == "cpu":
        return []
    with LoadProgress() as progress:
        races = race_typical(progress.report)
    return [
        {
            "matrix": str(matrix),
            "speedups": {rows: round(ordinary / own, 3) for rows, (ordinary, own) in verdict.seconds.items()},
            "milliseconds": {rows: round(own * 1000, 3) for rows, (_, own) in verdict.seconds.items()},
            "used_for": [rows for rows in verdict.seconds if verdict.won(rows)],
            "note": verdict.note,
        }
        for matrix, verdict in races.items()
    ]


def _print_races(races: list[dict[str, Any]]) -> None:
    """As a table in Markdown, for an issue."""
    from dflash_mlx.kernels.race import ROWS

    if not races:
        print("kernels:       none for a CPU")
        return
    print("How many times as fast as MLX's own product the kernel is, by rows; * where it is used:\n")
    print("| matrix | " + " | ".join(map(str, ROWS)) + " |")
    print("|---|" + "---|" * len(ROWS))
    for race in races:
        cells = [
            f"{race['speedups'][rows]:.2f}{'*' if rows in race['used_for'] else ''}"
            if rows in race["speedups"]
            else "-"
            for rows in ROWS
        ]
        print(f"| {race['matrix']} | " + " | ".join(cells) + " |")
    for race in races:
        if race["note"]:
            print(f"\n{race['matrix']}: {race['note']}")
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
    nearest = home
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir():
        raise OSError(f"{nearest} is a file; set DFLASH_MLX_HOME to a folder")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
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
    for problem in report["problems"]:
        print(marked("broken:", problem, "red", sys.stdout))
    for advice in report["advice"]:
        print(marked("faster:", advice, "yellow", sys.stdout))
    if not report["problems"] and not report["advice"]:
        print(styled("Everything is in order.", "green", sys.stdout))
