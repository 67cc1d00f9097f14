"""Imports go one way, types included: no part of the package knows of those above it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent / "dflash_mlx"
# Folders and modules, the lowest first; those of one line may import each other.
LAYERS = (
    {"__init__", "errors", "hooks", "rounding", "runtime", "sampling", "wired"},
    {"hub"},
    {"caches"},
    {"targets"},
    {"drafters"},
    {"kernels"},
    {"decoding"},
    {"checks", "policy"},
    {"pair"},
    {"answer"},
    {"answering"},
    {"generation"},
    {"bench", "parity", "server", "training"},
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
    return {parts[1] for name in names if (parts := name.split("."))[0] == "dflash_mlx" and len(parts) > 1}


def test_every_part_has_a_layer() -> None:
    found = {path.stem if path.is_file() else path.name for path in ROOT.iterdir()}
    assert {name for name in found if name not in ("__pycache__", "py")} == set(LAYER_OF)


def test_imports_go_one_way() -> None:
    upward = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in ROOT.rglob("*.py")
        if path != ROOT / "__init__.py"
        for name in imported(path)
        if LAYER_OF[name] > LAYER_OF[path.relative_to(ROOT).parts[0].removesuffix(".py")]
    ]
    assert upward == []
