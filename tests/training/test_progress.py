"""What is said while a drafter is made."""

from dflash_mlx.training import progress
from dflash_mlx.training.pipeline import _other_files


def test_the_time_that_is_left(monkeypatch, capsys):
    """By hand: a resumed run began at a half, and takes 10 s for each tenth."""
    now = 1000.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress, "_LINE_EVERY_SECONDS", 0)
    with progress.Progress("training") as shown:
        for share, later in ((0.5, 0), (0.6, 10), (0.9, 30), (1.0, 10)):
            now += later
            shown.update(share, "x")
    assert capsys.readouterr().err.splitlines() == [
        "training: 50%, x",
        "training: 60%, x, about 40 s left",
        "training: 90%, x, about 10 s left",
        "training: 100%, x",
    ]


def test_other_files_in_the_folder(tmp_path):
    assert _other_files(tmp_path / "new", tmp_path / "new" / "work") == ""
    for name in "abcde":
        (tmp_path / name).touch()
    assert _other_files(tmp_path, tmp_path / "work") == "a, b, c and 2 more"
    (tmp_path / "work").mkdir()
    assert _other_files(tmp_path, tmp_path / "work") == "", "a run that goes on"
