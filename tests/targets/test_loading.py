"""What is refused before a target is made."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from dflash_mlx.errors import CheckpointError
from dflash_mlx.targets.loading import load_target


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "llama", "num_hidden_layers": 2**31}, "num_hidden_layers"),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 1e9}, "num_experts"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10_001}}, "num_hidden_layers"),
    ],
)
def test_a_config_with_far_too_many_layers_or_experts(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    """mlx-lm would make each of them, and fill the memory."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"larger {name} than any model; expected at most 10000"):
        load_target(tmp_path, dtype="float32")


def test_what_mlx_lm_does_not_expect(tmp_path: Path) -> None:
    """It asserts that there is a vocabulary, without a word."""
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"), 4)
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 0, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"model.norm.weight": mx.ones((4,))})
    with pytest.raises(CheckpointError, match=r"cannot load the model in .*config\.json does not fit together"):
        load_target(tmp_path, dtype="float32")
