"""Drafters between z-lab's layout and that of speculators: the same weights, the same drafts, whole or not at all."""

import json

import mlx.core as mx
import pytest
from cases import CASES, HIDDEN, VOCAB, make_weights, write_folder
from tiny import context_rows

from dflash_mlx.drafters import convert
from dflash_mlx.drafters.checkpoint import load_drafter, read_checkpoint
from dflash_mlx.drafters.convert import convert_drafter
from dflash_mlx.errors import CheckpointError, UsageError

IDS = [33, 3, 4, 9, 20]
BOTH_WAYS = [
    "full",
    "newer fields",
    "neither block size nor layers",
    "sliding and full",
    "all sliding",
    "sliding, bidirectional",
    "biases",
    "yarn of gpt-oss",
    "llama3 rope",
    "second",
]


def in_bfloat16(folder, config, **tensors):
    """The case's folder with weights in bfloat16, as published ones are."""
    write_folder(folder, config)
    weights = {name: mx.array(x).astype(mx.bfloat16) for name, x in make_weights(config).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **tensors})
    return folder


def reduced(**nested):
    config = CASES["full"]
    return {**config, "dflash_config": {**config["dflash_config"], "draft_token_ids": IDS, **nested}}


def raw(folder):
    return json.loads((folder / "config.json").read_text())


def same_bits(a, b):
    kinds = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
    return a.dtype == b.dtype and mx.array_equal(a.view(kinds[a.dtype.size]), b.view(kinds[b.dtype.size])).item()


def drafts(folder):
    drafter = load_drafter(folder, dtype=mx.float32)
    cache = drafter.make_cache()
    drafter.extend_context(mx.random.normal((1, 12, 3 * HIDDEN), key=mx.random.key(0)), cache)
    return drafter(mx.random.normal((1, 6, HIDDEN), key=mx.random.key(1)), context_rows(drafter, cache, 6))


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_there_and_back(name, tmp_path):
    source = in_bfloat16(tmp_path / "source", CASES[name])
    convert_drafter(source, tmp_path / "there", to="speculators", target="org/target")
    convert_drafter(tmp_path / "there", tmp_path / "back", to="zlab")
    expected = mx.load(str(source / "model.safetensors"))
    for folder in (tmp_path / "there", tmp_path / "back"):
        found = mx.load(str(folder / "model.safetensors"))
        assert found.keys() == expected.keys()
        assert all(same_bits(found[key], expected[key]) for key in expected)
        assert mx.array_equal(drafts(folder), drafts(source)).item()
    assert read_checkpoint(tmp_path / "back").config == read_checkpoint(source).config
    # What Transformers reads the layers with.
    assert raw(tmp_path / "back")["model_type"] == raw(source).get("model_type", "qwen3") == "qwen3"


def test_what_speculators_reads(tmp_path):
    source = in_bfloat16(tmp_path / "source", CASES["sliding, bidirectional"])
    convert_drafter(source, tmp_path / "out", to="speculators", target="org/target")
    config = raw(tmp_path / "out")
    assert config["speculators_model_type"] == "dflash"
    assert config["aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert (config["block_size"], config["mask_token_id"], config["draft_vocab_size"]) == (6, 39, VOCAB)
    assert config["sliding_window_non_causal"] is True
    layer = config["transformer_layer_config"]
    assert (layer["use_sliding_window"], layer["sliding_window"]) == (True, 8)
    assert "dflash_config" not in layer
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5


def test_layers_that_slide_are_named_one_by_one(tmp_path):
    """Also where the source only says that some do: other readers know the list alone."""
    full = {name: value for name, value in CASES["full"].items() if name != "layer_types"}
    count = full["num_hidden_layers"]
    some = {**full, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    every = {**full, "dflash_config": {**full["dflash_config"], "use_swa": True, "swa_window_size": 8}}
    for name, config, sliding in (("some", some, count - 1), ("every", every, count)):
        convert_drafter(in_bfloat16(tmp_path / name, config), tmp_path / f"{name} out", to="speculators")
        layer = raw(tmp_path / f"{name} out")["transformer_layer_config"]
        assert layer["layer_types"] == ["full_attention"] * (count - sliding) + ["sliding_attention"] * sliding
        assert mx.array_equal(drafts(tmp_path / f"{name} out"), drafts(tmp_path / name)).item()


def test_dflash2_fields(tmp_path):
    convert_drafter(in_bfloat16(tmp_path / "a", CASES["second"]), tmp_path / "b", to="speculators")
    config = raw(tmp_path / "b")
    assert (config["speculators_model_type"], config["architectures"]) == ("dflash2", ["DFlash2DraftModel"])
    assert (config["conv_kernel_size"], config["conv_group_size"]) == (2, 8)
    assert (config["selector_rank"], config["selector_top_k"]) == (6, 5)


def test_a_reduced_vocabulary_is_kept(tmp_path):
    notes = convert_drafter(in_bfloat16(tmp_path / "a", reduced()), tmp_path / "b", to="speculators")
    assert any("no head of its own" in note for note in notes)
    tensors = mx.load(str(tmp_path / "b" / "model.safetensors"))
    assert (mx.arange(5) + tensors["d2t"]).tolist() == IDS
    assert [i for i, there in enumerate(tensors["t2d"].tolist()) if there] == sorted(IDS)
    assert tensors["t2d"].dtype == mx.bool_
    assert read_checkpoint(tmp_path / "b").config.draft_token_ids == tuple(IDS)
    convert_drafter(tmp_path / "b", tmp_path / "c", to="zlab")
    assert raw(tmp_path / "c")["dflash_config"]["draft_token_ids"] == IDS
    assert "d2t" not in mx.load(str(tmp_path / "c" / "model.safetensors"))


def test_a_head_of_its_own_is_kept(tmp_path):
    head = mx.random.normal((5, HIDDEN), key=mx.random.key(0)).astype(mx.bfloat16)
    source = in_bfloat16(tmp_path / "a", reduced(), **{"lm_head.weight": head})
    convert_drafter(source, tmp_path / "b", to="speculators")
    convert_drafter(tmp_path / "b", tmp_path / "c", to="zlab")
    for folder in ("b", "c"):
        assert same_bits(mx.load(str(tmp_path / folder / "model.safetensors"))["lm_head.weight"], head)
        assert read_checkpoint(tmp_path / folder).config.own_head


def test_the_targets_layers_are_named_where_they_are_known(tmp_path):
    convert_drafter(in_bfloat16(tmp_path / "a", CASES["full"]), tmp_path / "b", to="speculators")
    config = raw(tmp_path / "b")
    del config["transformer_layer_config"]["num_target_layers"]
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    notes = convert_drafter(tmp_path / "b", tmp_path / "c", to="zlab")
    assert any("num_target_layers stays empty" in note for note in notes)
    assert convert_drafter(tmp_path / "b", tmp_path / "d", to="zlab", target_layers=9) == []
    assert raw(tmp_path / "d")["num_target_layers"] == 9


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("soft cap and scales", "an output_multiplier (0.4) and an input_embedding_scale (5.5) and a final_logit"),
        ("soft cap of Gemma", "a final_logit_softcapping (3.0)"),
        ("causal", "full attention that is causal"),
    ],
)
def test_what_speculators_cannot_say_is_refused(name, part, tmp_path):
    source = in_bfloat16(tmp_path / "a", CASES[name])
    with pytest.raises(CheckpointError) as refusal:
        convert_drafter(source, tmp_path / "b", to="speculators")
    assert part in str(refusal.value)
    assert "Keep it in z-lab's layout" in str(refusal.value)
    assert not (tmp_path / "b").exists()


def test_quantized_drafters_and_the_same_layout_are_refused(tmp_path):
    source = in_bfloat16(tmp_path / "a", CASES["full"])
    with pytest.raises(UsageError, match="in the layout of z-lab already"):
        convert_drafter(source, tmp_path / "b", to="zlab")
    (source / "config.json").write_text(json.dumps({**raw(source), "quantization": {"bits": 4, "group_size": 32}}))
    with pytest.raises(CheckpointError, match="is quantized"):
        convert_drafter(source, tmp_path / "b", to="speculators")


def test_nothing_half_is_left(tmp_path, monkeypatch):
    source = in_bfloat16(tmp_path / "a", CASES["full"])

    def full_disk(path, weights, metadata):
        with open(path, "wb") as file:
            file.write(b"half of it")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(convert.mx, "save_safetensors", full_disk)
        with pytest.raises(CheckpointError, match=r"the disk is full while writing .*b\. Make room"):
            convert_drafter(source, tmp_path / "b", to="speculators")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("keep")
    with pytest.raises(UsageError, match="is there already and not empty"):
        convert_drafter(source, tmp_path / "b", to="speculators")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["mine.txt"]


def test_licences_come_along(tmp_path):
    source = in_bfloat16(tmp_path / "a", CASES["full"])
    (source / "LICENSE.txt").write_text("terms")
    convert_drafter(source, tmp_path / "b", to="speculators")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "LICENSE.txt",
        "config.json",
        "model.safetensors",
    ]
