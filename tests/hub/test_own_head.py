"""Whether a target's folder has a head for multi-token prediction, by the names of its tensors."""

import json

import mlx.core as mx
import pytest

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.own_head import brings_head


def folder_of(folder, kind, *files):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "num_hidden_layers": 2}))
    for number, names in enumerate(files):
        mx.save_safetensors(str(folder / f"{number}.safetensors"), dict.fromkeys(names, mx.zeros((1,))))
    return folder


@pytest.mark.parametrize(
    ("kind", "names", "found"),
    [
        ("qwen3_next", ["mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"], True),
        ("qwen3_5_moe", ["language_model.mtp.fc.weight"], True),
        ("qwen3_5", ["model.embed_tokens.weight"], False),
        ("qwen3_5", ["mtp.fc.weight", "mtp.layers.1.mlp.gate.weight"], False),
        ("glm_moe_dsa", ["model.layers.2.eh_proj.weight"], True),
        ("glm_moe_dsa", ["model.layers.1.mlp.gate.weight"], False),
        ("llama", ["mtp.fc.weight"], False),
    ],
)
def test_a_head_that_can_be_run(kind, names, found, tmp_path):
    assert brings_head(folder_of(tmp_path, kind, ["lm_head.weight"], names)) is found


def test_a_damaged_file_is_reported(tmp_path):
    folder = folder_of(tmp_path, "qwen3_5")
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 not a header ")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        brings_head(folder)
