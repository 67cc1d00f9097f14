"""A pair that has passed its checks is not run again to check it, until one of its files or settings changes."""

import os

import pytest
from mlx_lm import load
from tiny_folder import write_drafter, write_target

from dflash_mlx import checked
from dflash_mlx.caches import target_caches
from dflash_mlx.checks import Guesses
from dflash_mlx.errors import PairError
from dflash_mlx.loading import load_pair, pair_around


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def folders(tmp_path):
    return write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")


@pytest.fixture
def examined(monkeypatch):
    """The pairs whose models were run to check them."""
    examine, found = checked.examine, []
    monkeypatch.setattr(checked, "examine", lambda pair, *, report: found.append(pair) or examine(pair, report=report))
    return found


def loaded(folders, **options):
    return load_pair(model=str(folders[0]), draft_model=str(folders[1]), **{"dtype": "float32", **options})


def test_what_was_found_is_remembered(folders, monkeypatch):
    """As it would be found again, and without running the models for it."""
    first, again = loaded(folders), loaded(folders, recheck=True)
    for name in ("works_with", "trees_work_with"):
        monkeypatch.setattr(target_caches, name, lambda *_: pytest.fail("the target was run"))
    monkeypatch.setattr(checked, "examine", lambda *_, **__: pytest.fail("the pair was run"))
    remembered = loaded(folders)
    assert remembered.checks == again.checks == first.checks != []
    assert remembered.warnings == again.warnings == first.warnings
    assert remembered.target.takes_rows()
    assert remembered.target.takes_trees()
    assert loaded(folders, check=False).checks == []


def test_a_target_alone_is_asked_once_what_it_takes(folders, monkeypatch):
    known = load_pair(model=str(folders[0]), draft=False).target
    monkeypatch.setattr(target_caches, "works_with", lambda *_: pytest.fail("the target was run"))
    target = load_pair(model=str(folders[0]), draft=False).target
    assert (target.takes_rows(), target.takes_trees()) == (known.takes_rows(), known.takes_trees())


def test_other_settings_are_checked_by_themselves(folders, examined):
    for options in ({}, {"dtype": "bfloat16"}, {"block_size": 4}, {"exact": True}, {"method": "dflash"}):
        examined.clear()
        for _ in range(2):
            loaded(folders, **options)
        assert len(examined) == 1, options


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_changed_is_noticed_even_with_its_old_size_and_date(folders, examined, which, replaced):
    loaded(folders)
    path = folders[which] / "model.safetensors"
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    if replaced:
        path.with_name("new").write_bytes(content)
        path.with_name("new").replace(path)
    else:
        path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    loaded(folders)
    assert len(examined) == 2


def test_a_pair_that_fails_fails_every_time(folders, monkeypatch):
    def refuse(*_, **__):
        raise PairError("does not fit")

    with monkeypatch.context() as patch:
        patch.setattr(checked, "check_pair", refuse)
        for _ in range(2):
            with pytest.raises(PairError):
                loaded(folders)
    assert loaded(folders).checks


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"checks": 3, "warnings": [], "rows": true, "trees": true}'])
def test_a_damaged_memory_is_no_memory(folders, home, examined, content):
    loaded(folders)
    [path] = (home / "pair-checks").iterdir()
    whole = path.read_text()
    path.write_text(content)
    loaded(folders)
    assert len(examined) == 2
    assert path.read_text() == whole


def test_a_model_that_was_loaded_elsewhere_is_always_checked(folders, monkeypatch):
    """Its weights need not be those of the folder that its tokenizer came from."""
    loaded(folders)
    model, tokenizer = load(str(folders[0]))
    run = []
    check = checked.check_pair
    monkeypatch.setattr(checked, "check_pair", lambda *args, **options: run.append(1) or check(*args, **options))
    assert pair_around(model, tokenizer, draft_model=str(folders[1])).checks
    assert run == [1]


@pytest.mark.parametrize("noise", [True, False])
def test_a_drafter_whose_guesses_look_random_begins_with_little_patience(folders, monkeypatch, noise):
    """The first time, and when that is remembered; and as well around a model that somebody else has loaded."""
    guesses = Guesses(right=0, places=32, following=0.5 if noise else 0.9)
    monkeypatch.setattr(checked, "read_guesses", lambda *_: guesses)
    pairs = [loaded(folders), loaded(folders), pair_around(*load(str(folders[0])), draft_model=str(folders[1]))]
    for pair in pairs:
        known = pair.new_experience()
        assert [known.patience.failed, known.patience_with_trees.failed] == [noise, noise]
        assert (guesses.report in pair.warnings) == noise
