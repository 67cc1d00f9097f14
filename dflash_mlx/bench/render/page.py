"""report.html: one file with everything in it, for light and dark screens of any width. No script, nothing fetched."""

from collections.abc import Iterator, Sequence
from html import escape

from dflash_mlx.bench.analyse import ALL, Figures, by_position, by_width, complete_in, rounds_of, verdict
from dflash_mlx.bench.record import Results
from dflash_mlx.bench.render.markdown import facts_of
from dflash_mlx.bench.render.svg import Bar, Point, Series, bar_chart, line_chart
from dflash_mlx.bench.render.text import (
    FIGURE_HEADER,
    NOTHING,
    extra_lines,
    figure_rows,
    load_header,
    load_rows,
    prompt_header,
    prompt_rows,
)

_MOST_BARS = 40

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --text: #1d2126; --soft: #5c6570; --line: #dfe3e8; --card: #f6f7f9;
  --s0: #6b7684; --s1: #2563c9; --s2: #1d8551; --s3: #8b3fb8; --s4: #a8790a; --s5: #c2571a; --bad: #b93a32; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --text: #e7eaee; --soft: #a0a9b4; --line: #333a42;
  --card: #1d2125; --s0: #a4afbb; --s1: #6fa3f5; --s2: #5cc793; --s3: #c58ceb; --s4: #dcb24a; --s5: #f0975c;
  --bad: #f0837c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.45rem; line-height: 1.3; margin: 0 0 12px; }
h2 { font-size: 1.05rem; margin: 32px 0 8px; }
p, li { margin: 4px 0; }
.soft { color: var(--soft); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 12px; background: var(--card); border-radius: 10px; min-width: 0; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: 6px; }
figure p { color: var(--soft); font-size: .85rem; }
svg { display: block; width: 100%; max-width: 480px; height: auto; margin: 0 auto; font: 13px system-ui, sans-serif; }
.label { fill: var(--soft); } .value, .unit { fill: var(--text); }
text { paint-order: stroke; stroke: var(--card); stroke-width: 3px; stroke-linejoin: round; }
.grid { stroke: var(--line); stroke-width: 1; } .mark { stroke: var(--text); stroke-width: 1.2; stroke-dasharray: 4 3; }
.range { stroke: var(--text); stroke-width: 1.4; } .bar { fill: var(--s1); } .bar.bad { fill: var(--bad); }
.line { fill: none; stroke-width: 2; } .line, .spread, .dot, .key { stroke: var(--own); }
.dot, .key { fill: var(--own); } .spread { stroke-width: 1.4; opacity: .55; } .again.line { stroke-dasharray: 5 3; }
.dot.again, .key.again { fill: var(--card); stroke-width: 1.6; }
.s0 { --own: var(--s0); } .s1 { --own: var(--s1); } .s2 { --own: var(--s2); }
.s3 { --own: var(--s3); } .s4 { --own: var(--s4); } .s5 { --own: var(--s5); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; min-width: 100%; }
th, td { padding: 5px 8px; text-align: right; border-bottom: 1px solid var(--line); } td { white-space: nowrap; }
td:first-child, td[data-label="contestant"] { white-space: normal; }
summary { cursor: pointer; color: var(--soft); margin: 12px 0; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } th { color: var(--soft); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; font-size: .88rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 760px) { thead { display: none; } table, tbody, tr, td { display: block; }
  tr { padding: 8px 0; border-bottom: 1px solid var(--line); } td { display: flex; justify-content: space-between;
    gap: 12px; padding: 1px 0; border: 0; white-space: normal; } td::before { content: attr(data-label);
    color: var(--soft); text-align: left; }
  td:first-child, td[data-label="contestant"] { font-weight: 600; }
  td:first-child:not([data-label="streams"])::before { content: none; }
  td.none { display: none; } }
@media (max-width: 560px) { dl { grid-template-columns: 1fr; } dd { margin-bottom: 6px; } }
"""


def page(results: Results, figures: Sequence[Figures]) -> str:
    """The whole document."""
    said = verdict(results, figures) or ["Nothing was finished."]
    parts = [f"<h1>{escape(said[0])}</h1>", *(f"<p>{escape(line)}</p>" for line in said[1:])]
    if not results.facts.get("finished", True):
        parts.append("<p><strong>Stopped early: the figures are of what was finished.</strong></p>")
    drawn = [f"<figure><figcaption>{escape(title)}</figcaption>{svg}<p>{escape(note)}</p></figure>"
             for title, svg, note in charts(results, figures)]  # fmt: skip
    parts.append(f'<div class="charts" style="margin-top: 20px">{"".join(drawn)}</div>')
    if figures:
        overall, parted = ([f for f in figures if (f.group == ALL) == wanted] for wanted in (True, False))
        parts += ["<h2>Figures</h2>", _table(FIGURE_HEADER, figure_rows(overall))]
        by_category = _table(FIGURE_HEADER, figure_rows(parted))
        parts.append(f"<details><summary>By category</summary>{by_category}</details>")
    if results.load:
        parts += ["<h2>Under load</h2>", _table(load_header(), load_rows(results))]
    if lines := extra_lines(results, figures):
        parts.append(f"<h2>The machine at work</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>")
    if any(result.runs for result in results.prompts):
        parts += ["<h2>Prompts</h2>", _table(prompt_header(results), prompt_rows(results))]
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts_of(results))
    parts.append(f"<h2>Machine and settings</h2><dl>{facts}</dl>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>dflash-mlx bench</title>'
        f"<style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_breakable(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(map(_cell, header, row))}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(title: str, words: str) -> str:
    """A phone shows cells below each other, with their titles, and leaves out those that hold nothing."""
    empty = ' class="none"' if words == NOTHING else ""
    return f'<td data-label="{escape(title)}"{empty}>{_breakable(words)}</td>'


def _breakable(words: str) -> str:
    """Names of contestants, such as "draft-model=NAME,width=2", may go on in the next line."""
    return escape(words).replace(",", ",<wbr>")


def charts(results: Results, figures: Sequence[Figures]) -> Iterator[tuple[str, str, str]]:
    """(title, drawing, what it shows) of each drawing for which there is something to draw."""
    if bars := speedup_bars(results, figures):
        title = f"Speedup by prompt: {results.main} over {results.baseline}"
        yield title, bar_chart(title, bars, unit="times as fast", mark=1.0), "Decoding after the first token."
    several = contestant_bars(results, figures)
    if len(several) > 1:
        title = "Speedup by contestant and setting"
        note = "Medians of the prompts' ratios, with intervals of 95 %."
        yield title, bar_chart(title, several, unit="times as fast", mark=1.0), note
    drafting = [
        (number, name, rounds)
        for number, name in enumerate(results.contestants)
        if (rounds := rounds_of(results, name))
    ]
    positions = [
        Series(name, [Point(at, share) for at, share in enumerate(by_position(rounds), 1)], colour=number)
        for number, name, rounds in drafting
    ]
    if positions := [one for one in positions if one.points]:
        title = "Acceptance by position"
        note = "Of the rounds that could have kept a draft at this position, the share that did."
        yield title, line_chart(title, positions, x="position of the draft", y="kept", percent=True), note
    times = [
        Series(name, [Point(r.width, r.ms, r.low, r.high) for r in by_width(rounds)], joined=False, colour=number)
        for number, name, rounds in drafting
    ]
    if times := [one for one in times if one.points]:
        title = "Round time against width"
        note = "Median time of a round, and the range of the middle half of them; several of one width side by side."
        yield title, line_chart(title, times, x="drafts verified in a round", y="ms"), note
    if loads := load_series(results):
        title = "Throughput against streams"
        note = "Tokens a second of all streams together, the time for reading prompts included."
        yield title, line_chart(title, loads, x="requests at the same time", y="tok/s"), note


def speedup_bars(results: Results, figures: Sequence[Figures]) -> list[Bar]:
    """A bar for each prompt of the first setting; for each category where there are too many prompts to draw."""
    main, baseline = results.main, results.baseline
    if main == baseline or not results.settings:
        return []
    setting = results.settings[0]
    complete = complete_in(results, setting)
    if len(complete) <= _MOST_BARS:
        known = [(result.prompt.name, result.speedup(main, baseline)) for result in complete]
        return [Bar(name, value, below=value < 1) for name, value in known if value]
    return [
        Bar(f.group, f.speedup, *_ends(f), below=f.speedup < 1)
        for f in figures
        if f.setting == setting and f.contestant == main and f.speedup
    ]


def contestant_bars(results: Results, figures: Sequence[Figures]) -> list[Bar]:
    """A bar for each contestant but the baseline, in each setting."""
    return [
        Bar(f"{f.contestant} {f.setting}".rstrip(), f.speedup, *_ends(f), below=f.speedup < 1)
        for f in figures
        if f.group == ALL and f.speedup
    ]


def _ends(f: Figures) -> tuple[float | None, float | None]:
    return (f.speedup_interval.low, f.speedup_interval.high) if f.speedup_interval else (None, None)


def load_series(results: Results) -> list[Series]:
    """Tokens a second by the number of streams, a line for each contestant."""
    lines: dict[str, list[Point]] = {}
    for run in sorted(results.load, key=lambda run: run.streams):
        lines.setdefault(run.contestant, []).append(Point(run.streams, run.tps))
    colours = list(results.contestants)
    return [Series(name, lines[name], colour=colours.index(name)) for name in colours if name in lines]
