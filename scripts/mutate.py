"""Mutation testing: change the code in small ways, and see whether the tests notice.

    python scripts/mutate.py                     # the modules that differ from main
    python scripts/mutate.py --since HEAD~3      # from another commit, a branch or a tag
    python scripts/mutate.py dflash_mlx/policy/pauses.py
    python scripts/mutate.py --all --sample 40   # everything, 40 random mutants of each module

pyproject.toml says which modules may be mutated ([tool.mutmut]) and, where it is not tests/FOLDER/test_MODULE.py, which
tests belong to a module ([tool.dflash-mlx.mutation-tests]). mutmut works in a copy of the tree, build/mutation/MODULE,
whose survivors.txt holds what no test noticed. Needs the extra `mutation`.
"""

import argparse
import fnmatch
import json
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "dflash_mlx"
# What pytest and mutmut tell about a mutant by its exit code; any other one is a mutant that was noticed.
SURVIVED, NO_TESTS = 0, 33


@dataclass
class Result:
    """What became of a module's mutants; `survivors` are named as mutmut names them."""

    module: str
    mutants: int
    tried: int
    survivors: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)

    @property
    def killed(self) -> int:
        return self.tried - len(self.survivors) - len(self.untested)


def main() -> int:
    options = read_options()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    modules = choose_modules(options, settings["mutmut"]["only_mutate"])
    if not modules:
        print("no module that is mutated differs")
        return 0
    results = []
    for module in modules:
        tests = tests_of(module, settings["dflash-mlx"]["mutation-tests"])
        if not tests:
            print(f"{module}: no tests are known for it; name them in pyproject.toml", file=sys.stderr)
            continue
        print(f"==> {module}, by {' '.join(tests)}", flush=True)
        results.append(mutate(module, tests, sample=options.sample, seed=options.seed, processes=options.processes))
        print(as_row(results[-1]), flush=True)
    print("\n" + as_table(results))
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="See whether the tests notice small changes of the code.")
    parser.add_argument("modules", nargs="*", help="files to mutate; default: those that differ from --since")
    parser.add_argument("--since", default="main", metavar="REF", help="compare with this commit (default: main)")
    parser.add_argument("--all", action="store_true", help="mutate every module that pyproject.toml names")
    parser.add_argument("--sample", type=int, metavar="N", help="at most N mutants of each module, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="of the random choice (default: 0)")
    parser.add_argument("--processes", type=int, default=1, help="tests that run at the same time (default: 1)")
    return parser.parse_args()


def choose_modules(options: argparse.Namespace, patterns: list[str]) -> list[str]:
    """The files to mutate, relative to the root: only those that the patterns allow, and that hold code."""
    if options.modules:
        names = [Path(name).resolve().relative_to(ROOT).as_posix() for name in options.modules]
    elif options.all:
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.glob(f"{PACKAGE}/**/*.py")]
    else:
        names = changed_since(options.since)
    allowed = (name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns))
    return sorted(name for name in allowed if (ROOT / name).is_file() and (ROOT / name).stat().st_size > 0)


def changed_since(ref: str) -> list[str]:
    """Files that differ from where this branch left `ref`, with what is not committed yet."""
    start = subprocess.run(["git", "merge-base", ref, "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    command = ["git", "diff", "--name-only", start.stdout.strip()]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def tests_of(module: str, table: dict[str, list[str]]) -> list[str]:
    """The tests for a module: those the table names, else the file that mirrors it, else its folder's."""
    inside = Path(module).relative_to(PACKAGE)
    mirror = Path("tests") / inside.parent / f"test_{inside.name}"
    if inside.as_posix() in table:
        return table[inside.as_posix()]
    if (ROOT / mirror).is_file():
        return [mirror.as_posix()]
    return [mirror.parent.as_posix()] if inside.parent != Path() else []


def mutate(module: str, tests: list[str], *, sample: int | None, seed: int, processes: int) -> Result:
    """Run a module's mutants in a copy of the tree."""
    folder = ROOT / "build" / "mutation" / module.removesuffix(".py").replace("/", ".")
    copy_tree(folder, module, tests)
    if sample is not None:
        # A name that no mutant has: mutmut makes the mutants, finds out which tests reach them, and stops.
        mutmut(folder, "run", "--max-children", str(processes), "none-of-them")
    names = list(exit_codes(folder, module)) if sample is not None else []
    chosen = random.Random(seed).sample(names, sample) if sample is not None and sample < len(names) else []
    output = mutmut(folder, "run", "--max-children", str(processes), *chosen)
    codes = exit_codes(folder, module)
    tried = {name: codes[name] for name in chosen or codes}
    if None in tried.values():
        raise SystemExit(f"error: mutmut stopped before its end in {folder}\n{output[-3000:]}")
    result = Result(
        module,
        len(codes),
        len(tried),
        [name for name, code in tried.items() if code == SURVIVED],
        [name for name, code in tried.items() if code == NO_TESTS],
    )
    shown = [mutmut(folder, "show", name) for name in result.survivors]
    (folder / "survivors.txt").write_text("\n".join([*shown, *(f"no test: {name}" for name in result.untested)]))
    return result


def copy_tree(folder: Path, module: str, tests: list[str]) -> None:
    """A copy of the package and its tests, whose settings are for this module alone."""
    shutil.rmtree(folder, ignore_errors=True)
    no_caches = shutil.ignore_patterns("__pycache__")
    for name in (PACKAGE, "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=no_caches)
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    before, after = settings.split("only_mutate = [", 1)
    own = f"only_mutate = {json.dumps([module])}\npytest_add_cli_args_test_selection = {json.dumps(tests)}"
    (folder / "pyproject.toml").write_text(before + own + after.split("]", 1)[1])


def mutmut(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "mutmut", *arguments]
    done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout


def exit_codes(folder: Path, module: str) -> dict[str, int | None]:
    """How the tests of each mutant ended; None before they have run."""
    notes = folder / "mutants" / f"{module}.meta"
    if not notes.is_file():
        raise SystemExit(f"error: mutmut made no mutants of {module}; look at it in {folder}: python -m mutmut run")
    read: dict[str, Any] = json.loads(notes.read_text(encoding="utf-8"))
    codes: dict[str, int | None] = read["exit_code_by_key"]
    return codes


def as_row(result: Result) -> str:
    return (
        f"{result.module:<40} {result.mutants:>7} {result.tried:>6} {result.killed:>6} "
        f"{len(result.survivors):>8} {len(result.untested):>8}"
    )


def as_table(results: list[Result]) -> str:
    head = f"{'module':<40} {'mutants':>7} {'tried':>6} {'killed':>6} {'survived':>8} {'no test':>8}"
    return "\n".join([head, *map(as_row, results)])


if __name__ == "__main__":
    sys.exit(main())
