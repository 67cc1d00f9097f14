"""The command line in this process, with a cache folder of its own for each test."""

from collections.abc import Callable
from pathlib import Path

import fake_pair
import pytest

from dflash_mlx.cli.app import main


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a cache folder of its own."""
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> fake_pair.FakePair:
    """The fake pair in place of the real ones, in this process."""

    def put(module: object, name: str, value: object) -> None:
        monkeypatch.setattr(module, name, value, raising=False)

    fake_pair.install(put)
    return fake_pair.PAIR


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `dflash-mlx` here: run("generate", "hi") -> exit code, stdout, stderr."""

    def runner(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return runner
