"""The wired limit is set once for all answers under way, and put back by the last of them."""

from contextlib import contextmanager

import pytest

from dflash_mlx import wired as module
from dflash_mlx.wired import wired


@pytest.fixture
def limit(monkeypatch):
    """What a Mac's wired limit would go through."""
    history = []

    @contextmanager
    def fake(model):
        history.append("set")
        yield
        history.append("restored")

    monkeypatch.setattr(module, "wired_limit", fake)
    return history


def test_answers_that_end_in_any_order(limit):
    first, second, third = wired(None), wired(None), wired(None)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    third.__enter__()
    second.__exit__(None, None, None)
    assert limit == ["set"]
    third.__exit__(None, None, None)
    assert limit == ["set", "restored"]
    with wired(None):
        pass
    assert limit == ["set", "restored"] * 2


def test_an_answer_that_fails(limit):
    with pytest.raises(RuntimeError, match="broken"), wired(None):
        raise RuntimeError("broken")
    assert limit == ["set", "restored"]
