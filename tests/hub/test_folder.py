"""Checks of checkpoint folders and of the drafter that is shipped."""

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.download import ensure_model, is_ready
from dflash_mlx.hub.folder import check_folder
from dflash_mlx.hub.quantize import quantize_drafter
from dflash_mlx.hub.registry import ModelSource, find_pair


def make(folder: Path, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config if config is not None else {"model_type": "llama"}))
    mx.save_safetensors(str(folder / "model.safetensors"), {"a": mx.ones((3, 4)), "b": mx.zeros((2,))})
    return folder


def test_a_complete_folder_is_ready(tmp_path: Path) -> None:
    source = ModelSource(kind="folder", path=str(make(tmp_path / "m")))
    assert is_ready(source)
    assert ensure_model(source) == tmp_path / "m"


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def padded(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")


def huge_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")


def shard_missing(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "c": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, r"damaged: expected \d+ bytes, found \d+"),
        (padded, r"damaged: expected \d+ bytes, found \d+"),
        (huge_header, r"not a complete safetensors file \(10 bytes\)"),
        (shard_missing, r"model-00002-of-00002\.safetensors is missing"),
        (pickle_only, r"expected \*\.safetensors, found pytorch_model\.bin"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "JSON object, found list"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "not a complete safetensors"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said(tmp_path: Path, damage: Any, reason: str) -> None:
    folder = make(tmp_path / "m")
    damage(folder)
    assert not is_ready(ModelSource(kind="folder", path=str(folder)))
    with pytest.raises(CheckpointError, match=reason):
        check_folder(folder)


def test_a_drafter_may_be_a_pytorch_file(tmp_path: Path) -> None:
    folder = make(tmp_path / "m", {"architectures": ["LlamaForCausalLMEagle3"]})
    pickle_only(folder)
    assert check_folder(folder) == folder


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found no folder"):
        ensure_model(ModelSource(kind="folder", path=str(tmp_path / "none")))


AUTO_MAP = {"AutoModel": "modeling.Thing"}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3", "auto_map": AUTO_MAP},
        {"model_type": "mistral", "auto_map": AUTO_MAP},  # mlx-lm builds it as llama
        {"model_type": "brand_new", "auto_map": AUTO_MAP, "dflash_config": {"mask_token_id": 1}},
        {"model_type": "brand_new", "auto_map": AUTO_MAP, "architectures": ["DFlashDraftModel"]},
    ],
)
def test_code_for_other_libraries_does_no_harm(tmp_path: Path, config: dict[str, Any]) -> None:
    check_folder(make(tmp_path / "m", config))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "brand_new", "auto_map": AUTO_MAP},
        {"model_type": "../../evil", "auto_map": AUTO_MAP},
        {"model_type": "x" * 300, "auto_map": AUTO_MAP},
        {"auto_map": AUTO_MAP},
        {"model_type": "llama", "model_file": "model.py"},
    ],
)
def test_a_checkpoint_that_needs_its_own_code_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="own code"):
        check_folder(make(tmp_path / "m", config))


def test_quantizing_a_drafter(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    rng = np.random.default_rng(0)
    weights = {
        "fc.weight": rng.normal(size=(32, 128)),
        "norm.weight": rng.normal(size=(32,)),
        "odd.weight": rng.normal(size=(4, 40)),
    }
    arrays = {name: mx.array(values.astype(np.float32)).astype(mx.bfloat16) for name, values in weights.items()}
    mx.save_safetensors(str(source / "model-1.safetensors"), {"fc.weight": arrays["fc.weight"]})
    mx.save_safetensors(
        str(source / "model-2.safetensors"), {name: arrays[name] for name in ("norm.weight", "odd.weight")}
    )
    (source / "config.json").write_text(
        json.dumps({"block_size": 16, "dflash_config": {"mask_token_id": 3}, "eval": {}})
    )
    quantize_drafter(source, folder)
    found: Any = mx.load(str(folder / "model.safetensors"))
    assert set(found) == {"fc.weight", "fc.scales", "fc.biases", "norm.weight", "odd.weight"}
    for name in ("norm.weight", "odd.weight"):
        assert mx.array_equal(found[name], arrays[name])
    scales, biases = (found[f"fc.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    back = np.array(mx.dequantize(found["fc.weight"], scales, biases, group_size=64, bits=8))
    original = np.array(arrays["fc.weight"].astype(mx.float32)).reshape(32, 2, 64)
    step = (original.max(-1) - original.min(-1)) / 255
    # Half a step of rounding, plus what bfloat16 does to scale and offset.
    assert (np.abs(back.reshape(32, 2, 64) - original).max(-1) < step * 1.5).all()
    config = json.loads((folder / "config.json").read_text())
    assert config == {
        "block_size": 16,
        "dflash_config": {"mask_token_id": 3},
        "dtype": "bfloat16",
        "quantization": {"group_size": 64, "bits": 8, "mode": "affine"},
    }
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_drafter(folder, source)


def test_the_shipped_drafter() -> None:
    folder = ensure_model(find_pair("demo").drafter)
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    assert names == [
        "README.md",
        "config.json",
        "curves-1.svg",
        "curves-2.svg",
        "curves-3.svg",
        "curves-4.svg",
        "curves-5.svg",
        "curves-6.svg",
        "model.safetensors",
        "topics.txt",
    ]
    assert sum(path.stat().st_size for path in folder.iterdir()) < 25_000_000
    config = json.loads((folder / "config.json").read_text())
    assert config["block_size"] == find_pair("demo").block_size
    weights: Any = mx.load(str(folder / "model.safetensors"))
    taps = len(config["dflash_config"]["target_layer_ids"])
    columns = weights["fc.scales"].shape[1] * config["quantization"]["group_size"]
    assert columns == taps * config["hidden_size"]
    assert all(mx.isfinite(weights[name]).all() for name in weights if not name.endswith(".weight"))
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert str(config["block_size"]) in card
