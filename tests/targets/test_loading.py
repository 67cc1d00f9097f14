"""What is refused before a target is made."""

import json
from pathlib import Path
from typing import Any

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
