"""What rounds of a pair take on this machine, and which are chosen: `dflash-mlx doctor --pair NAME`."""

import sys
from dataclasses import replace
from typing import Any

from dflash_mlx.cli import options
from dflash_mlx.cli.output import LoadProgress, wrapped

# How often the drafter's first choice is right.
_CHANCES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


def examine_rounds(choice: options.ModelChoice) -> dict[str, Any]:
    """Load a pair, measure its rounds where that was not done before, and say what would be chosen."""
    pair = choice.open()
    from dflash_mlx.policy.prospects import prospect
    from dflash_mlx.policy.width import DEPTHS, SHALLOW

    with LoadProgress() as progress:
        costs = pair.round_costs(progress.report)
    kinds = [costs.trees] if costs.trees is not None and costs.trees.steep else [costs.chains, costs.trees]
    depths = sorted({*DEPTHS, *(depth for kind in kinds if kind is not None for depth in kind.deeper)})
    rounds: list[dict[str, Any]] = []
    for kind in kinds:
        if kind is None:
            continue
        deeper = [replace(kind, depth=depth) for depth in depths if depth in kind.deeper]
        for width in sorted(kind.round_seconds):
            if width == 0 and rounds:
                continue
            rounds.append(
                {
                    "drafts": width,
                    "tree": width > 0 and kind.places > 0,
                    "milliseconds": round(1000 * kind.round(width), 3),
                    "milliseconds_after": [round(1000 * later.round(width), 3) for later in deeper],
                    "pays_from": round(kind.round(width) / kind.plain, 3),
                }
            )
    choices = []
    for chance in _CHANCES:
        best = prospect(costs, pair.block_size - 1, chance)
        choices.append(
            {
                "right": chance,
                "drafts": best.drafts,
                "tree": best.tree,
                "tokens": round(best.tokens, 3),
                "speedup": round(best.speedup, 3),
            }
        )
    return {
        "pair": pair.name,
        "method": pair.method,
        "waits_for_drafts": costs.chains.steep,
        "context": [SHALLOW, *depths],
        "spread": round(costs.spread, 3),
        "rounds": rounds,
        "choices": choices,
    }


def print_rounds(found: dict[str, Any]) -> None:
    shallow, *depths = found["context"]
    text = f"Rounds of {found['pair']} ({found['method']}) after {shallow} tokens of context, by what they verify:"
    print(wrapped(text, sys.stdout) + "\n")
    columns = [f"after {depth:,} tokens" for depth in depths]
    print(f"{'':<13}{'round':>10}  {'pays from':>13}  {'  '.join(columns)}")
    for line in found["rounds"]:
        times = [f"{milliseconds:.1f} ms" for milliseconds in line["milliseconds_after"]]
        times += ["-"] * (len(depths) - len(times))
        later = "  ".join(f"{taken:>{len(column)}}" for taken, column in zip(times, columns, strict=True))
        pays = f"{line['pays_from']:.2f} tokens" if line["drafts"] else "-"
        print(f"{_drafts(line):<13}{line['milliseconds']:>7.1f} ms  {pays:>13}  {later}")
    text = f"Each was timed several times; the two least times differ by {found['spread']:.0%} (median)."
    print("\n" + wrapped(text, sys.stdout) + "\n")
    text = "What is chosen where the drafter's first choice is right so often:"
    print(wrapped(text, sys.stdout) + "\n")
    print(f"{'right':<7}{'verified':<13}{'tokens a round':>14}  {'times plain':>11}")
    for line in found["choices"]:
        print(f"{line['right']:<7.0%}{_drafts(line):<13}{line['tokens']:>14.2f}  {line['speedup']:>11.2f}")
    print()


def _drafts(line: dict[str, Any]) -> str:
    if not line["drafts"]:
        return "no drafts"
    return f"{'tree' if line['tree'] else 'chain'} of {line['drafts']}"
