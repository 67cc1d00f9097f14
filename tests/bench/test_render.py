"""The report: drawings that are where their numbers say, one file that fetches nothing, tables."""

import io
import json
import re
import xml.etree.ElementTree as ET

import pytest
from bench.fake import a_run, ratios, some_results
from rich.console import Console

from dflash_mlx.bench.analyse import analyse
from dflash_mlx.bench.reading import from_json
from dflash_mlx.bench.record import LoadRun
from dflash_mlx.bench.render import markdown, page, svg, text
from dflash_mlx.bench.render.svg import Bar, Point, Series
from dflash_mlx.errors import UsageError

SPACE = "{http://www.w3.org/2000/svg}"


def full() -> "page.Results":
    """Everything that a report can show."""
    results = ratios([1.5, 1.8, 0.7, 2.0, 1.6, 1.7])
    results.load = [
        LoadRun(contestant=name, streams=n, requests=4, tokens=40, seconds=4 / n, first_s=[0.5], gaps_s=[0.1])
        for n in (1, 4)
        for name in ("plain", "drafted")
    ]
    results.machine = {
        "bandwidth_gb_s": 20.0,
        "bandwidth_shares": {"plain": 0.9},
        "splits": {"drafted": {"width": 4, "round_ms": 50.0, "draft_ms": 9.0, "verify_ms": 31.0, "rest_ms": 10.0}},
    }
    return results


@pytest.mark.parametrize(
    ("high", "expected"), [(5, [0, 1, 2, 3, 4, 5]), (0.9, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0, [0, 1])]
)
def test_ticks_are_round_numbers(high: float, expected: list[float]) -> None:
    assert svg.ticks(high) == pytest.approx(expected)


@pytest.mark.parametrize("high", [0.013, 1.0, 7.3, 99, 100, 1234.5])
def test_ticks_reach_the_highest_value(high: float) -> None:
    steps = svg.ticks(high)
    assert steps[-1] >= high * (1 - 1e-9)
    assert 3 <= len(steps) <= 8


def test_a_bar_is_as_long_as_its_value() -> None:
    bars = [Bar("a", 1.0), Bar("b", 2.0, 1.5, 2.5), Bar("<c>", 0.5, below=True)]
    drawn = ET.fromstring(svg.bar_chart("x & y", bars, unit="times", mark=1.0))
    widths = [float(rect.get("width", "0")) for rect in drawn.iter(f"{SPACE}rect")]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
    assert widths[2] == pytest.approx(widths[0] / 2, rel=0.01)
    assert [rect.get("class") for rect in drawn.iter(f"{SPACE}rect")] == ["bar", "bar", "bar bad"]
    # The mark is at the end of the bar whose value it has.
    [first, *_] = drawn.iter(f"{SPACE}rect")
    [mark] = [line for line in drawn.iter(f"{SPACE}line") if line.get("class") == "mark"]
    assert float(mark.get("x1", "0")) == pytest.approx(float(first.get("x", "0")) + widths[0], abs=0.2)
    assert "<c>" in [found.text for found in drawn.iter(f"{SPACE}text")]


def test_long_labels_stand_above_their_bars() -> None:
    label = "drafted context=4096 temperature=0.7"
    drawn = ET.fromstring(svg.bar_chart("x", [Bar(label, 1.0), Bar("b", 2.0)], unit="times"))
    [bar, *_] = drawn.iter(f"{SPACE}rect")
    [words] = [found for found in drawn.iter(f"{SPACE}text") if found.text == label]
    assert words.get("text-anchor") == "start"
    assert float(words.get("y", "0")) < float(bar.get("y", "0"))


def test_lines_stay_inside_the_drawing_and_rise_with_their_values() -> None:
    series = [
        Series("a line with a rather long name", [Point(1, 10), Point(4, 30, 20, 40), Point(16, 90)]),
        Series("another line with a long name", [Point(1, 5), Point(16, 7)], joined=False),
    ]
    drawn = ET.fromstring(svg.line_chart("x", series, x="streams", y="tok/s"))
    _, _, width, height = map(float, drawn.get("viewBox", "").split())
    dots = [(float(c.get("cx", "0")), float(c.get("cy", "0"))) for c in drawn.iter(f"{SPACE}circle")]
    assert len(dots) == 5
    assert all(0 < x < width and 0 < y < height for x, y in dots)
    assert dots[0][1] > dots[1][1] > dots[2][1]
    # 10 and 30 are two thirds of 90 - 60 apart.
    assert (dots[0][1] - dots[1][1]) * 3 == pytest.approx(dots[1][1] - dots[2][1], abs=1)
    for found in drawn.iter(f"{SPACE}text"):
        assert 0 <= float(found.get("x", "-1")) <= width
        assert 0 <= float(found.get("y", "-1")) <= height


def test_more_series_than_colours_are_told_apart_and_points_of_one_place_stand_side_by_side() -> None:
    series = [Series(f"contestant {n}", [Point(3, 50), Point(9, 80)], joined=False, colour=n) for n in range(12)]
    html = svg.line_chart("x", series, x="drafts", y="ms")
    dots = [(c.get("class"), c.get("cx")) for c in ET.fromstring(html).iter(f"{SPACE}circle")]
    assert len({kind for kind, _ in dots}) == 12
    assert len({place for _, place in dots}) == 24
    styles = set(re.findall(r"\.(\w+) { --own", page.page(full(), [])))
    assert {name for kind, _ in dots for name in str(kind).split()} - {"dot", "again"} == styles


def test_the_page_holds_every_drawing_and_fetches_nothing() -> None:
    results = full()
    html = page.page(results, analyse(results))
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", html)
    assert titles == [
        "Speedup by prompt: drafted over plain",
        "Acceptance by position",
        "Round time against width",
        "Throughput against streams",
    ]
    for drawn in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(drawn)
    assert "<script" not in html
    assert not re.search(r"(src|href)=|@import|url\(", html)
    assert "prefers-color-scheme: dark" in html
    assert "width=device-width" in html
    assert "On this machine demo answers 1.6 times" in html or "On this machine demo answers 1.7 times" in html
    for words in ("timed alone, draft 9.0, verification 31.0, the rest 10.0", "memory: 20 GB/s measured", "a chip"):
        assert words in html


def test_names_of_contestants_may_be_broken_where_a_table_has_no_room() -> None:
    name = "draft-model=./<two>,width=3"
    runs = [a_run(who, tokens=5, decode_s=1.0) for who in ("plain", name)]
    results = some_results({"chat-1": runs}, main=name)
    html = page.page(results, analyse(results))
    assert '<td data-label="contestant">draft-model=./&lt;two&gt;,<wbr>width=3</td>' in html


def test_names_of_prompts_cannot_break_the_page() -> None:
    results = some_results(
        {"<b>&-1": [a_run("plain", tokens=5, decode_s=1.0), a_run("drafted", tokens=5, decode_s=1.0)]}
    )
    html = page.page(results, analyse(results))
    assert "<b>" not in html
    assert "&lt;b&gt;&amp;-1" in html


def test_many_prompts_are_drawn_by_category() -> None:
    results = ratios([1.5] * 60)
    assert [bar.label for bar in page.speedup_bars(results, analyse(results))] == ["chat", "all"]


def test_nothing_finished_is_a_page_too() -> None:
    results = some_results({"chat-1": []}, contestants={"plain": "", "drafted": ""}, main="drafted")
    results.facts["finished"] = False
    assert "Nothing was finished." in page.page(results, analyse(results))
    assert "Stopped early" in markdown.report(results, analyse(results))


def test_the_markdown_has_the_verdict_first_and_whole_tables() -> None:
    results = full()
    document = markdown.report(results, analyse(results))
    assert document.startswith("**On this machine demo answers ")
    for table in re.findall(r"(?:^\|.*\n)+", document, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "| 4 | drafted | 40.0 | 0.50 s | 0.50 s | 100 ms | 100 ms |" in document
    assert document.count("<details>") == document.count("</details>") == 3


def test_tables_show_prompts_and_groups() -> None:
    results = full()
    results.prompts[2].runs[1].token_ids[4] = 999
    rows = text.prompt_rows(results)
    assert text.prompt_header(results)[:4] == ["prompt", "plain tok/s", "drafted tok/s", "speedup"]
    assert rows[0] == ["chat-1", "10.0", "15.0", "1.50x", "3.00", "yes"]
    assert rows[2][-1] == "no, from 4"
    plain = text.plain_table(text.prompt_header(results), rows).splitlines()
    end = plain[0].index("tok/s") + len("tok/s")
    assert all(line[:end].endswith(row[1]) for line, row in zip(plain[1:], rows, strict=True))
    console = Console(file=io.StringIO(), width=140)
    console.print(text.rich_table(text.prompt_header(results), rows))
    assert "no, from 4" in console.file.getvalue()  # type: ignore[attr-defined]
    narrow = text.figure_table(analyse(results), narrow=True)
    console = Console(file=io.StringIO(), width=80)
    console.print(text.rich_table(*narrow))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, shown.splitlines())) == 80
    assert all(word in shown for word in ("drafted", "acceptance", "1.65x (", "16.5"))
    assert "…" not in shown
    figures = text.figure_rows(analyse(results))
    assert figures[-1][:2] == ["all", "drafted"]
    assert figures[-1][7:11] == ["3.00", "1.04", "104.0 ms", "5 of 6"]


def test_results_come_back_as_they_were_written() -> None:
    results = full()
    again = from_json(json.loads(json.dumps(results.to_json())), "here")
    assert again.to_json() == results.to_json()
    assert analyse(again) == analyse(results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "has schema 99"),
        ({"prompts": [{"name": "x"}]}, "is damaged"),
        ({"prompts": 3}, "is damaged"),
        ({"contestants": None}, "is damaged"),
        ({"comparable": []}, "is damaged"),
        ({"main": "nobody"}, "is damaged"),
        ({"load": [{"contestant": "plain"}]}, "is damaged"),
    ],
)
def test_damaged_results_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_json(full().to_json() | change, "here.json")
    with pytest.raises(UsageError, match="is no result"):
        from_json([], "here.json")
