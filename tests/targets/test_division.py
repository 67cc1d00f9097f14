"""What can be divided among machines, said before any weights are read."""

from importlib import import_module
from importlib.resources import files as files_of
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import LAYERS, tiny_target
from tiny_families import family_target

from dflash_mlx.errors import CheckpointError
from dflash_mlx.targets import division
from dflash_mlx.targets.division import divide, heads_left_over

HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8}


def group_of(size):
    return SimpleNamespace(rank=0, size=size, ranks=SimpleNamespace(rank=lambda: 0, size=lambda: size))


@pytest.mark.parametrize("config", [HEADS, {"text_config": HEADS}, {"num_attention_heads": 8}])
def test_heads_that_can_be_divided(config):
    assert heads_left_over(config, 4) is None


@pytest.mark.parametrize("machines", [3, 16])
def test_heads_that_cannot_be_divided_are_named(machines):
    target = tiny_target("llama", num_attention_heads=32, num_key_value_heads=8, hidden_size=64)
    with pytest.raises(CheckpointError, match=rf"(32|8) heads .* by {machines} machines; take a number"):
        divide(target, group_of(machines))


def test_families_whose_key_value_heads_are_given_to_several_machines():
    config = {"model_type": "qwen3_5", **HEADS, "num_key_value_heads": 2}
    assert heads_left_over(config, 4) is None
    assert heads_left_over({**config, "model_type": "qwen3"}, 4) == ("num_key_value_heads", 2)


def test_heads_that_do_not_come_out_even_are_left_together_where_mlx_lm_has_a_pipeline():
    target = family_target("kimi_k25")
    divide(target, group_of(3))
    assert target.whole_layers.own == range(3, LAYERS)
    assert target.machines == 3


@pytest.mark.parametrize("name", ["phi3", "gemma3", "lfm2"])
def test_a_family_without_shard_and_pipeline_is_refused(name):
    with pytest.raises(CheckpointError, match=f"cannot divide models of the kind {name} among machines; run it"):
        divide(family_target(name), group_of(2))


def test_the_docs_name_all_families_that_can_only_be_pipelines():
    """A new one in mlx-lm needs a word in docs/several-macs.md."""
    files = files_of("mlx_lm.models").iterdir()
    names = [file.name[:-3] for file in files if file.name.endswith(".py") and "pipeline" in file.read_text("utf-8")]
    modules = {name: import_module(f"mlx_lm.models.{name}") for name in names if name != "pipeline"}
    assert "deepseek_v3" in modules
    only = [name for name, module in modules.items() if not hasattr(module.Model, "shard")]
    page = (Path(__file__).parents[2] / "docs/several-macs.md").read_text("utf-8")
    assert [name for name in only if f"`{name}`" not in page] == []


def test_what_else_cannot_be_divided_is_refused():
    with pytest.raises(CheckpointError, match="by 2 machines"):
        divide(tiny_target("llama", intermediate_size=63), group_of(2))


def test_a_share_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(division, "backend", lambda: SimpleNamespace(memory_bytes=1000))
    with pytest.raises(CheckpointError, match="more machines"):
        divide(tiny_target("llama"), group_of(2))
