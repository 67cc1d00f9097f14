"""Imports go one way, types included: no part of the package knows of those above it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent / "dflash_mlx"
# Folders and modules, the lowest first; those of one line may import each other.
LAYERS = (
    {
        *{"__init__", "constants", "detokenizing", "errors", "hooks", "ranks", "rounding", "runtime", "sampling"},
        *{"tree_steps", "wired"},
    },
    {"hub"},
    {"caches"},
    {"targets"},
    {"drafters"},
    {"policy.stored"},  # measurements on disk, of kernels as of rounds
    {"kernels"},
    {"decoding"},
    {"checks", "policy"},
    {"choice"},
    {"pair"},
    {"checked", "loading"},
    {"hub.quantize"},  # needs loaded models, unlike the rest of its folder
    {"answer", "scoring"},
    {"answering"},
    {"generation"},
    {"bench", "model", "parity", "server", "training"},
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}


def imported(path: Path) -> set[str]:
    """The parts of the package that a file imports, wherever it does."""
    names = [
        name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom | ast.Import)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    ]
    return {part_of(name.split(".")[1:]) for name in names if name.startswith("dflash_mlx.")}


def part_of(parts: list[str]) -> str:
    """A module's part, by its path within the package: the folder or file, or a module that has a layer of its own."""
    own = ".".join(parts[:2])
    return own if own in LAYER_OF else parts[0]


def test_every_part_has_a_layer() -> None:
    found = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert found == {name for name in LAYER_OF if "." not in name}


def test_imports_go_one_way() -> None:
    upward = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in ROOT.rglob("*.py")
        if path != ROOT / "__init__.py"
        for name in imported(path)
        if LAYER_OF[name] > LAYER_OF[part_of(list(path.relative_to(ROOT).with_suffix("").parts))]
    ]
    assert upward == []


def test_every_folder_is_installed() -> None:
    """The list in pyproject.toml is written by hand; a folder that it lacks is missing for everybody but developers."""
    text = (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(re.findall(r'^  "(dflash_mlx[\w.]*)",$', text, re.MULTILINE))
    folders = {path.parent.relative_to(ROOT.parent) for path in ROOT.rglob("__init__.py")}
    assert {".".join(folder.parts) for folder in folders} <= listed
