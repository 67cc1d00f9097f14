"""Makes `tests/tiny.py` importable from here, and one tiny target folder for all tests of the session."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    from tiny_folder import write_target

    return write_target(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def orderly_folder(tmp_path_factory):
    """A target whose text can be learnt."""
    from tiny_folder import write_target

    return write_target(tmp_path_factory.mktemp("models") / "orderly", orderly=True)
