"""Figures and sentences against numbers worked out by hand."""

from dataclasses import replace

import pytest
from bench.fake import a_run, ratios, some_results

from dflash_mlx.bench.analyse import analyse, as_fast, between, by_position, by_width, rounds_of, times, unlike, verdict
from dflash_mlx.bench.record import Results, Round
from dflash_mlx.bench.statistics import Interval


def three_results() -> Results:
    """Two code prompts, sped up 4 and 2 times, and a chat prompt, slowed to a half."""
    return some_results(
        {
            "code-1": [
                a_run("plain", tokens=101, decode_s=10.0, first_s=1.0),  # 10 tok/s
                a_run("drafted", tokens=101, decode_s=2.5, first_s=1.5, kept=(4,) * 20),  # 40 tok/s
            ],
            "code-2": [
                a_run("drafted", tokens=41, decode_s=1.0, first_s=0.5, kept=(1,) * 20),  # 40 tok/s
                a_run("plain", tokens=41, decode_s=2.0, first_s=0.5),  # 20 tok/s
            ],
            "chat-1": [
                a_run("plain", tokens=11, decode_s=1.0, first_s=0.2),  # 10 tok/s
                a_run("drafted", tokens=11, decode_s=2.0, first_s=0.3, kept=(0,) * 6 + (1, 1)),  # 5 tok/s
            ],
        }
    )


def test_medians_and_totals() -> None:
    figures = analyse(three_results())
    assert [(f.group, f.contestant) for f in figures] == [
        (group, name) for group in ("code", "chat", "all") for name in ("plain", "drafted")
    ]
    code_plain, code, _, chat, plain, total = figures
    assert (code.prompts, chat.prompts, total.prompts) == (2, 1, 3)
    assert code_plain.tps == pytest.approx(15.0)
    assert (code_plain.speedup, code_plain.slower, code_plain.identical) == (None, None, None)
    assert code.tps == pytest.approx(40.0)
    assert code.speedup == pytest.approx(3.0)  # of 4 and 2
    assert code.speedup_total == pytest.approx(12.0 / 3.5)  # 10 + 2 s plainly, 2.5 + 1 s drafted
    assert code.answer_speedup == pytest.approx((11 / 4 + 2.5 / 1.5) / 2)  # whole answers, with the first token
    assert code_plain.first_s == pytest.approx(0.75)
    assert code.first_s == pytest.approx(1.0)
    assert code.mean_acceptance_length == pytest.approx(3.5)  # of 5 and 2
    assert code.acceptance_rate == pytest.approx(0.625)  # of 1 and 1/4
    assert code.identical == 2
    assert chat.speedup == chat.speedup_total == pytest.approx(0.5)
    assert (chat.slower, code.slower, total.slower) == (1, 0, 1)
    assert plain.tps == pytest.approx(10.0)  # of 10, 20, 10
    assert total.speedup == pytest.approx(2.0)  # of 4, 2, 0.5
    assert total.speedup_total == pytest.approx(13.0 / 5.5)
    assert total.mean_acceptance_length == pytest.approx(2.0)  # of 5, 2, 1.25
    assert (code_plain.round_ms, code_plain.break_even) == (pytest.approx(75.0), None)  # 100 and 50 ms a token
    assert (code.round_ms, code.break_even) == (pytest.approx(104.0), pytest.approx(104 / 75))


def test_prompts_that_were_cut_short_are_left_out() -> None:
    results = three_results()
    results.prompts[1].runs.pop()
    results.prompts[2].runs.clear()
    assert {f.prompts for f in analyse(results)} == {1}
    results.prompts[0].runs.clear()
    assert analyse(results) == []
    assert verdict(results, []) == []


def test_with_different_answers_the_total_compares_throughput_not_time() -> None:
    results = three_results()
    results.prompts = results.prompts[:1]
    # Half the tokens in half the time is no faster.
    results.prompts[0].runs[1] = a_run("drafted", tokens=51, decode_s=5.0, first_s=1.0)
    total = analyse(results)[-1]
    assert total.speedup_total == pytest.approx(1.0)
    assert total.identical == 0


def test_energy_and_memory() -> None:
    runs = [a_run("plain", tokens=n, decode_s=1.0, joules=3.0, peak_memory_gb=float(n)) for n in (10, 20)]
    [found, _] = analyse(some_results({"chat-1": runs}))
    assert found.joules_per_token == pytest.approx(6.0 / 30)
    assert found.peak_memory_gb == 20.0


def test_the_first_sentence_says_it_all() -> None:
    results = ratios([1.6] * 11 + [0.8])
    said = verdict(results, analyse(results))
    assert said[0] == "On this machine demo answers 1.6 times as fast with drafting; it was slower for 1 of 12 prompts."
    assert said[1].startswith("After the first token it is 1.6 times as fast; all runs together: 1.5 times as fast.")
    assert said[2] == "All 12 answers are identical to plain decoding's."
    spread = ratios([1.2, 1.3, 1.4, 1.5, 1.6, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.2])
    assert verdict(spread, analyse(spread))[0].startswith(
        "On this machine demo answers 1.6 times as fast with drafting (1.4 to 1.9); it was slower for none of 12"
    )


def test_without_drafting_the_sentence_names_a_speed() -> None:
    def said(seconds: list[float]) -> list[str]:
        runs = {f"chat-{n}": [a_run("plain", tokens=101, decode_s=s)] for n, s in enumerate(seconds)}
        return verdict(some_results(runs), analyse(some_results(runs)))

    assert said([10.0] * 8) == ["On this machine demo decodes 10.0 tokens a second without drafting."]
    assert said([5.0] * 3 + [10.0] * 3 + [20.0] * 3) == [
        "On this machine demo decodes 10.0 tokens a second without drafting (5.0 to 20.0)."
    ]


def test_the_first_sentence_is_one_where_nothing_was_gained_or_one_prompt_asked_or_another_is_the_main_one() -> None:
    def first(results: Results) -> str:
        return verdict(results, analyse(results))[0]

    assert first(ratios([1.0] * 6)) == (
        "On this machine demo answers just as fast with drafting as without it; it was slower for none of 6 prompts."
    )
    assert first(ratios([0.5])).endswith("0.5 times as fast with drafting; only one prompt was measured.")
    runs = {"chat-1": [a_run("plain", tokens=101, decode_s=10.0), a_run("width 3", tokens=101, decode_s=5.0)]}
    assert first(some_results(runs, main="width 3")).startswith(
        "On this machine demo answers 1.9 times as fast with width 3; "
    )


def test_how_many_answers_are_identical_is_said_in_words() -> None:
    def said(prompts: int, *, different: int) -> str:
        results = ratios([1.5] * prompts)
        for result in results.prompts[:different]:
            result.runs[1].token_ids[3] = 999
        return verdict(results, analyse(results))[2].partition(";")[0]

    assert said(1, different=0) == "The answer is identical to plain decoding's."
    assert said(1, different=1) == "The answer is not identical to plain decoding's"
    assert said(2, different=0) == "Both answers are identical to plain decoding's."
    assert said(3, different=1) == "2 of 3 answers are identical to plain decoding's"
    assert said(3, different=3) == "None of 3 answers are identical to plain decoding's"


def test_other_contestants_have_a_sentence_each() -> None:
    results = ratios([2.0] * 6)
    for result in results.prompts:
        result.runs.append(replace(a_run("server", tokens=101, decode_s=5.0, first_s=0.0001), token_ids=[9] * 101))
    results.contestants["server"] = "a server"
    assert "server answers 2.0 times as fast as plain; drafted just as fast as server." in verdict(
        results, analyse(results)
    )
    # Nobody asked for its tokens to be compared.
    assert analyse(results)[-1].identical is None


def test_contestants_that_did_other_work_are_named() -> None:
    results = ratios([2.0] * 3)
    assert unlike(results) == []
    for result in results.prompts[:2]:
        result.runs[1] = replace(result.runs[1], prompt_tokens=9, cached_tokens=4)
    assert unlike(results) == [
        "drafted read other prompts for 2 of 3, such as 9 tokens instead of 5: its chat template differs",
        "drafted had read 35% of the prompts before: its first tokens came that much earlier",
    ]


def test_a_server_is_compared_by_its_text() -> None:
    results = ratios([2.0])
    plain, _ = results.prompts[0].runs
    results.prompts[0].runs[0] = replace(plain, text="the same ")
    for text, identical in (("the same", 1), ("the sane", 0)):
        other = replace(plain, contestant="drafted", text=text, token_ids=[7, 8], ids_from_text=True)
        results.prompts[0].runs[1] = other
        assert analyse(results)[-1].identical == identical


def test_acceptance_by_position_counts_the_rounds_that_reached_it() -> None:
    rounds = [Round(ms=1.0, width=w, depth=w, kept=k, tokens=k + 1) for w, k in ((2, 2), (2, 0), (1, 1), (1, 1))]
    assert by_position(rounds, fewest=1) == [pytest.approx(0.75), pytest.approx(0.5)]
    assert by_position(rounds, fewest=3) == [pytest.approx(0.75)]
    assert by_position([]) == []


def test_round_times_by_width() -> None:
    rounds = [Round(ms=ms, width=3, depth=3, kept=0, tokens=1) for ms in (10.0, 20.0, 30.0, 40.0, 50.0)]
    [found] = by_width([*rounds, Round(ms=9.0, width=7, depth=7, kept=0, tokens=1)])
    assert (found.width, found.rounds, found.ms, found.low, found.high) == (3, 5, 30.0, 20.0, 40.0)
    assert len(rounds_of(three_results(), "drafted")) == 48


def test_ratios_in_words() -> None:
    assert [times(x) for x in (0.843, 1.55, 9.96, 23.4)] == ["0.84", "1.6", "10", "23"]
    assert [as_fast(x) for x in (0.2, 0.997, 1.003, 1.04)] == [
        "0.2 times as fast", "just as fast", "just as fast", "1.04 times as fast",
    ]  # fmt: skip
    assert between(None) == ""
    assert between(Interval(1.49, 1.71)) == " (1.5 to 1.7)"
    assert between(Interval(1.57, 1.62)) == " (1.57 to 1.62)"
    assert between(Interval(2.0, 2.0)) == ""
