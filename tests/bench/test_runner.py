"""The order of the runs and what is measured in them, on a pair that keeps its own time."""

from typing import cast

import pytest
from bench.fake import FakePair, fake_stream

from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.bench.runner import Mode, PromptResult, first_difference, run_bench, run_prompt, warm_up
from dflash_mlx.pair import ModelPair
from dflash_mlx.sampling import SamplingParams


def some_results(*texts: str) -> list[PromptResult]:
    return [PromptResult(prompt=BenchPrompt(name=text, category="chat", text=text)) for text in texts]


def bench(fake: FakePair, results: list[PromptResult], *, repeat: int = 1, draft: bool = True) -> list[Mode]:
    pair = cast(ModelPair, fake)
    runs = run_bench(pair, results, SamplingParams(), repeat=repeat, draft=draft, stream=fake_stream, clock=fake.clock)
    return [run.mode for _, run in runs]


def same_tokens(prompt: str, mode: Mode) -> list[int]:
    return list(range(10))


def test_time_to_the_first_token_is_kept_out_of_the_decoding_speed() -> None:
    fake = FakePair(same_tokens)
    prompt = BenchPrompt(name="p", category="chat", text="p")
    pair = cast(ModelPair, fake)
    plain = run_prompt(pair, prompt, SamplingParams(), mode="plain", stream=fake_stream, clock=fake.clock)
    drafted = run_prompt(pair, prompt, SamplingParams(), mode="drafted", stream=fake_stream, clock=fake.clock)
    assert plain.first_s == drafted.first_s == pytest.approx(0.5)
    # Nine tokens after the first: nine steps of 0.1 s, or three rounds of 0.15 s.
    assert plain.wall_s == pytest.approx(0.5 + 9 * 0.1)
    assert plain.decode_tps == pytest.approx(10.0)
    assert drafted.wall_s == pytest.approx(0.5 + 3 * 0.15)
    assert drafted.decode_tps == pytest.approx(20.0)
    assert plain.token_ids == drafted.token_ids == list(range(10))
    assert plain.acceptance is None
    assert drafted.acceptance is not None
    assert drafted.acceptance["rounds"] == 3
    assert drafted.notices == ["drafting paused"]
    assert (plain.finish_reason, plain.prompt_tokens) == ("length", 7)


def test_the_modes_take_turns_and_so_does_the_one_that_goes_first() -> None:
    fake = FakePair(same_tokens)
    results = some_results("a", "b", "c")
    bench(fake, results, repeat=2)
    assert fake.asked == [
        ("a", "plain"),
        ("a", "drafted"),
        ("b", "drafted"),
        ("b", "plain"),
        ("c", "plain"),
        ("c", "drafted"),
        ("a", "drafted"),
        ("a", "plain"),
        ("b", "plain"),
        ("b", "drafted"),
        ("c", "drafted"),
        ("c", "plain"),
    ]
    assert [len(result.runs) for result in results] == [4, 4, 4]


def test_without_drafting_only_the_plain_mode_runs() -> None:
    fake = FakePair(same_tokens)
    results = some_results("a", "b")
    assert bench(fake, results, draft=False) == ["plain", "plain"]
    assert results[0].speedup is None
    assert results[0].to_json()["identical"] is None


def test_a_prompt_s_figures_are_medians_over_the_repeats() -> None:
    fake = FakePair(same_tokens)
    [result] = some_results("a")
    for plain_step in (0.1, 0.2, 0.9):  # 10, 5 and 1.1 tokens a second
        fake.step_s = {"plain": plain_step, "drafted": 0.15}
        bench(fake, [result])
    assert result.tps("plain") == pytest.approx(5.0)
    assert result.speedup == pytest.approx(4.0)
    # Each round emits 3 tokens of which 2 were drafts, of 4 verified.
    assert result.acceptance("mean_acceptance_length") == pytest.approx(3.0)
    assert result.acceptance("acceptance_rate") == pytest.approx(0.5)


def test_a_difference_in_any_repeat_is_found() -> None:
    answers = {"plain": [1, 2, 3, 4, 5], "drafted": [1, 2, 3, 4, 5]}
    fake = FakePair(lambda prompt, mode: answers[mode])
    [result] = some_results("a")
    bench(fake, [result])
    assert result.first_difference is None
    answers["drafted"] = [1, 2, 9, 4, 5]
    bench(fake, [result])
    assert result.first_difference == 2
    assert result.to_json()["identical"] is False


def test_the_first_difference_of_two_lists() -> None:
    assert first_difference([], []) is None
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [3, 2]) == 0
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [5]) == 0


def test_an_answer_of_one_token_has_no_decoding_speed() -> None:
    fake = FakePair(lambda prompt, mode: [5])
    [result] = some_results("a")
    bench(fake, [result])
    assert result.tps("plain") is None
    assert result.speedup is None
    assert result.acceptance("acceptance_rate") is None


def test_what_was_measured_before_an_interruption_is_kept() -> None:
    fake = FakePair(same_tokens)
    results = some_results("a", "b")

    def interrupted(prompt: str, mode: Mode) -> list[int]:
        if (prompt, mode) == ("b", "plain"):
            raise KeyboardInterrupt
        return same_tokens(prompt, mode)

    fake.tokens = interrupted
    with pytest.raises(KeyboardInterrupt):
        bench(fake, results)
    assert [[run.mode for run in result.runs] for result in results] == [["plain", "drafted"], ["drafted"]]


def test_warming_up_runs_both_modes_and_keeps_nothing() -> None:
    fake = FakePair(same_tokens)
    prompt = BenchPrompt(name="p", category="chat", text="p")
    warm_up(cast(ModelPair, fake), prompt, SamplingParams(), stream=fake_stream)
    assert fake.asked == [("p", "plain"), ("p", "drafted")]
