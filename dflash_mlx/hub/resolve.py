"""Which drafter belongs to a target: by its name, by the model card's base model, by its build.

A quantization of a known target takes that target's drafter. A fine-tune does too, with a warning: its answers differ
from those the drafter learned, so fewer drafts are kept. Whether the two fit is found out by `checks`, on loading.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_mlx.errors import CheckpointError, DownloadError, UsageError
from dflash_mlx.hub.folder import read_json
from dflash_mlx.hub.naming import base_name, families_of, is_drafter, text_config
from dflash_mlx.hub.registry import ModelSource, PairSpec, Shape, list_pairs, parse_source

How = Literal["known", "quantization", "fine-tune"]


@dataclass(frozen=True)
class TargetFacts:
    """What is known of a target without loading it."""

    name: str  # "owner/name", or a folder
    config: dict[str, Any] | None = None
    base_models: tuple[str, ...] = ()  # of the model card
    quantized: bool = False  # the card says that it is a quantization of them, and nothing else


@dataclass(frozen=True)
class Match:
    """A pair for a target, and how it was found. `warning` is for the user."""

    pair: PairSpec
    how: How
    warning: str | None = None


class UnknownTargetError(UsageError):
    """No drafter is known for a target."""


def pair_for_target(text: str) -> Match:
    """The pair whose drafter fits the target that a user named: a Hub id or a folder.

    A Hub model whose name says nothing is looked up: its config.json and its card's base model. Raises UsageError with
    the targets that are known where none fits, or where several do.
    """
    source = parse_source(text)
    pairs = list_pairs()
    facts = local_facts(source)
    match, unasked = match_target(facts, pairs), ""
    if match is None and facts.config is None and source.kind == "hub":
        try:
            facts = _remote_facts(source)
        except DownloadError as error:
            unasked = f" (Whether it is a fine-tune of one cannot be found out: {error})"
        match = match_target(facts, pairs)
    if match is None:
        raise UnknownTargetError(_unknown(facts, pairs) + unasked)
    return match


def match_target(facts: TargetFacts, pairs: list[PairSpec]) -> Match | None:
    """The pair for a target; None where none fits. Raises UsageError where several fit equally."""
    if facts.config is not None and is_drafter(facts.config):
        raise UsageError(
            f"{facts.name} is a drafter, and --model takes the model that answers. Give the drafter to --draft-model."
        )
    wanted = facts.name.partition("@")[0].lower()
    for pair in pairs:
        if wanted in {(source.repo or "").lower() for source in (pair.target, *pair.other_targets)}:
            return Match(pair, "known")
    fitting = [pair for pair in pairs if not contradicts(pair.shape, facts.config)]
    names = {base_name(facts.name)} | ({base_name(base) for base in facts.base_models} if facts.quantized else set())
    for pair in fitting:
        if names & _base_names(pair):
            return Match(pair, "quantization")
    return _fine_tune(facts, fitting)


def _fine_tune(facts: TargetFacts, fitting: list[PairSpec]) -> Match | None:
    bases = {base_name(base) for base in facts.base_models}
    found = [pair for pair in fitting if bases & _base_names(pair)]
    why = "its model card names that as its base"
    if not found and facts.config is not None:
        found = [pair for pair in fitting if same_build(pair.shape, facts.config)]
        why = "it has the same layers and vocabulary"
        named = [pair for pair in found if any(name in facts.name.lower() for name in _base_names(pair))]
        found = named or found
    if not found:
        return None
    if len(found) > 1:
        choices = ", ".join(f"{pair.drafter} (for {pair.base})" for pair in found)
        raise UsageError(
            f"{facts.name} could be a fine-tune of several known targets: choose one with --draft-model, {choices}."
        )
    warning = (
        f"{facts.name} is taken for a fine-tune of {found[0].base} ({why}) and uses {found[0].drafter}. The answers "
        "are its own, but fewer drafts may be kept than with the model that the drafter was trained for."
    )
    return Match(found[0], "fine-tune", warning)


def contradicts(shape: Shape, config: dict[str, Any] | None) -> bool:
    """Whether a config.json has other sizes than a known target. Where nothing is known, nothing is wrong."""
    if config is None:
        return False
    found = _sizes(config)
    return any(value is not None and found[key] not in (value, None) for key, value in _known_sizes(shape).items())


def same_build(shape: Shape, config: dict[str, Any]) -> bool:
    """Whether everything known of a target is so in a config.json, and enough of it is known."""
    found = _sizes(config)
    return (
        None not in (shape.hidden_size, shape.num_layers)
        and (shape.family or shape.vocab_size) is not None
        and shape.family in (None, *families_of(config))
        and all(value in (None, found[key]) for key, value in _known_sizes(shape).items())
    )


def _known_sizes(shape: Shape) -> dict[str, int | None]:
    return {"hidden_size": shape.hidden_size, "num_layers": shape.num_layers, "vocab_size": shape.vocab_size}


def _sizes(config: dict[str, Any]) -> dict[str, int | None]:
    text = text_config(config)
    return {
        "hidden_size": text.get("hidden_size"),
        "num_layers": text.get("num_hidden_layers"),
        "vocab_size": text.get("vocab_size", config.get("vocab_size")),
    }


def _base_names(pair: PairSpec) -> set[str]:
    repos = [source.repo for source in (pair.target, *pair.other_targets)]
    return {base_name(repo) for repo in (pair.base, *repos) if repo}


def local_facts(source: ModelSource) -> TargetFacts:
    """What a folder, or the copy of a Hub model on this disk, says; only the name where there is none. No network."""
    from dflash_mlx.hub.download import find_on_disk

    folder = find_on_disk(source)
    if folder is None:
        return TargetFacts(name=str(source))
    try:
        config = read_json(folder / "config.json")
    except CheckpointError:
        return TargetFacts(name=str(source))
    bases, quantized = read_card(folder / "README.md")
    return TargetFacts(str(source), config, bases, quantized)


def read_card(card: Path) -> tuple[tuple[str, ...], bool]:
    """`base_model` in the YAML at the top of a model card, one name or a list, and whether it is a quantization."""
    try:
        text = card.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return (), False
    head = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    entry = re.search(r"^base_model:[ \t]*(.*(?:\n[ \t]*-[ \t]*.*)*)", head[1], re.MULTILINE) if head else None
    quantized = bool(head and re.search(r"^base_model_relation:[ \t]*quantized", head[1], re.MULTILINE))
    return (tuple(re.findall(r"[\w.-]+/[\w.-]+", entry[1])) if entry else ()), quantized


def _remote_facts(source: ModelSource) -> TargetFacts:
    from dflash_mlx.hub.huggingface import card_facts

    config, card = card_facts(source)
    bases = card.get("base_model") or ()
    names = (bases,) if isinstance(bases, str) else tuple(map(str, bases))
    return TargetFacts(str(source), config, names, quantized=card.get("base_model_relation") == "quantized")


def _unknown(facts: TargetFacts, pairs: list[PairSpec]) -> str:
    """No drafter is known: what the target is, which known ones are like it, and what else can be done."""
    by_name = {name: pair for pair in pairs for name in _base_names(pair)}
    close = [by_name[name] for name in difflib.get_close_matches(base_name(facts.name), by_name, n=3, cutoff=0.5)]
    build = ""
    if facts.config is not None:
        found, families = _sizes(facts.config), families_of(facts.config)
        family = families[0] if families else "of no known type"
        build = f" ({family}, {found['num_layers']} layers, hidden size {found['hidden_size']})"
        close += [pair for pair in pairs if pair.shape.family in families]
    names = list(dict.fromkeys(pair.name for pair in close))[:6]
    like = f" Known and like it: {', '.join(names)}." if names else ""
    return (
        f"no drafter is known for {facts.name}{build}.{like} `dflash-mlx models list --all` lists the known ones, and "
        "`dflash-mlx train` makes a drafter."
    )
