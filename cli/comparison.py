"""`dflash-mlx generate --compare`: one prompt, decoded plainly and with drafting."""

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dflash_mlx.cli.output import note, say, styled
from dflash_mlx.cli.side_by_side import SideBySide, fits
from dflash_mlx.cli.streaming import answer

if TYPE_CHECKING:
    from dflash_mlx.cli.side_by_side import Column
    from dflash_mlx.decoding.constraint import Constraint
    from dflash_mlx.pair import ModelPair
    from dflash_mlx.sampling import SamplingParams

_WARM_UP_TOKENS = 8
_MODES = {"plain": "plain decoding", "drafted": "with drafting"}


def run_comparison(
    pair: "ModelPair",
    prompt: Any,
    params: "SamplingParams",
    *,
    width: int | None,
    tree: bool,
    constraint: "Constraint | None",
    as_json: bool,
) -> None:
    """Answer plainly, then with drafting; print both answers and what the difference is.

    On a terminal that is wide enough they stand beside each other. A few tokens in each mode come first and do not
    count: they warm the machine up.
    """
    if params.temperature > 0 and params.seed is None:
        params = replace(params, seed=0)
        note("at a temperature above 0 answers can only be compared with a seed: using --seed 0")
    results: dict[str, dict[str, Any]] = {}

    def answer_as(mode: str, wanted: "SamplingParams", *, echo: bool, column: "Column | None" = None) -> None:
        drafted = mode == "drafted"
        _, results[mode] = answer(
            pair,
            prompt,
            wanted,
            draft=drafted,
            echo=echo,
            width=width if drafted else None,
            tree=tree and drafted,
            constraint=constraint,
            column=column,
        )

    short = replace(params, max_tokens=min(_WARM_UP_TOKENS, params.max_tokens))
    for mode in _MODES:
        answer_as(mode, short, echo=False)
    if as_json or not fits():
        for mode, label in _MODES.items():
            if not as_json:
                print(styled(f"{label}:", "bold", sys.stdout), flush=True)
            answer_as(mode, params, echo=not as_json)
            if not as_json:
                print(flush=True)
    else:
        with SideBySide(list(_MODES.values())) as beside:
            for mode, column in zip(_MODES, beside.columns, strict=True):
                answer_as(mode, params, echo=True, column=column)
        print(flush=True)
    found = comparison(results["plain"], results["drafted"])
    if as_json:
        print(json.dumps({**results, **found}, ensure_ascii=False))
    else:
        say("\n".join(verdict(results["plain"], results["drafted"])))


def comparison(plain: dict[str, Any], drafted: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast drafting was, and the first token (counted from 0, as bench does) that differs."""
    speeds = plain["generation_tps"], drafted["generation_tps"]
    from dflash_mlx.bench.record import first_difference

    difference = first_difference(plain["token_ids"], drafted["token_ids"])
    return {
        "speedup": round(speeds[1] / speeds[0], 3) if all(speeds) else None,
        "same_tokens": difference is None,
        "first_difference": difference,
    }


def verdict(plain: dict[str, Any], drafted: dict[str, Any]) -> list[str]:
    """The comparison in lines for people."""
    found = comparison(plain, drafted)
    lines = [
        f"{label + ':':<16}{result['generation_tps']:.1f} tok/s"
        for label, result in zip(_MODES.values(), (plain, drafted), strict=True)
    ]
    if found["speedup"] is not None:
        lines[1] += f", {found['speedup']:.2f} times as fast"
    acceptance = drafted["acceptance"]
    if acceptance is not None and acceptance["rounds"]:
        lines[1] += f", acceptance length {acceptance['mean_acceptance_length']:.2f}"
    if found["same_tokens"]:
        lines.append(f"the words are the same: all {len(plain['token_ids'])} tokens are identical")
    else:
        lines.append(
            f"the words differ after {found['first_difference']} equal tokens; "
            "`dflash-mlx parity` says whether that is rounding"
        )
    return lines
