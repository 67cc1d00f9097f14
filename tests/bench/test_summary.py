"""Summaries and tables against numbers worked out by hand."""

import io
import json

import pytest
from rich.console import Console

from dflash_mlx.bench.prompts import BenchPrompt
from dflash_mlx.bench.report import HEADER, closing_lines, plain_table, rich_table, rows, to_json
from dflash_mlx.bench.runner import Mode, PromptResult, Run
from dflash_mlx.bench.summary import summarize


def a_run(mode: Mode, *, tokens: int, decode_s: float, first_s: float, accepted: int = 0, rounds: int = 0) -> Run:
    """An answer of `tokens` tokens, the first of which came alone after `first_s`."""
    drafted = 4 * rounds
    acceptance = {
        "rounds": rounds,
        "mean_acceptance_length": (accepted + rounds) / rounds if rounds else 0.0,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
    }
    return Run(
        mode=mode,
        token_ids=list(range(tokens)),
        finish_reason="length",
        prompt_tokens=5,
        first_s=first_s,
        wall_s=first_s + decode_s,
        decode_tokens=tokens - 1,
        peak_memory_gb=1.0,
        acceptance=acceptance if mode == "drafted" else None,
        notices=[],
    )


def three_results() -> list[PromptResult]:
    """Two code prompts, sped up 4 and 2 times, and a chat prompt, slowed to a half."""
    code_1 = [
        a_run("plain", tokens=101, decode_s=10.0, first_s=1.0),  # 10 tok/s
        a_run("drafted", tokens=101, decode_s=2.5, first_s=1.5, accepted=80, rounds=20),  # 40 tok/s
    ]
    code_2 = [
        a_run("drafted", tokens=41, decode_s=1.0, first_s=0.5, accepted=20, rounds=20),  # 40 tok/s
        a_run("plain", tokens=41, decode_s=2.0, first_s=0.5),  # 20 tok/s
    ]
    chat_1 = [
        a_run("plain", tokens=11, decode_s=1.0, first_s=0.2),  # 10 tok/s
        a_run("drafted", tokens=11, decode_s=2.0, first_s=0.3, accepted=2, rounds=8),  # 5 tok/s
    ]
    named = [("code-1", "code", code_1), ("code-2", "code", code_2), ("chat-1", "chat", chat_1)]
    return [PromptResult(prompt=BenchPrompt(name=n, category=c, text=n), runs=runs) for n, c, runs in named]


def test_medians_and_totals() -> None:
    code, chat, total = summarize(three_results())
    assert (code.group, chat.group, total.group) == ("code", "chat", "all")
    assert (code.prompts, chat.prompts, total.prompts) == (2, 1, 3)

    assert code.plain_tps == pytest.approx(15.0)
    assert code.drafted_tps == pytest.approx(40.0)
    assert code.speedup_median == pytest.approx(3.0)  # of 4 and 2
    assert code.speedup_total == pytest.approx(12.0 / 3.5)  # 10 + 2 s plainly, 2.5 + 1 s drafted
    assert code.speedup_wall == pytest.approx(13.5 / 5.5)  # with 1.5 s and 2 s until the first tokens
    assert code.plain_first_s == pytest.approx(0.75)
    assert code.drafted_first_s == pytest.approx(1.0)
    assert code.mean_acceptance_length == pytest.approx(3.5)  # of 5 and 2
    assert code.acceptance_rate == pytest.approx(0.625)  # of 1 and 1/4
    assert code.identical == 2

    assert chat.speedup_median == chat.speedup_total == pytest.approx(0.5)
    assert total.plain_tps == pytest.approx(10.0)  # of 10, 20, 10
    assert total.speedup_median == pytest.approx(2.0)  # of 4, 2, 0.5
    assert total.speedup_total == pytest.approx(13.0 / 5.5)
    assert total.mean_acceptance_length == pytest.approx(2.0)  # of 5, 2, 1.25


def test_with_different_answers_the_total_compares_throughput_not_time() -> None:
    [result] = three_results()[:1]
    # Half the tokens in half the time is no faster.
    result.runs[1] = a_run("drafted", tokens=51, decode_s=5.0, first_s=1.0)
    [_, total] = summarize([result])
    assert total.speedup_total == pytest.approx(1.0)
    assert total.identical == 0


def test_prompts_that_were_cut_short_are_left_out_of_the_summary() -> None:
    results = three_results()
    results[1].runs.pop()
    results[2].runs.clear()
    code, total = summarize(results)
    assert code.prompts == total.prompts == 1
    assert total.speedup_total == pytest.approx(4.0)
    assert summarize([PromptResult(prompt=results[0].prompt)]) == []


def test_without_drafting_there_are_plain_figures_only() -> None:
    results = three_results()
    for result in results:
        result.runs = result.of("plain")
    total = summarize(results, draft=False)[-1]
    assert total.prompts == 3
    assert total.plain_tps == pytest.approx(10.0)
    assert (total.speedup_total, total.drafted_tps, total.identical) == (None, None, None)
    assert closing_lines([total]) == ["time to the first token, median: 500 ms plain"]


def test_the_table_shows_prompts_then_groups() -> None:
    results = three_results()
    results[2].runs[1].token_ids[4] = 999
    summaries = summarize(results)
    lines = rows(results, summaries)
    assert lines[0] == ("code-1", "10.0", "40.0", "4.00x", "5.00", "100%", "yes")
    assert lines[2] == ("chat-1", "10.0", "5.0", "0.50x", "1.25", "6%", "no, from 4")
    assert lines[-1] == ("all (median)", "10.0", "40.0", "2.00x", "2.00", "25%", "2 of 3")

    text = plain_table(lines).splitlines()
    assert len(text) == 1 + 3 + 3
    ends = [line.index("tok/s") + len("tok/s") for line in text[:1]]
    assert all(line[: ends[0]].endswith(cells[1]) for line, cells in zip(text[1:], lines, strict=True))

    console = Console(file=io.StringIO(), width=120)
    console.print(rich_table(lines, groups=len(summaries)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for word in (*HEADER, "code-1", "no, from 4", "all (median)"):
        assert word in shown


def test_closing_lines_name_both_speedups() -> None:
    assert closing_lines(summarize(three_results())) == [
        "speedup, median of the prompts' ratios: 2.00x",
        "speedup, all runs together: 2.36x decoding, 1.88x with prompt processing",
        "time to the first token, median: 500 ms plain, 500 ms drafted",
    ]
    assert closing_lines([]) == []


def test_the_json_object_holds_every_run() -> None:
    results = three_results()
    document = json.loads(json.dumps(to_json(results, summarize(results), {"date": "today"})))
    assert document["date"] == "today"
    assert [summary["group"] for summary in document["summary"]] == ["code", "chat", "all"]
    first = document["prompts"][0]
    assert first["speedup"] == pytest.approx(4.0)
    assert [run["mode"] for run in first["runs"]] == ["plain", "drafted"]
    assert len(first["runs"][0]["token_ids"]) == 101
    assert first["runs"][1]["decode_tps"] == pytest.approx(40.0)
