"""Drafters of every kind in another precision: each is read again by its own loader, and means nearly the same."""

import json

import mlx.core as mx
import numpy as np
import pytest
import test_eagle3
import test_medusa
import test_mtp
from mlx.utils import tree_flatten
from tiny import tiny_target
from tiny_families import family_target, unavailable

from dflash_mlx.drafters.convert import convert_drafter
from dflash_mlx.drafters.eagle3_checkpoint import load_eagle3
from dflash_mlx.drafters.medusa import load_medusa
from dflash_mlx.drafters.mtp import load_mtp
from dflash_mlx.errors import UsageError
from dflash_mlx.hub.own_head import brings_head
from dflash_mlx.hub.quantize import choose_scheme, quantize_folder


def quantized(source, folder, **options):
    folder.mkdir()
    quantize_folder(source, folder, choose_scheme(group_size=32, **options))
    return folder


def weights_of(network):
    return {name: np.array(array) for name, array in tree_flatten(network.parameters())}


def are_close(found, original, share):
    """Whether weights have the same names, and differ by no more than a share of the largest of a tensor."""
    assert found.keys() == original.keys()
    return all(np.abs(found[name] - x).max() <= share * np.abs(x).max() for name, x in original.items())


def write_eagle3(folder, layout):
    test_eagle3.write(folder, layout)


def write_medusa(folder, file):
    test_medusa.write(folder, test_medusa.heads_of(), file)


@pytest.mark.parametrize(
    ("write", "layout", "load"),
    [
        (write_eagle3, "authors", load_eagle3),
        (write_eagle3, "SGLang", load_eagle3),
        (write_eagle3, "speculators", load_eagle3),
        (write_medusa, "medusa_lm_head.pt", load_medusa),
        (write_medusa, "model.safetensors", load_medusa),
    ],
)
def test_drafters_of_other_kinds(write, layout, load, tmp_path):
    source, target = tmp_path / "source", tiny_target("llama")
    source.mkdir()
    write(source, layout)
    original = weights_of(load(source, target, dtype=mx.float32).network)
    small = quantized(source, tmp_path / "small", bits=8)
    found = load(small, target, dtype=mx.float32)
    assert are_close(weights_of(found.network), original, 0.02)
    assert not are_close(weights_of(found.network), original, 0.0005)
    stored = mx.load(str(small / "model.safetensors"))
    assert sum(name.endswith(".scales") for name in stored) > 1
    wide = quantized_back(small, tmp_path / "wide")
    assert are_close(weights_of(load(wide, target, dtype=mx.float32).network), original, 0.03)


def quantized_back(source, folder):
    folder.mkdir()
    quantize_folder(source, folder, choose_scheme(dequantize=True))
    return folder


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_targets_own_head_stays_with_it(family, tmp_path, monkeypatch):
    if reason := unavailable(family):
        pytest.skip(reason)
    target, source = family_target(family), tmp_path / "source"
    # mlx-lm's own rule for experts' gates wants matrices of 64 columns.
    monkeypatch.setattr(type(target.model), "quant_predicate", None)
    source.mkdir()
    test_mtp.write(source, test_mtp.head_of(target), layout="two in one")
    original = weights_of(load_mtp(source, target, dtype=mx.float32).network)
    (source / "model.safetensors").rename(source / "mtp.safetensors")
    mx.save_safetensors(
        str(source / "model.safetensors"), dict(tree_flatten(target.model.parameters())), {"format": "mlx"}
    )
    (source / "config.json").write_text(json.dumps(target.config))
    assert brings_head(source)
    small = quantized(source, tmp_path / "small", bits=8)
    assert brings_head(small)
    assert are_close(weights_of(load_mtp(small, target, dtype=mx.float32).network), original, 0.02)
    wide = quantized_back(small, tmp_path / "wide")
    assert are_close(weights_of(load_mtp(wide, target, dtype=mx.float32).network), original, 0.03)
    (source / "mtp.safetensors").unlink()
    assert not (quantized(source, tmp_path / "without", bits=8) / "mtp.safetensors").exists()


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (test_eagle3.AUTHORS, "a drafter for eagle3"),
        (test_medusa.CONFIG, "a drafter for medusa"),
        ({"model_type": "llama"}, "a language model"),
    ],
)
def test_only_dflash_drafters_are_converted(config, found, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=f"only DFlash drafters are converted; .* holds {found}"):
        convert_drafter(tmp_path, tmp_path / "out", to="zlab")
    assert not (tmp_path / "out").exists()
