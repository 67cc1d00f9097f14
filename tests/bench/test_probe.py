"""How a round is split into its parts, with parts of known times."""

from types import SimpleNamespace

import pytest

from dflash_mlx.bench import probe
from dflash_mlx.bench.record import Round


def rounds(*kinds: tuple[int, int, float]) -> list[Round]:
    """Of so many drafts, as many places deep, in so many milliseconds."""
    return [Round(ms=ms, width=width, depth=depth, kept=0, tokens=1) for width, depth, ms in kinds]


@pytest.fixture
def pair(monkeypatch):
    """Drafts a place in a millisecond, and verifies a row in two."""
    monkeypatch.setattr(probe, "draft_ms", lambda pair, places: float(places))
    monkeypatch.setattr(probe, "pass_ms", lambda pair, rows: 2.0 * rows)
    return SimpleNamespace(drafter=object(), block_size=16)


def test_the_commonest_kind_of_round_is_split(pair):
    split = probe.split_round(pair, rounds((3, 3, 20.0), (3, 3, 30.0), (3, 3, 25.0), (7, 7, 99.0), (7, 7, 99.0)))
    assert split == probe.Split(width=3, round_ms=25.0, draft_ms=3.0, verify_ms=8.0, rest_ms=14.0)


def test_of_trees_all_places_are_drafted_also_where_one_is_a_chain(pair):
    small = [(1, 1, 24.0)] * 3
    assert probe.split_round(pair, rounds(*small)).draft_ms == 1.0
    assert probe.split_round(pair, rounds(*small, (7, 4, 40.0))) == probe.Split(
        width=1, round_ms=24.0, draft_ms=15.0, verify_ms=4.0, rest_ms=5.0
    )


def test_parts_that_overlap_leave_no_rest(pair):
    assert probe.split_round(pair, rounds((3, 3, 10.0))).rest_ms is None


def test_without_drafts_there_is_nothing_to_split(pair):
    assert probe.split_round(pair, []) is None
    pair.drafter = None
    assert probe.split_round(pair, rounds((3, 3, 20.0))) is None
