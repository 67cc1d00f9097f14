"""What the README shows exists and runs."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from dflash_mlx.cli.app import app
from dflash_mlx.pair import ModelPair

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, document: str = README) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document, re.MULTILINE | re.DOTALL)


def shell_commands() -> list[list[str]]:
    """Every command line in the README and in its companions, in words; pipes are cut, comments dropped."""
    more = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "models.md"]
    documents = [README, *(path.read_text(encoding="utf-8") for path in more)]
    lines = [line for document in documents for block in blocks("sh", document) for line in block.splitlines()]
    inline = [code for document in documents for code in re.findall(r"`((?:dflash-mlx|make) [^`\n]+)`", document)]
    commands = []
    for line in lines + inline:
        words = shlex.split(line, comments=True)
        while "|" in words:
            words = words[words.index("|") + 1 :]
        commands.append(words[: words.index(">")] if ">" in words else words)
    return [words for words in commands if words]


def file_map() -> dict[str, str]:
    """Path -> what the map says about it. Two spaces of indent are one folder; deeper ones continue a list."""
    [block] = [b for b in blocks("text") if "pyproject.toml" in b]
    paths: dict[str, str] = {}
    folders: list[str] = []
    for line in block.splitlines():
        name, _, meaning = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[:depth]
        paths["".join(folders) + name] = meaning.strip()
        if name.endswith("/"):
            folders.append(name)
    return paths


def commands_of(group: Any, prefix: str = "") -> dict[str, Any]:
    """Every command of the command line by its full name, groups included."""
    found = {}
    for name, command in group.commands.items():
        found[prefix + name] = command
        if hasattr(command, "commands"):
            found |= commands_of(command, f"{prefix}{name} ")
    return found


def test_the_command_lines_are_real() -> None:
    root = typer.main.get_command(app)
    known = commands_of(root)
    checked = set()
    for words in shell_commands():
        if words[0] != "dflash-mlx":
            continue
        name = next((n for n in (" ".join(words[1:3]), words[1]) if n in known), None)
        command = known[name] if name else root
        assert name or words[1].startswith("-"), f"the README shows the unknown command {shlex.join(words)}"
        options = {option for parameter in command.params for option in parameter.opts}
        for word in words[1:]:
            if word.startswith("-"):
                assert word in options | {"--help"}, f"{shlex.join(words)}: there is no option {word}"
        checked.add(name)
    assert {"generate", "chat", "bench", "models", "models show", "doctor"} <= checked


def test_every_command_is_shown() -> None:
    shown = {words[1] for words in shell_commands() if words[0] == "dflash-mlx"}
    known = {name for name in commands_of(typer.main.get_command(app)) if " " not in name}
    assert known - shown == set()


def test_make_targets_and_extras_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    used = {words[1] for words in shell_commands() if words[0] == "make"}
    assert {"demo", "test", "check"} <= used
    for target in used:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"the Makefile has no target {target}"
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extra in re.findall(r"(?:dflash-mlx|\.)\[(\w+)\]", README):
        assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), f"there is no extra {extra}"


def test_ci_runs_the_command_for_tests() -> None:
    assert {("make", "test"), ("make", "check")} <= {tuple(words) for words in shell_commands()}
    assert re.search(r"^exec make check$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_path_in_the_map_exists() -> None:
    paths = file_map()
    assert len(paths) > 40
    for path, meaning in paths.items():
        assert (ROOT / path).is_dir() if path.endswith("/") else (ROOT / path).is_file(), f"{path} does not exist"
        assert meaning or path == "dflash_mlx/" or path.count("/") == 2, f"the map says nothing about {path}"


def test_every_source_file_is_in_the_map() -> None:
    """A folder is either described as a whole, or file by file. What a pair's TOML file is, the map says once."""
    paths = file_map()
    for source in [*ROOT.glob("cli/*.py"), *ROOT.glob("dflash_mlx/**/*.py")]:
        path = source.relative_to(ROOT).as_posix()
        folder = path.rpartition("/")[0] + "/"
        described_whole = folder in paths and not any(p.startswith(folder) and p != folder for p in paths)
        if source.name != "__init__.py" and not described_whole:
            assert path in paths, f"{path} is not in the README's map"


def test_links_lead_somewhere() -> None:
    headings = {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("https://"):
            assert (ROOT / target).is_file(), target


@pytest.mark.model
def test_the_python_example_runs(demo_pair: ModelPair, capsys: pytest.CaptureFixture[str]) -> None:
    [example] = blocks("python")
    lines = [line for line in example.splitlines() if line.strip()]
    assert len(lines) == 5
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    answer = names["answer"]
    assert answer.text.strip()
    assert answer.text in printed
    assert printed.rstrip().endswith("tokens a round")
    assert 1 <= answer.generation_tokens <= 100
