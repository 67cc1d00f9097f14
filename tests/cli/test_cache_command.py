"""`dflash-mlx cache`: what is listed, what goes, and what must stay."""

import json
from pathlib import Path

import pytest

from dflash_mlx.hub.leftovers import held
from dflash_mlx.hub.store import Stamp, ensure_folder

COMMIT = "0123456789" * 4


@pytest.fixture
def filled(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with one of each, things of other people between them, and a Hub's cache with a known model."""

    def build(work: Path) -> None:
        (work / "model" / "model.safetensors").write_bytes(b"x" * 1000)

    ensure_folder(home / "models" / "mine", Stamp("0", 1), build, space_mb=0, report=lambda m, f: None)
    (home / "models" / "strange").mkdir()
    (home / "models" / "strange" / "model.safetensors").write_text("not ours")
    (home / "round-costs").mkdir()
    (home / "round-costs" / f"{'a1' * 12}.json").write_text("{}")
    (home / "round-costs" / "notes.json").write_text("not ours")
    (home / "models" / ".mine.making-abc").mkdir()
    (home / "models" / ".mine.making-abc" / "half").write_text("1234")
    (home / "chat-history.jsonl").write_text('"hello"\n')
    repo = home / "hub" / "models--z-lab--Qwen3-4B-DFlash-b16"
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    (repo / "snapshots" / COMMIT / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (home / "hub" / "models--other--model" / "snapshots" / COMMIT).mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(home / "hub"), raising=False)
    return home


def names(run) -> list[str]:
    return [item["name"] for item in json.loads(run("cache", "list", "--json")[1])]


HUB = "z-lab/Qwen3-4B-DFlash-b16"


def test_everything_of_ours_is_listed_and_nothing_else(run, filled):
    assert names(run) == ["mine", "measurements", "leftovers", HUB]
    code, out, err = run("cache")
    assert (code, len(out.splitlines())) == (0, 4)
    assert "cache remove NAME" in err
    assert "1.1 kB  mine" in out


def test_an_empty_disk(run, monkeypatch, tmp_path):
    monkeypatch.setattr("dflash_mlx.hub.disk._cached_repos", list)
    assert run("cache", "list") == (0, "nothing of dflash-mlx is on this disk\n", "")
    assert run("cache", "list", "--json")[1] == "[]\n"
    assert run("cache", "remove", "--all")[0] == 0


def test_all_leaves_what_is_shared_and_what_others_wrote(run, filled):
    code, out, _ = run("cache", "remove", "--all", "--yes")
    assert code == 0
    assert out.splitlines()[-1].endswith("freed")
    assert names(run) == [HUB]
    kept = {p.relative_to(filled).as_posix() for p in filled.rglob("*") if p.is_file()}
    assert {"models/strange/model.safetensors", "round-costs/notes.json", "chat-history.jsonl"} <= kept
    assert not (filled / "models" / "mine").exists()
    assert not (filled / "models" / ".mine.making-abc").exists()


def test_files_that_somebody_put_into_a_model_stay(run, filled):
    (filled / "models" / "mine" / "diary.txt").write_text("precious")
    assert run("cache", "remove", "MINE", "--yes")[0] == 0
    assert [p.name for p in (filled / "models" / "mine").iterdir()] == ["diary.txt"]
    assert "mine" not in names(run)


def test_a_stamp_cannot_name_files_elsewhere(run, filled):
    stamp = filled / "models" / "mine" / ".dflash-mlx.json"
    found = json.loads(stamp.read_text())
    found["files"] |= {"../strange/model.safetensors": 8, "..": 1, str(filled / "chat-history.jsonl"): 8}
    stamp.write_text(json.dumps(found))
    assert run("cache", "remove", "mine", "--yes")[0] == 0
    assert (filled / "models" / "strange" / "model.safetensors").exists()
    assert (filled / "chat-history.jsonl").exists()


def test_a_model_of_the_hub_goes_when_it_is_named(run, filled):
    assert run("cache", "remove", HUB, "--yes")[0] == 0
    assert not (filled / "hub" / "models--z-lab--Qwen3-4B-DFlash-b16").exists()
    assert (filled / "hub" / "models--other--model").exists()
    assert "mine" in names(run)


def test_what_a_running_process_holds_is_no_leftover(run, filled):
    with held(filled / "models" / ".mine.making-abc"):
        assert "leftovers" not in names(run)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "say what to remove"),
        (["mine", "--all"], "say what to remove"),
        (["mne"], "Did you mean mine?"),
        (["mine"], "add --yes"),
        (["other/model", "--yes"], "nothing here is called 'other/model'"),
    ],
)
def test_misuse_removes_nothing(run, filled, monkeypatch, arguments, words):
    monkeypatch.setattr("sys.stdin", None)
    before = names(run)
    code, _, err = run("cache", "remove", *arguments)
    assert code == 2
    assert words in err
    assert names(run) == before


@pytest.mark.parametrize(("answer", "removed"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_it_asks_first(run, filled, monkeypatch, answer, removed):
    class Keyboard:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return answer

    monkeypatch.setattr("sys.stdin", Keyboard())
    code, _, err = run("cache", "remove", "mine")
    assert code == 0
    assert "Remove this? [y/N]" in err
    assert ("mine" not in names(run)) == removed
