"""The start of the command, and what it says about the other distribution with the module dflash_mlx."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_on_mlx

ROOT = Path(__file__).parent.parent


def start(*folders: Path, arguments: tuple[str, ...] = ("--version",), **environment: str) -> tuple[int, str, str]:
    """Start the command with these folders first in Python's path: exit code, stdout, stderr."""
    code = "import sys; from dflash_on_mlx import main; sys.exit(main())"
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **environment},
        cwd=folders[0],  # with -c, the current folder comes first in Python's path
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ran.returncode, ran.stdout, ran.stderr


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder of packages, in which pip has noted the other distribution; its module is elsewhere."""
    folder = tmp_path / "site-packages"
    (folder / "dflash_mlx-0.1.8.dist-info").mkdir(parents=True)
    return folder


def test_nothing_is_said_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dflash_on_mlx-0.1.0.dist-info", "dflash_mlx", "dflash_mlx.egg-info", "dflash_mlx_tools-1.dist-info"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "no-such-folder"), __file__])
    assert dflash_on_mlx.other_version() is None


def test_the_start_says_it_in_one_line_and_goes_on(other: Path) -> None:
    code, out, err = start(other)
    assert (code, out.split()[0]) == (0, "dflash-mlx")
    [line] = err.splitlines()
    assert line.startswith("warning: ")
    assert "dflash-mlx 0.1.8" in line
    assert "pip uninstall dflash-mlx dflash-on-mlx" in line


@pytest.mark.parametrize("own_files_too", [False, True])
def test_a_module_of_both_is_explained_without_a_traceback(other: Path, own_files_too: bool) -> None:
    """What pip leaves when both are installed into one folder, in either order."""
    package = other / "dflash_mlx"
    (package / "runtime").mkdir(parents=True)
    (package / "runtime" / "__init__.py").write_text("")
    (package / "cli.py").write_text("def main(): print('the other program')\n")
    own = (ROOT / "dflash_mlx" / "__init__.py").read_text(encoding="utf-8")
    (package / "__init__.py").write_text(own if own_files_too else "__version__ = '0.1.8'\n")
    code, out, err = start(other)
    assert (code, out) == (1, "")
    [line] = err.splitlines()
    assert line.startswith("error: ")
    assert "pip uninstall" in line


def test_files_of_both_in_one_folder_are_not_started(other: Path) -> None:
    """Although the import of the first modules may succeed."""
    shutil.copy(ROOT / "dflash_on_mlx.py", other)
    code, out, err = start(other, arguments=("models",))
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1


def test_a_shell_that_completes_hears_nothing(other: Path) -> None:
    _, _, err = start(
        other, arguments=(), _DFLASH_MLX_COMPLETE="complete_bash", COMP_WORDS="dflash-mlx d", COMP_CWORD="1"
    )
    assert "warning" not in err


def test_doctor_says_it_once(other: Path) -> None:
    code, out, err = start(other, arguments=("doctor", "--json"))
    assert (code, err) == (1, "")
    [problem] = [problem for problem in json.loads(out)["problems"] if "0.1.8" in problem]
    assert problem.startswith("installation: ")


def test_the_command_starts_here() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dflash-mlx = "dflash_on_mlx:main"' in pyproject
    assert 'name = "dflash-on-mlx"' in pyproject
