"""What killed runs left behind is removed, and nothing else."""

import os
from pathlib import Path

import pytest

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.leftovers import held, remove_leftovers, temporary_prefix, write_atomically
from dflash_mlx.hub.new_folder import write_new_folder


def leftover(path: Path, name: str) -> Path:
    folder = path.with_name(temporary_prefix(path) + name)
    folder.mkdir()
    (folder / "half").write_text("x")
    return folder


def test_only_what_nobody_holds_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "my [model]"
    abandoned, in_use = leftover(out, "a"), leftover(out, "b")
    others = [leftover(tmp_path / "other", "a"), tmp_path / ".my [model].backup"]
    others[1].write_text("mine")
    file = out.with_name(temporary_prefix(out) + "c")
    file.write_text("x")
    with held(in_use) as holds:
        assert holds
        remove_leftovers(out)
        assert not abandoned.exists()
        assert not file.exists()
        assert in_use.exists()
        assert all(path.exists() for path in others)
    remove_leftovers(out)
    assert not in_use.exists()


def test_a_second_holder_is_told(tmp_path: Path) -> None:
    with held(tmp_path) as first, held(tmp_path) as second:
        assert (first, second) == (True, False)


def test_a_new_folder_is_held_while_it_is_made(tmp_path: Path) -> None:
    out = tmp_path / "out"
    leftover(out, "a")

    def build(work: Path) -> None:
        remove_leftovers(out)  # as another process would
        (work / "file").write_text("x")

    write_new_folder(out, build)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "out"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def build(work: Path) -> None:
        (work / "file").write_text("x")
        raise RuntimeError("[write] Unable to write 7 bytes to file.")

    with pytest.raises(CheckpointError, match=r"cannot write .*Unable to write 7 bytes"):
        write_new_folder(tmp_path / "out", build)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made", ["a file", "a folder"])
def test_ctrl_c_at_the_moment_when_it_is_made_leaves_nothing(made: str, tmp_path: Path, monkeypatch) -> None:
    """The system has made it, and nothing of ours has run since."""
    name, module = ("open", os) if made == "a file" else ("mkdir", Path)
    ordinary = getattr(module, name)

    def interrupted(path, *rest, **options):
        found = ordinary(path, *rest, **options)
        if ".making-" in str(path):
            raise KeyboardInterrupt
        return found

    def write() -> None:
        if made == "a file":
            write_atomically(tmp_path / "a.json", "text")
        else:
            write_new_folder(tmp_path / "out", lambda work: None)

    monkeypatch.setattr(module, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write()
    assert not list(tmp_path.iterdir())
