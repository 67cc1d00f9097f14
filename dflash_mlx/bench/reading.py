"""results.json, read again: every value is looked at, since files get damaged and edited."""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.bench.record import SCHEMA, LoadRun, PromptResult, Results, Round, Run
from dflash_mlx.errors import UsageError

T = TypeVar("T")
_OWN = {"schema", "contestants", "main", "comparable", "measured", "prompts", "load"}


def from_json(document: Any, where: str) -> Results:
    """A document that `Results.to_json` made. Raises UsageError for anything else."""
    if not isinstance(document, dict) or "schema" not in document:
        raise UsageError(f"{where} is no result of `dflash-mlx bench`; expected results.json or the output of --json.")
    if document["schema"] != SCHEMA:
        raise UsageError(
            f"{where} has schema {document['schema']!r:.40} and this version reads {SCHEMA}; measure again with it."
        )
    try:
        return _results(document)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{where} is damaged: {error!r:.200}. Measure again.") from error


def _results(document: Mapping[str, Any]) -> Results:
    contestants = {_text(name): _text(words) for name, words in document["contestants"].items()}
    if document["main"] not in contestants:
        raise ValueError(f"main is {document['main']!r}")
    facts = {key: value for key, value in document.items() if key not in _OWN}
    for part in ("machine", "params"):
        _mapping(facts.get(part) or {})
    return Results(
        facts=facts,
        contestants=contestants,
        main=document["main"],
        comparable={_text(key): _list(names, _text) for key, names in document["comparable"].items()},
        prompts=_list(document["prompts"], _prompt_result),
        load=_list(document["load"], _load_run),
        machine=dict(_mapping(document["measured"])),
    )


def _prompt_result(entry: Mapping[str, Any]) -> PromptResult:
    prompt = BenchPrompt(
        name=_text(entry["name"]),
        category=_text(entry["category"]),
        text=_text(entry["prompt"]),
        follows=_or_none(_text, entry["follows"]),
    )
    return PromptResult(prompt=prompt, setting=_text(entry["setting"]), runs=_list(entry["runs"], _run))


def _run(entry: Mapping[str, Any]) -> Run:
    return Run(
        contestant=_text(entry["contestant"]),
        token_ids=_list(entry["token_ids"], _whole),
        text=_text(entry["text"]),
        finish_reason=_or_none(_text, entry["finish_reason"]),
        prompt_tokens=_whole(entry["prompt_tokens"]),
        cached_tokens=_whole(entry["cached_tokens"]),
        first_s=_number(entry["first_s"]),
        wall_s=_number(entry["wall_s"]),
        decode_tokens=_whole(entry["decode_tokens"]),
        peak_memory_gb=_or_none(_number, entry["peak_memory_gb"]),
        joules=_or_none(_number, entry["joules"]),
        acceptance=_or_none(_acceptance, entry["acceptance"]),
        rounds=_list(entry["rounds"], _round),
        notices=_list(entry["notices"], _text),
        ids_from_text=bool(entry["ids_from_text"]),
    )


def _round(entry: Any) -> Round:
    ms, width, depth, kept, tokens = entry
    return Round(ms=_number(ms), width=_whole(width), depth=_whole(depth), kept=_whole(kept), tokens=_whole(tokens))


def _acceptance(entry: Any) -> dict[str, Any]:
    for key in ("rounds", "mean_acceptance_length", "acceptance_rate"):
        _number(entry[key])
    return dict(_mapping(entry))


def _load_run(entry: Mapping[str, Any]) -> LoadRun:
    return LoadRun(
        contestant=_text(entry["contestant"]),
        streams=_whole(entry["streams"]),
        requests=_whole(entry["requests"]),
        tokens=_whole(entry["tokens"]),
        seconds=_number(entry["seconds"]),
        first_s=_list(entry["first_s"], _number),
        gaps_s=_list(entry["gaps_s"], _number),
    )


def _number(value: Any) -> float:
    """A finite number that is not negative: everything here counts or lasts."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"expected a number of at least 0, found {value!r:.40}")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"expected a whole number, found {value!r:.40}")
    return int(_number(value))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {value!r:.40}")
    return value


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected an object, found {value!r:.40}")
    return value


def _list(values: Any, kind: Callable[[Any], T]) -> list[T]:
    if not isinstance(values, list):
        raise ValueError(f"expected a list, found {values!r:.40}")
    return [kind(value) for value in values]


def _or_none(kind: Callable[[Any], T], value: Any) -> T | None:
    return None if value is None else kind(value)
