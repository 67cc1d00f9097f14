"""Other precisions of targets and drafters: the numbers against MLX's own, the files against the loaders."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from tiny import tiny_drafter, tiny_target

from dflash_mlx.drafters.checkpoint import load_drafter
from dflash_mlx.errors import CheckpointError, UsageError
from dflash_mlx.hub import quantize
from dflash_mlx.hub.folder import check_folder
from dflash_mlx.hub.quantize import Scheme, bits_per_weight, choose_scheme, model_card, quantize_folder
from dflash_mlx.training.export import checkpoint_config


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama in float32, with a tokenizer file that is to be copied."""
    model = tiny_target("llama", hidden_size=64, intermediate_size=128, tie_word_embeddings=False)
    return save(tmp_path_factory.mktemp("target"), model.model, {**model.config, "eos_token_id": 2})


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_drafter(hidden_size=64, intermediate_size=128, head_dim=16)
    return save(tmp_path_factory.mktemp("drafter"), model, checkpoint_config(model.config))


def save(folder: Path, model: Any, config: dict[str, Any]) -> Path:
    mx.save_safetensors(str(folder / "model.safetensors"), weights_of(model), metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling.py").write_text("raise SystemExit")
    return folder


def weights_of(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def converted(source: Path, folder: Path, **options: Any) -> Path:
    folder.mkdir()
    quantize_folder(source, folder, choose_scheme(**options))
    return check_folder(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"bits": 4},
        {"bits": 8, "group_size": 32},
        {"bits": 2},
        {"mode": "mxfp4"},
        {"mode": "mxfp8"},
        {"mode": "nvfp4"},
    ],
)
def test_a_target_holds_what_mlx_makes_of_its_weights(target: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    folder = converted(target, tmp_path / "out", **options)
    scheme = choose_scheme(**options)
    model, config = load_model(folder)
    assert config["quantization"] == {"group_size": scheme.group_size, "bits": scheme.bits, "mode": scheme.mode}
    found = weights_of(model)
    for name, original in weights_of(load_model(target)[0]).items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in found:
            parts = mx.quantize(original, scheme.group_size, scheme.bits, mode=scheme.mode)
            for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
                assert mx.array_equal(found[f"{stem}.{part}"], array), name
        else:
            assert mx.array_equal(found[name], original), name
    assert sum(name.endswith(".scales") for name in found) == 4 * 7 + 2
    assert sorted(path.name for path in folder.glob("*.py")) == []
    assert (folder / "tokenizer.json").is_file()


def test_nothing_is_printed(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What mlx-lm prints would stand in the middle of the command's own lines."""
    converted(target, tmp_path / "out", bits=4)
    assert capsys.readouterr() == ("", "")


def test_expanding_gives_what_the_quantized_weights_mean(target: Path, tmp_path: Path) -> None:
    small = converted(target, tmp_path / "small", bits=4)
    wide = converted(small, tmp_path / "wide", dequantize=True)
    packed, plain = weights_of(load_model(small)[0]), weights_of(load_model(wide)[0])
    stem = "model.layers.1.mlp.up_proj"
    meant = mx.dequantize(packed[f"{stem}.weight"], packed[f"{stem}.scales"], packed[f"{stem}.biases"], 64, 4)
    assert mx.allclose(plain[f"{stem}.weight"], meant, atol=1e-6)
    assert "quantization" not in json.loads((wide / "config.json").read_text())
    again = converted(small, tmp_path / "again", bits=8)
    assert load_model(again)[1]["quantization"]["bits"] == 8


def test_a_recipe_gives_some_layers_more_bits(target: Path, tmp_path: Path) -> None:
    folder = converted(target, tmp_path / "out", recipe="mixed_3_6")
    model, _ = load_model(folder)
    assert {module.bits for _, module in model.named_modules() if hasattr(module, "bits")} == {3, 6}
    with pytest.raises(UsageError, match="recipe is"):
        choose_scheme(recipe="mixed_1_2")


@pytest.mark.parametrize("options", [{"bits": 4}, {"bits": 8, "group_size": 32}, {"mode": "mxfp4"}, {"mode": "nvfp4"}])
def test_a_drafter_loads_and_means_nearly_the_same(drafter: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    folder = converted(drafter, tmp_path / "out", **options)
    original = weights_of(load_drafter(drafter, dtype=mx.float32))
    found = weights_of(load_drafter(folder, dtype=mx.float32, keep_quantized=False))
    assert found.keys() == original.keys()
    bits = choose_scheme(**options).bits or 16
    for name, values in original.items():
        error = np.abs(np.array(found[name]) - np.array(values)).max()
        largest = np.abs(np.array(values)).max()
        assert error <= largest * (0.02 if bits == 8 or values.ndim == 1 else 0.35), name
    with pytest.raises(UsageError, match="recipes are for targets"):
        quantize_folder(drafter, folder, Scheme(bits=3, recipe="mixed_3_6"))


def test_a_drafter_comes_back_and_its_vocabulary_map_stays_whole(drafter: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    arrays: Any = mx.load(str(drafter / "model.safetensors"))
    ids = mx.array([5, 70_001, 2], dtype=mx.int64)
    mx.save_safetensors(str(source / "model.safetensors"), {**arrays, "d2t": ids})
    (source / "config.json").write_text((drafter / "config.json").read_text())
    small = converted(source, tmp_path / "small", bits=8)
    wide = converted(small, tmp_path / "wide", dequantize=True)
    for folder in (small, wide):
        found: Any = mx.load(str(folder / "model.safetensors"))
        assert mx.array_equal(found["d2t"], ids)
    assert found.keys() == {*arrays, "d2t"}
    name = "layers.0.mlp.up_proj.weight"
    assert float(mx.abs(found[name].astype(mx.float32) - arrays[name]).max()) < 0.02


def test_a_mask_row_in_a_file_of_its_own_is_kept(
    drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(drafter, source)
    (source / "mask_embedding.pt").write_bytes(b"a torch file")
    row = mx.arange(64).astype(mx.bfloat16)
    monkeypatch.setattr("dflash_mlx.drafters.torch_file.read_mask_embedding", lambda path, token: row)
    found: Any = mx.load(str(converted(source, tmp_path / "out", bits=8) / "model.safetensors"))
    assert mx.array_equal(found["mask_embedding"], row)


def test_bits_a_weight(target: Path, drafter: Path, tmp_path: Path) -> None:
    assert bits_per_weight(target) == 32
    small = bits_per_weight(converted(target, tmp_path / "a", bits=4))
    assert small is not None
    # 4 bits, and for each group of 64 a scale and an offset in float32; norms stay float32.
    assert small == pytest.approx(5 + 27 * 64 * 9 / count(target), abs=0.2)
    assert bits_per_weight(converted(drafter, tmp_path / "b", bits=8)) == pytest.approx(8.5, abs=0.2)


def count(folder: Path) -> int:
    arrays: Any = mx.load(str(folder / "model.safetensors"))
    return sum(array.size for array in arrays.values())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bits": 7}, "bits is 7; MLX's affine mode has 2, 3, 4, 5, 6, 8"),
        ({"mode": "mxfp4", "bits": 8}, "mxfp4 mode has 4"),
        ({"group_size": 48}, "group size is 48"),
        ({"mode": "gguf"}, "mode is 'gguf'; expected one of affine"),
        ({"recipe": "mixed_3_6", "bits": 4}, "chooses the bits itself"),
        ({"dequantize": True, "bits": 4}, "goes with none of"),
    ],
)
def test_what_cannot_be_stored_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        choose_scheme(**options)


def test_a_disk_that_is_too_small(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize.shutil, "disk_usage", lambda path: quantize.shutil._ntuple_diskusage(9, 9, 1000))
    with pytest.raises(CheckpointError, match="are free at"):
        converted(target, tmp_path / "out", bits=4)


def test_the_card_names_its_base() -> None:
    card = model_card("x-4bit", Scheme(bits=4), {"size_mb_after": 12, "no": None}, base="a/x", license_name="mit")
    head = card.split("---")[1]
    assert "base_model: a/x" in head
    assert "license: mit" in head
    assert "| size mb after | 12 |" in card
