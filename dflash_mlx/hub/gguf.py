"""llama-architecture GGUF files -> MLX checkpoint folders that mlx_lm loads as they are.

Weights keep the precision of the file: quantized tensors stay quantized with the same codes, scales and offsets.
What would change the model's computation and is not understood is refused by name, never skipped.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.gguf_config import LlamaShape, llama_config
from dflash_mlx.hub.gguf_file import GGUFFile
from dflash_mlx.hub.gguf_tensors import GROUP, Dense, Packed, read_tensor
from dflash_mlx.hub.gguf_tokenizer import write_tokenizer

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
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
# Handled by llama_config, which turns them into rope settings.
_NOT_WEIGHTS = {"rope_freqs.weight"}

Tensors = dict[str, Dense | Packed]


def convert_gguf(source: Path, folder: Path) -> None:
    """Write the model in the GGUF file `source` to the existing, empty `folder`.

    Files: config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json and, where the
    file has a template, chat_template.jinja. On failure the folder is left half-filled: give a temporary one.
    Raises CheckpointError for a damaged file and for what is not supported.
    """
    with GGUFFile(source) as file:
        config, shape = llama_config(file)
        tensors = _weights(file, shape)
        ids = write_tokenizer(file.metadata, folder, source=source)
    tokens = len(file.metadata["tokenizer.ggml.tokens"])
    if tokens > shape.vocab_size:
        raise CheckpointError(
            f"{source}: the vocabulary has {tokens:,} tokens, but the embedding only {shape.vocab_size:,} rows."
        )
    config.update(ids, dtype=_dtype(tensors["model.embed_tokens.weight"]))
    quantization = _quantization(tensors)
    if quantization:
        config["quantization"] = quantization
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    _save(tensors, folder / "model.safetensors")


def _weights(file: GGUFFile, shape: LlamaShape) -> Tensors:
    """Every tensor of the model by its Hugging Face name, shapes checked."""
    expected = shape.tensors()
    tensors: Tensors = {}
    for name, info in file.tensors.items():
        if name in _NOT_WEIGHTS:
            continue
        ours = _our_name(name)
        if ours not in expected:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} has no place in a llama model of {shape.layers} layers; "
                "the file is of a kind that is not supported."
            )
        tensor = read_tensor(file, info)
        if info.shape != expected[ours]:
            raise CheckpointError(f"{file.path}: tensor {name!r} has shape {info.shape}, expected {expected[ours]}.")
        if ours.endswith(".bias") and isinstance(tensor, Packed):
            raise CheckpointError(f"{file.path}: tensor {name!r} is a quantized bias, which MLX cannot hold.")
        tensors[ours] = shape.split_rotary_halves(ours, tensor)
    _fill_biases(tensors, expected, file)
    return tensors


def _our_name(name: str) -> str | None:
    layer = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)", name)
    if layer:
        place = _IN_LAYER.get(layer[2])
        return f"model.layers.{layer[1]}.{place}.{layer[3]}" if place else None
    place = _TOP.get(name.removesuffix(".weight"))
    return f"{place}.weight" if place and name.endswith(".weight") else None


def _fill_biases(tensors: Tensors, expected: dict[str, tuple[int, ...]], file: GGUFFile) -> None:
    """Check that nothing is missing. A bias that only some of the projections have is zero in the others."""
    missing = [name for name in expected if name not in tensors]
    weights = [name for name in missing if not name.endswith(".bias")]
    if weights:
        raise CheckpointError(f"{file.path}: {len(weights)} tensors are missing, the first is {weights[0]!r}.")
    for name in missing:
        tensors[name] = Dense(np.zeros(expected[name], dtype=np.float32), "float32")


def _dtype(tensor: Dense | Packed) -> str:
    return "float16" if isinstance(tensor, Packed) else tensor.dtype


def _quantization(tensors: Tensors) -> dict[str, Any]:
    """The `quantization` map of config.json: the bits of most tensors, then by name those that differ."""
    bits = {name.removesuffix(".weight"): t.bits for name, t in tensors.items() if isinstance(t, Packed)}
    if not bits:
        return {}
    most = max(sorted(set(bits.values())), key=list(bits.values()).count)
    modes = {b: {"group_size": GROUP, "bits": b, "mode": "affine"} for b in bits.values()}
    return {**modes[most], **{name: modes[b] for name, b in bits.items() if b != most}}


def _save(tensors: Tensors, path: Path) -> None:
    import mlx.core as mx

    def array(values: np.ndarray, dtype: str) -> mx.array:
        # Bit patterns are handed over as they are: NumPy has no bfloat16.
        found = mx.array(values)
        return found.view(mx.bfloat16) if dtype == "bfloat16" else found

    arrays: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Dense):
            arrays[name] = array(tensor.values, tensor.dtype)
            continue
        stem = name.removesuffix(".weight")
        arrays[name] = mx.array(tensor.weight)
        arrays[f"{stem}.scales"] = mx.array(tensor.scales)
        arrays[f"{stem}.biases"] = mx.array(tensor.biases)
    mx.save_safetensors(str(path), arrays, metadata={"format": "mlx"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
