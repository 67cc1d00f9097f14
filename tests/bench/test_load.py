"""Waiting under load, from times of arrival that are written down."""

import pytest

from dflash_mlx.bench.load import Arrival, requests_for, summarize
from dflash_mlx.bench.prompts import BenchPrompt


def test_a_request_that_waits_for_a_place_begins_when_it_gets_one() -> None:
    arrivals = [
        Arrival(0, 1.0, 1, False),
        Arrival(1, 2.0, 1, False),
        Arrival(0, 3.0, 2, True),  # its place goes to request 2
        Arrival(2, 3.5, 1, False),
        Arrival(1, 4.0, 1, True),
        Arrival(2, 6.0, 1, True),
    ]
    found = summarize("x", arrivals, started=0.0, streams=2)
    assert (found.requests, found.tokens, found.seconds) == (3, 7, 6.0)
    assert found.tps == pytest.approx(7 / 6)
    assert found.first_s == [1.0, 2.0, 0.5]
    # Of the two tokens that came together at 3.0, one came with no time after the other.
    assert found.gaps_s == [2.0, 0.0, 2.0, 2.5]


def test_a_request_of_a_client_began_when_it_was_sent() -> None:
    found = summarize("x", [Arrival(0, 5.0, 1, True, sent=4.5)], started=0.0, streams=1)
    assert found.first_s == [0.5]
    assert summarize("x", [], started=0.0, streams=1).tps == 0.0


def test_prompts_begin_again_where_there_are_too_few() -> None:
    asked = [BenchPrompt(name=n, category="c", text=n, follows=f) for n, f in (("a", None), ("b", None), ("c", "b"))]
    assert requests_for(asked, 5) == ["a", "b", "a", "b", "a"]
    assert requests_for(asked, 1) == ["a", "b", "a", "b"]
