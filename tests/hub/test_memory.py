"""What a pair needs in memory, against sums done by hand."""

import json
from pathlib import Path

import pytest

from dflash_mlx.hub.memory import Needs, cache_bytes, pair_needs
from dflash_mlx.hub.registry import ModelSource, PairSpec

CONFIG = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def spec(**changes: object) -> PairSpec:
    values = {
        "name": "x",
        "title": "X",
        "target": ModelSource(kind="hub", repo="a/X-8bit"),
        "drafter": ModelSource(kind="hub", repo="a/d", disk_mb=500),
        "block_size": 16,
        "thinking": "none",
        "verified": "listed",
        **changes,
    }
    return PairSpec(**values)  # type: ignore[arg-type]


def folder(path: Path, size: int) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(b"\0" * size)
    return path


def test_files_on_disk_are_measured(tmp_path: Path) -> None:
    needs = pair_needs(spec(), target=folder(tmp_path / "t", 1000), drafter=folder(tmp_path / "d", 300))
    per_token = 2 * 4 * 2 * 32 * 2  # keys and values, layers, heads, width, bytes
    assert (needs.target, needs.drafter, needs.cache) == (1000, 300, 2 * 8192 * per_token)
    assert not needs.estimated


def test_names_give_an_estimate() -> None:
    needs = pair_needs(spec(parameters_b=10), target=None, drafter=None)
    assert (needs.target, needs.drafter) == (10_625_000_000, 500_000_000)  # 8 bits and half a bit of scales
    assert needs.estimated
    assert pair_needs(spec(), target=None, drafter=None).total is None


def test_only_layers_with_full_attention_grow() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    assert cache_bytes({**CONFIG, "layer_types": kinds}, tokens=10) * 4 == cache_bytes(CONFIG, tokens=10)
    nested = {"model_type": "x", "text_config": {**CONFIG, "full_attention_interval": 4}}
    assert cache_bytes(nested, tokens=10) * 4 == cache_bytes(CONFIG, tokens=10)


@pytest.mark.parametrize(
    ("parts", "memory", "fits"),
    [
        ((5, 1, 0), 8, True),
        ((5, 1, 1), 8, False),
        ((5, None, 1), 8, None),
        ((None, None, None), 8, None),
        ((50, None, None), 8, False),  # what is known is too much already
    ],
)
def test_fits(parts: tuple[int | None, ...], memory: int, fits: bool | None) -> None:
    assert Needs(*parts, estimated=True).fits(memory) is fits  # type: ignore[misc]
