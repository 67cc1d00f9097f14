"""report.md: the verdict, the figures and the machine, ready to be pasted into an issue."""

from collections.abc import Sequence

from dflash_mlx.bench.analyse import ALL, Figures, verdict
from dflash_mlx.bench.record import Results
from dflash_mlx.bench.render.text import (
    FIGURE_HEADER,
    extra_lines,
    figure_rows,
    load_header,
    load_rows,
    markdown_table,
    prompt_header,
    prompt_rows,
)


def report(results: Results, figures: Sequence[Figures]) -> str:
    """The whole document."""
    said = verdict(results, figures) or ["Nothing was finished."]
    parts = [f"**{said[0]}**", *said[1:]]
    if not results.facts.get("finished", True):
        parts.append("*Stopped early: the figures are of what was finished.*")
    overall = [f for f in figures if f.group == ALL]
    if overall:
        parts.append(markdown_table(FIGURE_HEADER, figure_rows(overall)))
    if results.load:
        parts.append(markdown_table(load_header(), load_rows(results)))
    if lines := extra_lines(results, figures):
        parts.append("\n".join(f"- {line}" for line in lines))
    by_category = [f for f in figures if f.group != ALL]
    details = [
        ("By category", markdown_table(FIGURE_HEADER, figure_rows(by_category))),
        ("By prompt", markdown_table(prompt_header(results), prompt_rows(results))),
        ("Machine and settings", "\n".join(f"- {name}: {value}" for name, value in facts_of(results))),
    ]
    for title, text in details:
        if text.count("\n") > 1:
            parts.append(f"<details><summary>{title}</summary>\n\n{text}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def facts_of(results: Results) -> list[tuple[str, str]]:
    """What someone needs to judge the figures, or to measure them again."""
    facts, machine = results.facts, results.facts.get("machine") or {}
    memory, machines = machine.get("memory_bytes"), machine.get("machines", 1)
    known = [
        ("command", facts.get("command")),
        ("date", facts.get("date")),
        ("machine", f"{machine.get('chip')} ({machine.get('kind')}), {machine.get('cpu_count')} cores"),
        ("divided", f"the target, among {machines} machines; this is the first" if machines > 1 else None),
        ("memory", f"{memory / 2**30:.0f} GiB" if memory else None),
        ("system", f"{machine.get('os')}, Python {machine.get('python')}"),
        ("versions", f"dflash-mlx {facts.get('version')}, MLX {machine.get('mlx_version')}, "
                     f"mlx-lm {machine.get('mlx_lm_version')}"),
        ("pair", f"{facts.get('pair')}, {facts.get('dtype')}, block size {facts.get('block_size')}"),
        *((f"contestant {name}", words) for name, words in results.contestants.items()),
        ("prompts", facts.get("prompts_from")),
        ("repeats", facts.get("repeat")),
    ]  # fmt: skip
    return [(name, str(value)) for name, value in known if value not in (None, "")]
