"""Whole conversions: what mlx_lm loads computes what the GGUF file describes."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf_writer import MERGES, TOKENS, random_tensor, tiny_gguf, tiny_metadata, tiny_tensors, write_gguf
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.utils import load_model, load_tokenizer

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.gguf import convert_gguf
from dflash_mlx.hub.gguf_config import rope_from_factors

TOKEN_IDS = mx.array([[5, 9, 200, 3, 7, 101, 44, 2, 250, 31, 8, 8]])
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    *head, part, kind = name.split(".")
    return ".".join([*(["model.layers", head[1]] if head else []), HF_NAMES[part], kind])


def expected_logits(values: dict[str, np.ndarray], *, tied: bool = True, biases: bool = False) -> mx.array:
    """The same values in float32 in llama.cpp's own row order, with its interleaved rotation."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=len(TOKENS),
        rope_theta=5000.0,
        rope_traditional=True,
        tie_word_embeddings=tied,
        attention_bias=biases,
    )
    model = llama.Model(args)
    weights = {hf_name(name): mx.array(array) for name, array in values.items()}
    for name, zero in tree_flatten(model.parameters()):
        if name.endswith(".bias"):
            weights.setdefault(name, mx.zeros_like(zero))
    model.load_weights(list(weights.items()))
    return model(TOKEN_IDS)


def converted(path: Path, folder: Path) -> tuple[Any, dict[str, Any]]:
    folder.mkdir()
    convert_gguf(path, folder)
    model, config = load_model(folder)
    model.set_dtype(mx.float32)
    return model, config


def close(found: mx.array, expected: mx.array) -> bool:
    largest = mx.abs(expected).max().item()
    return largest > 0.1 and mx.abs(found - expected).max().item() < 2e-5 * largest


@pytest.mark.parametrize("matrix", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_converted_model_computes_the_same(tmp_path: Path, matrix: str, tied: bool) -> None:
    values = tiny_gguf(tmp_path / "f.gguf", matrix=matrix, embedding="Q8_0", tied=tied)
    model, config = converted(tmp_path / "f.gguf", tmp_path / "model")
    assert close(model(TOKEN_IDS), expected_logits(values, tied=tied))
    assert config["rope_traditional"] is False
    assert config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in dict(tree_flatten(model.parameters()))) is not tied


def test_rotary_rows_matter(tmp_path: Path) -> None:
    """The check above would notice rows left in llama.cpp's order."""
    values = tiny_gguf(tmp_path / "f.gguf", matrix="F32", embedding="F32")
    model, _ = converted(tmp_path / "f.gguf", tmp_path / "model")
    layer = model.model.layers[0].self_attn
    layer.k_proj.weight = mx.array(values["blk.0.attn_k.weight"])
    assert not close(model(TOKEN_IDS), expected_logits(values))


def test_biases_on_some_projections(tmp_path: Path) -> None:
    values = tiny_gguf(tmp_path / "f.gguf", biases=("attn_q", "attn_k", "attn_v"))
    model, config = converted(tmp_path / "f.gguf", tmp_path / "model")
    assert (config["attention_bias"], config["mlp_bias"]) == (True, False)
    assert close(model(TOKEN_IDS), expected_logits(values, biases=True))


def test_only_quantized_tensors_are_quantized(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "f.gguf", matrix="Q4_1", embedding="F16", tied=False)
    model, config = converted(tmp_path / "f.gguf", tmp_path / "model")
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    names = {name for name, _ in tree_flatten(model.parameters()) if name.endswith(".scales")}
    assert len(names) == 14  # seven matrices in each of two layers


def test_mixed_widths_are_named_in_the_config(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tensors, values = tiny_tensors(rng)
    for name, kind in (
        ("blk.1.ffn_down.weight", "Q5_1"),
        ("blk.0.attn_q.weight", "Q8_0"),
        ("blk.0.attn_k.weight", "F16"),
    ):
        tensors[name], values[name] = random_tensor(rng, kind, tensors[name][1])
    write_gguf(tmp_path / "f.gguf", tiny_metadata(), tensors)
    model, config = converted(tmp_path / "f.gguf", tmp_path / "model")
    named = {name: entry["bits"] for name, entry in config["quantization"].items() if isinstance(entry, dict)}
    assert named == {"model.embed_tokens": 8, "model.layers.0.self_attn.q_proj": 8, "model.layers.1.mlp.down_proj": 5}
    assert close(model(TOKEN_IDS), expected_logits(values))


# -- rotary settings ------------------------------------------------------------------------------------------------


def with_factors(path: Path, factors: np.ndarray) -> Path:
    tensors, _ = tiny_tensors(np.random.default_rng(0))
    tensors["rope_freqs.weight"] = ("F32", factors.shape, factors.astype("<f4").tobytes())
    return write_gguf(path, tiny_metadata(), tensors)


def rotated(config: dict[str, Any]) -> np.ndarray:
    """Unit vectors of 16 columns at positions 0 to 99, rotated by mlx-lm under the config."""
    rope = initialize_rope(16, 5000.0, False, config["rope_scaling"], config["max_position_embeddings"])
    return np.array(rope(mx.ones((1, 1, 100, 16))))[0, 0]


def rotated_by_hand(frequencies: np.ndarray) -> np.ndarray:
    angles = np.arange(100)[:, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([cos - sin, cos + sin], axis=-1)


def test_rope_factors_are_applied(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 9.0, 32.0])
    _, config = converted(with_factors(tmp_path / "f.gguf", factors), tmp_path / "model")
    frequencies = 5000.0 ** (-np.arange(8) / 8) / factors
    np.testing.assert_allclose(rotated(config), rotated_by_hand(frequencies), atol=2e-5)


def test_llama3_factors_are_recognised() -> None:
    """Factors computed as Llama 3.1's reference code does, pair by pair."""
    factors = []
    for pair in range(64):
        wave = 2 * np.pi * 500000.0 ** (pair / 64)
        if wave < 8192 / 4:
            factors.append(1.0)
        elif wave > 8192 / 1:
            factors.append(32.0)
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / 32 + smooth))
    config = {"head_dim": 128, "rope_theta": 500000.0, "max_position_embeddings": 131072}
    assert rope_from_factors(np.array(factors, dtype=np.float32), config) == {
        "rope_type": "llama3",
        "type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_linear_scaling(tmp_path: Path) -> None:
    changes = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    tiny_gguf(tmp_path / "f.gguf", metadata=changes)
    _, config = converted(tmp_path / "f.gguf", tmp_path / "model")
    np.testing.assert_allclose(rotated(config), rotated_by_hand(5000.0 ** (-np.arange(8) / 8) / 4), atol=2e-5)


def test_yarn_scaling_follows_llama_cpp(tmp_path: Path) -> None:
    changes = {
        "llama__rope__scaling__type": "yarn",
        "llama__rope__scaling__factor": 4.0,
        "llama__rope__scaling__original_context_length": 64,
    }
    tiny_gguf(tmp_path / "f.gguf", metadata=changes)
    _, config = converted(tmp_path / "f.gguf", tmp_path / "model")

    def pair_of(rotations: float) -> float:
        return 16 * np.log(64 / (rotations * 2 * np.pi)) / (2 * np.log(5000.0))

    low, high = max(0, np.floor(pair_of(32))), min(15, np.ceil(pair_of(1)))
    keep = 1 - np.clip((np.arange(8) - low) / max(0.001, high - low), 0, 1)
    plain = 5000.0 ** (-np.arange(8) / 8)
    scale = 1 + 0.1 * np.log(4.0)
    expected = rotated_by_hand(plain / 4 * (1 - keep) + plain * keep) * scale
    np.testing.assert_allclose(rotated(config), expected, atol=2e-5)


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general__architecture": "gemma3"}, "architecture 'gemma3'"),
        ({"general__architecture": None}, "architecture None"),
        ({"llama__embedding_length": None}, "llama.embedding_length is missing"),
        ({"llama__embedding_length": 0}, "embedding_length is 0"),
        ({"llama__embedding_length": "64"}, "embedding_length is '64'"),
        ({"llama__block_count": 3}, "tensors are missing, the first is 'model.layers.2"),
        ({"llama__block_count": 1}, "no place in a llama model of 1 layers"),
        ({"llama__block_count": 2**31}, "block_count is 2147483648"),
        ({"llama__feed_forward_length": 128}, r"shape \(96, 64\), expected \(128, 64\)"),
        ({"llama__attention__head_count_kv": 3}, "do not fit"),
        ({"llama__attention__head_count_kv": [2, 4]}, "differs from layer to layer"),
        ({"llama__expert_count": 8}, "llama.expert_count is 8"),
        ({"llama__attention__sliding_window": 128}, "sliding_window"),
        ({"llama__attention__scale": 0.5}, "llama.attention.scale is not known"),
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'"),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": -1.0}, "positive number"),
    ],
)
def test_settings_that_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    tiny_gguf(tmp_path / "f.gguf", metadata=changes)
    with pytest.raises(CheckpointError, match=reason):
        convert_gguf(tmp_path / "f.gguf", tmp_path)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_a_k_quant_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    tensors, _ = tiny_tensors(np.random.default_rng(0))
    rows = {"Q4_K": 144, "Q6_K": 210}[kind]
    tensors["blk.0.ffn_down.weight"] = (kind, (96, 256), bytes(96 * rows))
    write_gguf(tmp_path / "f.gguf", tiny_metadata(), tensors)
    with pytest.raises(CheckpointError, match=rf"'blk\.0\.ffn_down\.weight' is stored as {kind}"):
        convert_gguf(tmp_path / "f.gguf", tmp_path)


HOSTILE = ["x", "", 0, 2**32 - 1, 1.5, float("inf"), float("nan"), -1.0, [1, 2], ["a", "b"], True]


@pytest.mark.parametrize("key", [key for key in tiny_metadata() if key != "tokenizer.chat_template"])
def test_a_value_of_the_wrong_kind_never_crashes(tmp_path: Path, key: str) -> None:
    tensors, _ = tiny_tensors(np.random.default_rng(0))
    refusals = []
    for item in HOSTILE:
        write_gguf(tmp_path / "f.gguf", {**tiny_metadata(), key: item}, tensors)
        try:
            convert_gguf(tmp_path / "f.gguf", tmp_path)
        except CheckpointError as error:
            refusals.append(str(error))
    assert not any("\n" in message for message in refusals)
    assert refusals or key in ("tokenizer.ggml.add_bos_token", "llama.vocab_size")


def test_an_embedding_with_fewer_rows_than_tokens_is_refused(tmp_path: Path) -> None:
    changes = {"tokenizer__ggml__tokens": [*TOKENS, "more"], "tokenizer__ggml__token_type": [1] * (len(TOKENS) + 1)}
    tiny_gguf(tmp_path / "f.gguf", metadata=changes)
    with pytest.raises(CheckpointError, match="the embedding only"):
        convert_gguf(tmp_path / "f.gguf", tmp_path)


# -- tokenizer and companions -----------------------------------------------------------------------------------------


def test_tokenizer_of_the_converted_folder(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "f.gguf")
    converted(tmp_path / "f.gguf", tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    ids = {token: index for index, token in enumerate(TOKENS)}
    # Merges in their order; digits stay single although "12" is a merge; <tool> and <|im_end|> are found whole.
    assert tokenizer.encode("hello w12<tool><|im_end|>", add_special_tokens=False) == [
        *(ids[token] for token in ("hello", "Ġw", "1", "2", "<tool>", "<|im_end|>"))
    ]
    text = "Zoë: 日本 \t\n 😀 <|im_start|>x"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.eos_token_ids == {2}
    assert (tokenizer.bos_token, tokenizer.pad_token_id, tokenizer.unk_token) == ("<|im_start|>", 2, "<|endoftext|>")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<|im_start|>hello<|im_end|>"


def test_bos_is_added_only_where_the_file_says_so(tmp_path: Path) -> None:
    for flag in (True, False):
        tiny_gguf(tmp_path / "f.gguf", metadata={"tokenizer__ggml__add_bos_token": flag})
        converted(tmp_path / "f.gguf", tmp_path / f"model-{flag}")
        tokenizer = load_tokenizer(tmp_path / f"model-{flag}")
        assert tokenizer.encode("hello")[: int(flag)] == [1] * flag
        assert len(tokenizer.encode("hello")) == 1 + flag


def test_several_end_tokens(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "f.gguf", metadata={"tokenizer__ggml__eot_token_id": 0})
    converted(tmp_path / "f.gguf", tmp_path / "model")
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_a_file_without_template_gets_none(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "f.gguf", metadata={"tokenizer__chat_template": None})
    converted(tmp_path / "f.gguf", tmp_path / "model")
    assert not (tmp_path / "model" / "chat_template.jinja").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer__ggml__model": "llama"}, "of kind 'llama'"),
        ({"tokenizer__ggml__pre": "deepseek-coder"}, "rule 'deepseek-coder'"),
        ({"tokenizer__ggml__pre": None}, "rule None"),
        ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer__ggml__tokens": [*TOKENS[:-1], "hello"]}, "'hello' twice"),
        ({"tokenizer__ggml__merges": [*MERGES, "q q"]}, "merge 'q q'"),
        ({"tokenizer__ggml__merges": [*MERGES, "hello"]}, "merge 'hello'"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "found 2"),
        ({"tokenizer__ggml__eos_token_id": len(TOKENS)}, "eos_token_id"),
        ({"tokenizer__ggml__eos_token_id": None}, "never end"),
    ],
)
def test_tokenizers_that_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    tiny_gguf(tmp_path / "f.gguf", metadata=changes)
    with pytest.raises(CheckpointError, match=reason):
        convert_gguf(tmp_path / "f.gguf", tmp_path)
