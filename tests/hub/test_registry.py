"""Pair files, names, sources and the cache folder."""

import sys
from pathlib import Path

import pytest

from dflash_mlx.errors import UsageError
from dflash_mlx.hub import registry
from dflash_mlx.hub.download import is_ready
from dflash_mlx.hub.registry import ModelSource, cache_home, find_pair, list_pairs, parse_source, read_pair

GOOD = """
format = 1
name = "qwen3-4b"
aliases = ["q4"]
title = "Qwen3 4B"
block_size = 16
thinking = "off"
license = "Apache-2.0"
verified = "listed"

[shape]
family = "qwen3"
hidden_size = 2560

[target]
kind = "hub"
repo = "mlx-community/Qwen3-4B-4bit"
disk_mb = 2300

[[other_targets]]
kind = "hub"
repo = "Qwen/Qwen3-4B"
label = "bf16"

[drafter]
kind = "hub"
repo = "z-lab/Qwen3-4B-DFlash-b16"
revision = "0123456789abcdef0123456789abcdef01234567"
gated = false
disk_mb = 1000
"""


def pair_file(folder: Path, content: str, name: str = "qwen3-4b.toml") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def test_the_demo_pair_is_known_by_name_and_alias() -> None:
    pair = find_pair("demo")
    assert pair is find_pair(" SmolLM2-135M ")
    assert pair in list_pairs()
    assert (pair.target.kind, pair.drafter.kind, pair.block_size) == ("pypi-gguf", "shipped", 16)
    assert is_ready(pair.drafter)


def test_an_unknown_pair_has_a_short_hint() -> None:
    with pytest.raises(
        UsageError, match=r"^no pair is called 'nope'\. `dflash-mlx models list --all` lists the pairs\.$"
    ):
        find_pair("nope")
    with pytest.raises(UsageError, match=r"Did you mean smollm2-135m \(demo\)\?"):
        find_pair("dmeo")
    with pytest.raises(UsageError, match=r"Did you mean qwen3-8b ") as caught:
        find_pair("Qwen3-8B-4bit")
    assert "kimi" not in str(caught.value)


def test_a_pair_file_is_read(tmp_path: Path) -> None:
    pair = read_pair(pair_file(tmp_path, GOOD))
    assert pair.target.repo == "mlx-community/Qwen3-4B-4bit"
    assert pair.drafter.revision is not None
    assert [source.label for source in pair.other_targets] == ["bf16"]
    assert pair.disk_mb == 3300


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("format = 1", "format = 2", "format = 1"),
        ('title = "Qwen3 4B"\n', "", "lacks the key 'title'"),
        ('title = "Qwen3 4B"', "title = 3", "title is 3"),
        ("block_size = 16", "blocksize = 16", "lacks the key 'block_size'"),
        ("block_size = 16", "block_size = 16\nblocks = 1", "unknown key 'blocks'"),
        ("block_size = 16", "block_size = 1", "block_size is 1"),
        ("block_size = 16", "block_size = true", "block_size is True"),
        ('license = "Apache-2.0"', "parameters_b = 0", "parameters_b is 0"),
        ('license = "Apache-2.0"', 'method = "eagle"', "method is 'eagle'"),
        ('license = "Apache-2.0"', 'base = "Qwen3"', "base is 'Qwen3'"),
        ('license = "Apache-2.0"', "variants = [1]", "variants is"),
        ("hidden_size = 2560", "hidden_size = 0", r"\[shape\] hidden_size is 0"),
        ("hidden_size = 2560", "heads = 4", r"\[shape\] has the unknown key 'heads'"),
        ('thinking = "off"', 'thinking = "maybe"', "thinking is 'maybe'"),
        ('verified = "listed"', 'verified = "yes"', "verified is 'yes'"),
        ('aliases = ["q4"]', 'aliases = "q4"', "aliases is 'q4'"),
        ('kind = "hub"\nrepo = "mlx', 'kind = "ftp"\nrepo = "mlx', r"\[target\] must be a table with kind"),
        ('repo = "mlx-community/Qwen3-4B-4bit"', 'repo = "qwen"', "not a proper repo"),
        ("gated = false", 'gated = "no"', "gated is 'no'"),
        ("disk_mb = 2300", "disk_mb = -1", "disk_mb is -1"),
        ('label = "bf16"', 'path = "x"', r"\[\[other_targets\]\] has the unknown key 'path'"),
        ("[drafter]", "[drafter", "qwen3-4b.toml"),
    ],
)
def test_mistakes_in_a_pair_file_are_named(tmp_path: Path, old: str, new: str, reason: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError, match=reason) as caught:
        read_pair(pair_file(tmp_path, GOOD.replace(old, new, 1)))
    assert "qwen3-4b.toml" in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_file_is_called_after_the_pair(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must be qwen3-4b\.toml"):
        read_pair(pair_file(tmp_path, GOOD, "other.toml"))


def test_two_pairs_may_not_share_a_name(tmp_path: Path) -> None:
    first = read_pair(pair_file(tmp_path, GOOD))
    second = read_pair(pair_file(tmp_path, GOOD.replace("qwen3-4b", "q4"), "q4.toml"))
    with pytest.raises(UsageError, match="both answer to 'q4'"):
        registry.check_names((first, second))


def test_sources_as_a_user_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_source("owner/name") == ModelSource(kind="hub", repo="owner/name")
    assert parse_source("owner/name@v1.0") == ModelSource(kind="hub", repo="owner/name", revision="v1.0")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    # An existing folder wins over a Hub id of the same spelling.
    assert parse_source("owner/name") == ModelSource(kind="folder", path=str(tmp_path / "owner" / "name"))


@pytest.mark.parametrize("text", ["", "name", "/no/such/folder", "a/b/c", "../x", "owner/na me", "https://x.org/a/b"])
def test_what_is_neither_folder_nor_hub_id(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # beside which there is nothing
    with pytest.raises(UsageError, match="expected a model folder or a Hub id"):
        parse_source(text)


def test_a_file_is_not_a_source(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        parse_source(str(tmp_path / "m.gguf"))


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DFLASH_MLX_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_home() == tmp_path / "Library" / "Caches" / "dflash-mlx"
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_home() == tmp_path / ".cache" / "dflash-mlx"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "dflash-mlx"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_home() == tmp_path / ".cache" / "dflash-mlx"
    monkeypatch.setenv("DFLASH_MLX_HOME", "~/mine")
    assert cache_home() == tmp_path / "mine"


def test_every_shipped_pair_says_what_is_needed() -> None:
    pairs = [pair for pair in list_pairs() if pair.drafter.kind == "hub"]
    assert len(pairs) >= 27
    for pair in pairs:
        assert pair.base, pair.name
        assert pair.drafter.repo.partition("/")[0] in {"z-lab", "incoai"}
        assert ("DFlash2" in pair.drafter.repo) == (pair.method == "dflash2")
        assert pair.base in {source.repo for source in pair.other_targets}
        # Nobody ran these, and no revision was pinned: the registry must not claim more.
        assert pair.verified == "listed"
        assert pair.drafter.revision is None
