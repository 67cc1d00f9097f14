"""What the README and the pages in docs/ show exists and runs."""

import dataclasses
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

import dflash_mlx
from dflash_mlx import errors
from dflash_mlx.cli.app import app
from dflash_mlx.decoding.stats import Acceptance
from dflash_mlx.pair import ModelPair
from dflash_mlx.targets.loading import load_target

ROOT = Path(__file__).parent.parent
PATHS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}
README = DOCUMENTS["README.md"]
MAP = DOCUMENTS["docs/architecture.md"]
API = DOCUMENTS["docs/python-api.md"]


def blocks(language: str, document: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document, re.MULTILINE | re.DOTALL)


def prose(document: str) -> str:
    """A document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", document, flags=re.MULTILINE | re.DOTALL)


def shell_commands() -> list[list[str]]:
    """Every command line in the documents, in words; pipes are cut, comments dropped."""
    lines = [
        line
        for document in DOCUMENTS.values()
        for block in blocks("sh", document)
        for line in block.replace("\\\n", " ").splitlines()
    ]
    inline = [
        code
        for document in DOCUMENTS.values()
        for code in re.findall(r"`((?:dflash-mlx|make) [^`\n]+)`", prose(document))
    ]
    commands = []
    for line in lines + inline:
        words = shlex.split(line, comments=True)
        while "|" in words:
            words = words[words.index("|") + 1 :]
        words = words[: words.index(">")] if ">" in words else words
        if "--" in words:  # a command that starts another one
            commands.append(["dflash-mlx", *words[words.index("--") + 1 :]])
            words = words[: words.index("--")]
        commands.append(words)
    return [words for words in commands if words]


def file_map() -> dict[str, str]:
    """Path -> what the map says about it. Two spaces of indent are one folder; deeper ones continue a list."""
    [block] = [b for b in blocks("text", MAP) if "pyproject.toml" in b]
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
        assert name or words[1].startswith("-"), f"unknown command: {shlex.join(words)}"
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
    extras = {
        name
        for document in DOCUMENTS.values()
        for names in re.findall(r"\.\[([\w,]+)\]", document)
        for name in names.split(",")
    }
    assert {"cuda", "dev"} <= extras
    for extra in extras:
        assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), f"there is no extra {extra}"


def test_the_documents_install_the_cuda_that_pyproject_names() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [requirement] = re.findall(r'^cuda = \["([^;]+);', pyproject, re.MULTILINE)
    install = DOCUMENTS["docs/install.md"]
    assert f'pip install "{requirement}"' in install
    [excludes] = set(re.findall(r"--excludes (\S+)", install))
    assert (ROOT / excludes).read_text(encoding="utf-8").splitlines()[1:] == ["mlx-cpu"]


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
            assert path in paths, f"{path} is not in the map in docs/architecture.md"


def headings(document: str) -> set[str]:
    """The names by which links reach a document's headings."""
    found = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def files_of_the_site() -> set[Path]:
    """What `make site` puts there, by the patterns of its hook."""
    hook = (ROOT / "scripts" / "site.py").read_text(encoding="utf-8")
    patterns = re.findall(r'"([^"]+)"', "".join(re.findall(r"^(?:CARD|PAGES) = .*$", hook, re.MULTILINE)))
    return {path.resolve() for pattern in patterns for path in ROOT.glob(pattern)}


@pytest.mark.parametrize("name", [*DOCUMENTS, "CHANGELOG.md", "models/smollm2-135m-dflash/README.md"])
def test_links_lead_somewhere(name: str) -> None:
    """To files that exist, in the repository and on the site, and to headings that they have."""
    path, of_the_site = ROOT / name, files_of_the_site()
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, heading = link.partition("#")
        target = path.parent / file if file else path
        assert target.is_file(), f"{name}: {link} leads nowhere"
        assert target.resolve() in of_the_site, f"{name}: {link} leads to what is not on the site"
        if heading:
            assert heading in headings(target.read_text(encoding="utf-8")), f"{name}: {link} leads to no heading"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_are_named_exist(name: str) -> None:
    """Paths in the text, from the root or from the package; paths with a part in capitals stand for others."""
    for path in re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|sh|toml|yml))", prose(DOCUMENTS[name])):
        if not re.search(r"\b[A-Z]+\b", path.removesuffix("README.md")) and not path.startswith("build/"):
            folders = (ROOT, ROOT / "dflash_mlx", ROOT / "tests")
            assert any((folder / path).is_file() for folder in folders), f"{name}: there is no {path}"


def test_the_readme_is_short_and_lists_every_page() -> None:
    assert len(README.split()) < 1000
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", README))
    assert {name for name in DOCUMENTS if name.startswith("docs/")} == linked


def test_the_site_shows_every_page() -> None:
    """What `make site` would find, without MkDocs."""
    shown = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(DOCUMENTS) <= set(shown)
    assert [page for page in shown if not (ROOT / page).is_file()] == []


def test_the_public_names_are_described() -> None:
    """Every name, every argument and every field is in the section about it."""
    sections = dict(re.findall(r"^##+ ([^\n]+)\n(.*?)(?=^##|\Z)", API, re.MULTILINE | re.DOTALL))
    for name in dflash_mlx.__all__:
        [heading] = [heading for heading in sections if name in heading.split()]
        public = getattr(dflash_mlx, name)
        words = (
            [field.name for field in dataclasses.fields(public)]
            if dataclasses.is_dataclass(public)
            else list(inspect.signature(public).parameters)
        )
        # `generate` has the arguments of `stream_generate`, and the functions for many are described together.
        text = sections[heading] + (sections["stream_generate"] if name == "generate" else "")
        for word in words:
            assert word.startswith("_") or re.search(rf"`{word}`|\b{word}(?=[,)=])", text), f"{name}: {word}"
    for word in ("per_position", "histogram", *(f.name for f in dataclasses.fields(Acceptance))):
        assert word.startswith("_") or word == "recent" or f"`{word}`" in sections["Acceptance"], word
    kinds = [k for k, v in vars(errors).items() if inspect.isclass(v) and issubclass(v, Exception)]
    assert [kind for kind in kinds if f"| `{kind}` |" not in sections["Errors"]] == []


def test_the_signatures_are_those_of_the_code() -> None:
    for name in ("load_pair", "generate", "stream_generate", "generate_many", "stream_many", "DFlashModel"):
        [shown] = re.findall(rf"^{name}\((.*?)\)$", "\n".join(blocks("text", API)), re.MULTILINE | re.DOTALL)
        parameters = list(inspect.signature(getattr(dflash_mlx, name)).parameters.values())
        keyword_only = [p.kind for p in parameters].index(inspect.Parameter.KEYWORD_ONLY)
        written = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
        written.insert(keyword_only, "*")
        assert " ".join(shown.split()) == ", ".join(written).replace("'", '"')


@pytest.mark.model
@pytest.mark.long
def test_the_python_examples_run(
    demo_pair: ModelPair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after another, as in a session of a reader."""
    monkeypatch.setattr("dflash_mlx.loading.load_pair", lambda name: demo_pair)
    # Quantized products take minutes on a CPU.
    tokenizer = demo_pair.tokenizer
    monkeypatch.setattr("mlx_lm.load", lambda name: (load_target(Path(name), dtype="float32")[0].model, tokenizer))
    first, *more = blocks("python", API)
    names: dict[str, Any] = {}
    exec(compile(first, "docs/python-api.md", "exec"), names)
    printed, answer = capsys.readouterr().out, names["answer"]
    assert answer.text.strip()
    assert answer.text in printed
    assert re.search(r"tokens/s, acceptance length [\d.]+$", printed.rstrip())
    assert 1 <= answer.generation_tokens <= 100

    assert len(more) >= 6
    for example in more:
        exec(compile(example, "docs/python-api.md", "exec"), names)
        assert capsys.readouterr().out.strip()
    assert names["second"].cached_tokens > 0
