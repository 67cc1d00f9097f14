"""Running a pair's models to check them, once for the same files: what it shows is remembered on disk."""

from dataclasses import asdict, dataclass

from dflash_mlx.checks import GUESS_TEXT, check_pair, read_guesses
from dflash_mlx.pair import ModelPair, Report
from dflash_mlx.policy.stored import name_by_files, read_json, store

# To be raised when the checks change, or what they find: a way to feed trees to more models, for example.
_SCHEMA = 4


@dataclass(frozen=True)
class Findings:
    """What running a pair's models has shown.

    rows, trees: as `Target.takes_rows` and `takes_trees` give them; noise: the drafter guesses like random weights.
    """

    checks: list[str]
    warnings: list[str]
    rows: bool
    trees: bool
    noise: bool

    def note(self, pair: ModelPair) -> None:
        """Add it to what is known of the pair."""
        pair.target.assume(rows=self.rows, trees=self.trees)
        pair.checks += self.checks
        pair.warnings += self.warnings
        if self.noise:
            pair.expect_failure()


def check_once(pair: ModelPair, *, again: bool, report: Report) -> None:
    """Check a pair whose models are what its folders hold, unless that was done before. Raises PairError.

    again: run the models even then. On several machines that is always done: they hold files of their own.
    """
    name = _name(pair)
    found = None if again or pair.target.machines > 1 else _read(name)
    if found is None:
        found = examine(pair, report=report)
        store(name, asdict(found))
    found.note(pair)


def examine(pair: ModelPair, *, report: Report) -> Findings:
    """Run the models of a pair; a target alone is asked only what it takes. Raises PairError."""
    checks, warnings, noise = list[str](), list[str](), False
    if pair.drafter is not None:
        report("checking that target and drafter belong together", None)
        checks += check_pair(pair.target, pair.drafter, dtype=pair.dtype)
        guesses = read_guesses(pair.target, pair.drafter, pair.encode_prompt(GUESS_TEXT))
        if guesses is not None:
            noise = guesses.are_noise
            (warnings if noise else checks).append(guesses.report)
    return Findings(checks, warnings, rows=pair.target.takes_rows(), trees=pair.target.takes_trees(), noise=noise)


def _name(pair: ModelPair) -> str:
    settings = pair.method, pair.block_size, pair.dtype, pair.exact, *pair.target.ways
    return name_by_files("pair-checks", pair.folders, _SCHEMA, *settings)


def _read(name: str) -> Findings | None:
    """What was found before; None where nothing was, or the file cannot be used."""
    try:
        stored = read_json(name)
        checks, warnings = ([str(line) for line in stored[key]] for key in ("checks", "warnings"))
        rows, trees, noise = (stored[key] is True for key in ("rows", "trees", "noise"))
        return Findings(checks, warnings, rows=rows, trees=trees, noise=noise)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
