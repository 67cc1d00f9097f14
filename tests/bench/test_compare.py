"""Two results: what is noise is called noise, what is not is not."""

import numpy as np
import pytest
from bench.fake import a_run, ratios, some_results

from dflash_mlx.bench.compare import compare, is_real, sentences
from dflash_mlx.bench.statistics import Interval
from dflash_mlx.errors import UsageError


def measured(seed: int, *, speedup: float = 1.6, machine: float = 1.0, prompts: int = 12) -> list[float]:
    """Speedups of prompts, each with noise of 4 % that differs from run to run."""
    own = np.random.default_rng(7).normal(speedup, 0.3, prompts)
    return [float(x) for x in own * np.random.default_rng(seed).normal(machine, 0.04, prompts)]


def test_two_runs_of_the_same_are_noise_nearly_always() -> None:
    found = [compare(ratios(measured(2 * n)), ratios(measured(2 * n + 1))).changes[0].real for n in range(25)]
    assert sum(found) <= 2
    said = sentences(compare(ratios(measured(0)), ratios(measured(1))))
    assert said[0].startswith("No change beyond noise: B answers ")
    assert "answers: 12 of 12 are the same tokens in both" in said


def test_a_machine_that_is_slower_the_second_time_is_taken_out() -> None:
    found = compare(ratios(measured(0)), ratios(measured(1), speed=6.0))
    assert found.changes[0].real is False
    assert found.changes[0].drift == pytest.approx(0.6, rel=0.01)


def test_nothing_is_1_times_as_fast() -> None:
    steady = [1.5, 1.6, 1.4, 1.7, 1.5, 1.6]
    assert sentences(compare(ratios(steady), ratios(steady)))[:4] == [
        "No change beyond noise: B answers just as fast as A.",
        "decoding: just as fast, noise",
        "the first token: just as fast, noise",
        "plain decoding was just as fast in B as in A",
    ]
    drifted = sentences(compare(ratios(steady), ratios(steady, speed=6.0)))[3]
    assert drifted == "plain decoding was 0.6 times as fast in B as in A; that is the machine, and has been taken out"


def test_a_real_change_is_found() -> None:
    found = compare(ratios(measured(0)), ratios(measured(1, machine=1.2)))
    assert found.changes[0].real is True
    assert found.changes[0].ratio == pytest.approx(1.2, rel=0.05)
    assert sentences(found)[0].startswith("B answers 1.")
    assert sentences(found)[0].endswith("more than noise.")


def test_drafting_off_against_on_is_more_than_noise() -> None:
    plain = some_results({f"chat-{n}": [a_run("plain", tokens=101, decode_s=10.0)] for n in range(1, 13)})
    found = compare(plain, ratios(measured(0)))
    assert found.changes[0].real is True
    assert sentences(found)[0].startswith("B (drafted) answers 1.6 times as fast as A (plain)")


def test_two_plain_runs_have_nothing_to_take_the_machine_out_with() -> None:
    def plain(seconds: float) -> dict[str, list]:
        return {f"chat-{n}": [a_run("plain", tokens=101, decode_s=seconds)] for n in range(8)}

    slower = compare(some_results(plain(10.0)), some_results(plain(10.8)))
    assert (slower.changes[0].drift, slower.changes[0].real) == (None, False)
    assert compare(some_results(plain(10.0)), some_results(plain(13.0))).changes[0].real is True


def test_few_prompts_give_no_verdict_and_none_in_common_is_refused() -> None:
    found = compare(ratios([1.5, 1.6]), ratios([1.5, 1.7]))
    assert found.changes[0].real is None
    assert "2 prompts are too few to say" in sentences(found)[0]
    assert "1 prompt is too few to say" in sentences(compare(ratios([1.5]), ratios([1.5])))[0]
    with pytest.raises(UsageError, match="no prompt in common"):
        compare(ratios([1.5]), some_results({"law-1": [a_run("plain", tokens=5, decode_s=1.0)]}))


def test_other_answers_turns_and_another_machine_are_named() -> None:
    one, other = ratios([1.5] * 6), ratios([1.5] * 6)
    one.facts["turns"], other.facts["turns"] = 0, 50
    other.facts["machine"] = {"chip": "another chip"}
    other.prompts[0].runs[1].token_ids[3] = 99
    said = sentences(compare(one, other))
    assert "answers: 5 of 6 are the same tokens in both" in said
    assert "different, too: tokens in a turn (0: whole answers): 0 and 50" in said
    assert "different, too: machine chip: a chip and another chip" in said


def test_a_change_needs_an_interval_without_1_and_some_size() -> None:
    assert is_real(1.2, None) is None
    assert is_real(1.2, Interval(0.99, 1.4)) is False
    assert is_real(1.02, Interval(1.01, 1.03)) is False
    assert is_real(0.9, Interval(0.85, 0.95)) is True
