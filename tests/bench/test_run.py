"""The order of the runs and what is measured in them, on contestants that keep their own time."""

import functools
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from bench.fake import Fake, Time, fakes

from dflash_mlx.bench.energy import Energy
from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.bench.record import Results, first_difference
from dflash_mlx.bench.run import Setting, order, plan, run_jobs, seconds_left, time_answer, warm_up
from dflash_mlx.generation import GenerationResponse
from dflash_mlx.sampling import SamplingParams

PARAMS = SamplingParams()
PLAIN = [Setting("", PARAMS)]


def same_tokens(prompt: str, name: str) -> list[int]:
    return list(range(10))


def prompts(*texts: str) -> list[BenchPrompt]:
    return [BenchPrompt(name=text, category="chat", text=text) for text in texts]


def test_time_to_the_first_token_is_kept_out_of_the_decoding_speed() -> None:
    time = Time()
    both = fakes(same_tokens, time=time)
    plain, drafted = (time_answer(both[name], "p", PARAMS, clock=time.clock) for name in ("plain", "drafted"))
    assert plain.first_s == drafted.first_s == pytest.approx(0.5)
    # Nine tokens after the first: nine steps of 0.1 s, or three rounds of 0.15 s.
    assert plain.wall_s == pytest.approx(0.5 + 9 * 0.1)
    assert plain.decode_tps == pytest.approx(10.0)
    assert plain.answer_tps == pytest.approx(10 / 1.4)
    assert plain.prefill_tps == pytest.approx(7 / 0.5)
    assert replace(plain, cached_tokens=2).prefill_tps == pytest.approx(5 / 0.5)
    # Where only one token had to be read, the half second was for something else.
    assert replace(plain, cached_tokens=6).prefill_tps is None
    assert drafted.wall_s == pytest.approx(0.5 + 3 * 0.15)
    assert drafted.decode_tps == pytest.approx(20.0)
    assert plain.token_ids == drafted.token_ids == list(range(10))
    assert plain.text == "abcdefghij"
    assert (plain.acceptance, plain.rounds) == (None, [])
    assert drafted.acceptance is not None
    assert drafted.acceptance["rounds"] == 3
    assert [(round(r.ms), r.width, r.kept, r.tokens) for r in drafted.rounds] == [(150, 4, 2, 3)] * 3
    assert drafted.notices == ["drafting paused"]
    assert (plain.finish_reason, plain.prompt_tokens) == ("length", 7)


def test_a_round_takes_what_it_says_and_not_the_time_between_responses() -> None:
    """The next round may have begun, and be half done, before a response comes."""
    time = Time()
    fake = replace(fakes(same_tokens, time=time)["drafted"], rounds_s=[0.07, 0.23])
    run = time_answer(fake, "p", PARAMS, clock=time.clock)
    assert [round(r.ms) for r in run.rounds] == [70, 230, 150]


def test_contestants_take_turns_and_so_does_the_one_that_goes_first() -> None:
    time = Time()
    both = fakes(same_tokens, time=time)
    jobs = plan(prompts("a", "b", "c"), PLAIN, list(both), repeat=2)
    for _ in run_jobs(jobs, both, clock=time.clock):
        pass
    assert time.asked == [
        ("a", "plain"),
        ("a", "drafted"),
        ("b", "drafted"),
        ("b", "plain"),
        ("c", "drafted"),
        ("c", "plain"),
        ("a", "drafted"),
        ("a", "plain"),
        ("b", "drafted"),
        ("b", "plain"),
        ("c", "plain"),
        ("c", "drafted"),
    ]
    assert {len(job.result.runs) for job in jobs} == {4}


class Pausing(Fake):
    """One that can be left for a while; notes each of its responses."""

    pauses = True

    def answer(self, prompt: Any, params: object) -> Iterator[GenerationResponse]:
        for response in super().answer(prompt, params):
            self.time.asked.append(("", f"{self.name} {len(response.token_ids)}"))
            yield response


def test_answers_that_can_wait_go_on_for_some_tokens_at_a_time_and_keep_time_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = Time()
    waited = []
    monkeypatch.setattr("mlx.core.synchronize", lambda: waited.append(time.now))
    all_three = {"plain": Pausing("plain", time, same_tokens), "another": Fake("another", time, same_tokens)}
    all_three["drafted"] = Pausing("drafted", time, same_tokens, step_s=0.15)
    jobs = plan(prompts("a"), PLAIN, list(all_three))
    meter = Energy(functools.partial(next, itertools.count(0.0)))
    runs = {run.contestant: run for _, run in run_jobs(jobs, all_three, turns=4, meter=meter, clock=time.clock)}
    assert [name for _, name in time.asked] == [
        *["plain", "plain 1", "plain 1", "plain 1", "plain 1"],
        *["drafted", "drafted 1", "drafted 3"],
        *["drafted 3", "drafted 3"],
        *["plain 1"] * 4,
        *["plain 1"] * 2,
        "another",
    ]
    assert [run.wall_s for run in runs.values()] == pytest.approx([1.4, 0.5 + 3 * 0.15, 1.4])
    assert {tuple(run.token_ids) for run in runs.values()} == {tuple(range(10))}
    assert {name: run.joules for name, run in runs.items()} == {"plain": 3.0, "drafted": 2.0, "another": 1.0}
    # What a turn has launched is its own.
    assert len(waited) == 3


@pytest.mark.parametrize("names", ["ab", "abc", "abcdefghijk"])
def test_each_is_the_first_one_equally_often_and_before_each_other_as_often_as_after_it(names: str) -> None:
    turns = [order(names, turn) for turn in range(2 * len(names))]
    assert all(sorted(turn) == list(names) for turn in turns)
    assert {sum(turn[0] == name for turn in turns) for name in names} == {2}
    for one, other in itertools.combinations(names, 2):
        assert sum(turn.index(one) < turn.index(other) for turn in turns) == len(names)


def test_settings_have_results_of_their_own_and_context_comes_before_the_prompt() -> None:
    both = fakes(same_tokens)
    settings = [Setting("context=5", PARAMS, 5), Setting("context=9", PARAMS, 9)]
    jobs = plan(prompts("a"), settings, ["plain"])
    list(run_jobs(jobs, both, pad=lambda text, tokens: "." * tokens + text))
    assert [text for text, _ in both["plain"].time.asked] == [".....a", ".........a"]
    assert [job.result.setting for job in jobs] == ["context=5", "context=9"]


def test_a_second_turn_follows_the_baselines_answer_for_all() -> None:
    answers = {"plain": [0, 1, 2], "drafted": [3, 4, 5]}
    both = fakes(lambda prompt, name: answers[name])
    asked = [*prompts("a"), BenchPrompt(name="a.2", category="chat", text="and then?", follows="a")]
    list(run_jobs(plan(asked, PLAIN, list(both)), both))
    assert [text for text, _ in both["plain"].time.asked] == ["a", "a", *["a | abc | and then?"] * 2]


def test_the_energy_of_a_server_elsewhere_is_not_this_machines() -> None:
    count = itertools.count()
    both = fakes(same_tokens)
    both["drafted"].local = False  # type: ignore[attr-defined]
    meter = Energy(lambda: float(next(count)))
    runs = [run for _, run in run_jobs(plan(prompts("a"), PLAIN, list(both)), both, meter=meter)]
    assert [run.joules for run in runs] == [1.0, None]


def test_what_was_measured_before_an_interruption_is_kept() -> None:
    def interrupted(prompt: str, name: str) -> list[int]:
        if (prompt, name) == ("b", "plain"):
            raise KeyboardInterrupt
        return [1, 2]

    both = fakes(interrupted)
    jobs = plan(prompts("a", "b"), PLAIN, list(both))
    with pytest.raises(KeyboardInterrupt):
        list(run_jobs(jobs, both))
    assert [[run.contestant for run in job.result.runs] for job in jobs[::2]] == [["plain", "drafted"], ["drafted"]]


def test_warming_up_runs_every_contestant() -> None:
    both = fakes(same_tokens)
    assert warm_up(both, "p", PARAMS, max_tokens=4).keys() == both.keys()
    assert both["plain"].time.asked == [("p", "plain"), ("p", "plain"), ("p", "drafted"), ("p", "drafted")]


def test_what_is_made_once_does_not_count_for_the_estimate() -> None:
    asked: list[str] = []

    def slow_at_first(prompt: str, name: str) -> list[int]:
        if name not in asked:
            time.sleep(0.3)
        asked.append(name)
        return [1, 2]

    assert max(warm_up(fakes(slow_at_first), "p", PARAMS, max_tokens=4).values()) < 0.2


def test_the_time_that_is_left() -> None:
    assert seconds_left({"a": [], "b": []}, Counter(a=3, b=3)) is None
    assert seconds_left({"a": [2.0, 4.0], "b": [1.0]}, Counter(a=3, b=2)) == pytest.approx(3 * 3.0 + 2 * 1.0)
    # One that has not run yet is as slow as the others.
    assert seconds_left({"a": [2.0, 4.0], "b": []}, Counter(b=2)) == pytest.approx(6.0)


def test_a_difference_in_any_repeat_is_found() -> None:
    answers = {"plain": [1, 2, 3, 4, 5], "drafted": [1, 2, 3, 4, 5]}
    both = fakes(lambda prompt, name: answers[name])
    jobs = plan(prompts("a"), PLAIN, list(both))
    result = jobs[0].result
    list(run_jobs(jobs, both))
    assert result.first_difference("drafted", "plain") is None
    answers["drafted"] = [1, 2, 9, 4, 5]
    list(run_jobs(jobs, both))
    assert result.first_difference("drafted", "plain") == 2


def test_an_answer_of_one_token_has_no_decoding_speed() -> None:
    both = fakes(lambda prompt, name: [5])
    jobs = plan(prompts("a"), PLAIN, list(both))
    list(run_jobs(jobs, both))
    result = jobs[0].result
    assert (result.tps("plain"), result.speedup("drafted", "plain")) == (None, None)
    assert result.acceptance("drafted", "acceptance_rate") is None


def test_the_first_difference_of_two_lists() -> None:
    assert first_difference([], []) is None
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [3, 2]) == 0
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [5]) == 0


def test_the_baseline_is_the_first_contestant() -> None:
    assert Results(facts={}, contestants={"x": "", "y": ""}, main="y").baseline == "x"
