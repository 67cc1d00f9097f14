"""scripts/mutate.py chooses modules and their tests as it says; what mutmut then does is its own."""

import argparse
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("mutate", ROOT / "scripts" / "mutate.py")
mutate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutate)


@pytest.fixture
def settings():
    return mutate.tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]


def choose(patterns, *modules, everything=False):
    return mutate.choose_modules(argparse.Namespace(modules=modules, all=everything, since="main"), patterns)


def test_every_module_that_is_mutated_has_tests(settings):
    modules = choose(settings["mutmut"]["only_mutate"], everything=True)
    assert {"dflash_mlx/sampling.py", "dflash_mlx/server/worker.py", "dflash_mlx/policy/width.py"} <= set(modules)
    assert "dflash_mlx/server/app.py" not in modules
    assert "dflash_mlx/policy/__init__.py" not in modules
    for module in modules:
        tests = mutate.tests_of(module, settings["dflash-mlx"]["mutation-tests"])
        assert tests, module
        for test in tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), test
            assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_the_table_names_modules_that_exist(settings):
    assert all((ROOT / "dflash_mlx" / name).is_file() for name in settings["dflash-mlx"]["mutation-tests"])


def test_a_modules_tests_are_the_file_of_its_name_or_its_folders(settings):
    assert mutate.tests_of("dflash_mlx/policy/width.py", {}) == ["tests/policy/test_width.py"]
    assert mutate.tests_of("dflash_mlx/sampling.py", {}) == ["tests/test_sampling.py"]
    assert mutate.tests_of("dflash_mlx/policy/stored.py", {}) == ["tests/policy"]
    assert mutate.tests_of("dflash_mlx/policy/width.py", {"policy/width.py": ["a"]}) == ["a"]


def test_only_what_the_settings_allow_is_mutated():
    names = [str(ROOT / name) for name in ("dflash_mlx/policy/width.py", "dflash_mlx/pair.py", "cli/app.py")]
    assert choose(["dflash_mlx/policy/*.py"], *names) == ["dflash_mlx/policy/width.py"]


def test_a_copy_has_settings_for_one_module(tmp_path):
    mutate.copy_tree(tmp_path / "copy", "dflash_mlx/policy/width.py", ["tests/policy/test_width.py"])
    own = mutate.tomllib.loads((tmp_path / "copy" / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
    assert own["only_mutate"] == ["dflash_mlx/policy/width.py"]
    assert own["pytest_add_cli_args_test_selection"] == ["tests/policy/test_width.py"]
    assert own["process_isolation"] == "forkserver"
    assert (tmp_path / "copy" / "dflash_mlx" / "policy" / "width.py").is_file()
