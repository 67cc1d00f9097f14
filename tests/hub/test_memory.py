"""What a pair needs in memory, against sums done by hand."""

import json
from pathlib import Path

import pytest

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.memory import Needs, cache_bytes, drafter_cache_bytes, folder_bytes, pair_needs
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


@pytest.mark.parametrize(
    ("config", "a_token"),
    [
        # Keys and values of 2 bytes: 4 layers, 2 heads of 32; a draft model's config.json says the same.
        (CONFIG | {"architectures": ["DFlashDraftModel"]}, 2 * 4 * 2 * 32 * 2),
        (CONFIG, 2 * 4 * 2 * 32 * 2),
        ({"speculators_model_type": "dflash", "transformer_layer_config": CONFIG}, 2 * 4 * 2 * 32 * 2),
        # One layer, and a feature of 64 numbers.
        (CONFIG | {"architectures": ["LlamaForCausalLMEagle3"]}, 2 * 2 * 32 * 2 + 64 * 2),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": CONFIG}, 2 * 2 * 32 * 2 + 64 * 2),
        # The target's hidden state.
        ({"medusa_num_heads": 3}, 512 * 2),
    ],
)
def test_every_kind_of_drafter_keeps_something_of_a_text(config: dict[str, object], a_token: int) -> None:
    assert drafter_cache_bytes(config, target={"text_config": {"hidden_size": 512}}, tokens=10) == 10 * a_token


def test_weights_in_a_file_of_pytorch_count(tmp_path: Path) -> None:
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\0" * 70)
    assert folder_bytes(tmp_path) == 70
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 30)
    assert folder_bytes(tmp_path) == 30


def test_a_drafter_whose_config_cannot_be() -> None:
    for config in ({"architectures": 3}, CONFIG | {"num_attention_heads": "many"}):
        with pytest.raises(CheckpointError, match=r"config\.json holds a value that cannot be"):
            drafter_cache_bytes(config, target=CONFIG)
