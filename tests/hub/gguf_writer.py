"""A minimal GGUF version 3 writer, and closed forms of the block types, both written from the format's description."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}


def text(value: str) -> bytes:
    data = value.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Type number and value. Python ints become uint32, floats float32; lists of str or int become arrays."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if isinstance(item[0], str):
        return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(text(part) for part in item)
    return struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]],  # name -> type, shape (outermost first), data
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    entries = b"".join(text(key) + value(item) for key, item in metadata.items())
    directory, data = b"", b""
    for name, (kind, shape, raw) in tensors.items():
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        directory += text(name) + sizes + struct.pack("<IQ", TYPES[kind], len(data))
        data += raw + bytes(-len(raw) % alignment)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + entries + directory
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def random_tensor(
    rng: np.random.Generator, kind: str, shape: tuple[int, ...]
) -> tuple[tuple[str, tuple[int, ...], bytes], np.ndarray]:
    """A random tensor of a type: what `write_gguf` takes, and its values in float32."""
    if kind in BLOCK_BYTES:
        blocks = [random_block(rng, kind) for _ in range(int(np.prod(shape)) // 32)]
        raw = b"".join(block for block, _ in blocks)
        return (kind, shape, raw), np.array([values for _, values in blocks], dtype=np.float32).reshape(shape)
    values = rng.normal(size=shape).astype(np.float32)
    if kind == "F16":
        values = values.astype(np.float16).astype(np.float32)
        return (kind, shape, values.astype("<f2").tobytes()), values
    if kind == "BF16":
        patterns = (values.view(np.uint32) >> 16).astype("<u2")
        return (kind, shape, patterns.tobytes()), (patterns.astype(np.uint32) << 16).view(np.float32)
    return (kind, shape, values.astype("<f4").tobytes()), values


def random_block(rng: np.random.Generator, kind: str) -> tuple[bytes, list[float]]:
    """One block of 32 values, written value by value from the description in ggml-common.h."""
    scale = float(np.float16(rng.normal() * 0.05))
    low = float(np.float16(rng.normal() * 0.1))
    if kind == "Q8_0":
        codes = [int(c) for c in rng.integers(-128, 128, 32)]
        return struct.pack("<e32b", scale, *codes), [single(scale * c) for c in codes]
    bits = int(kind[1])
    codes = [int(c) for c in rng.integers(0, 1 << bits, 32)]
    nibbles = bytes((codes[j] & 15) | (codes[j + 16] & 15) << 4 for j in range(16))
    fifth = struct.pack("<I", sum((codes[j] >> 4) << j for j in range(32))) if bits == 5 else b""
    if kind.endswith("_0"):
        middle = 1 << (bits - 1)
        return struct.pack("<e", scale) + fifth + nibbles, [single(scale * (c - middle)) for c in codes]
    return struct.pack("<ee", scale, low) + fifth + nibbles, [single(scale * c + low) for c in codes]


def single(number: float) -> float:
    """Rounded once to float32: products and sums of float16 and small integers are exact in Python's float64."""
    return float(np.float32(number))


# -- a tiny llama ---------------------------------------------------------------------------------------------------

BYTES = [chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]] + [chr(256 + n) for n in range(68)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES), "<tool>"]


def tiny_metadata(**changes: Any) -> dict[str, Any]:
    """Metadata of a 2-layer llama with 4 heads of 16, 2 key heads. A change to None removes the key."""
    types = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 256,
        "llama.rope.freq_base": 5000.0,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": len(TOKENS),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}",
    }
    metadata.update({key.replace("__", "."): item for key, item in changes.items()})
    return {key: item for key, item in metadata.items() if item is not None}


def tiny_tensors(
    rng: np.random.Generator,
    *,
    matrix: str = "Q4_1",
    embedding: str = "Q8_0",
    tied: bool = True,
    biases: tuple[str, ...] = (),
) -> tuple[dict[str, tuple[str, tuple[int, ...], bytes]], dict[str, np.ndarray]]:
    """The tensors of that llama, and their values. `biases` names projections that have one."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"token_embd.weight": (embedding, (len(TOKENS), 64))}
    for layer in range(2):
        stem = f"blk.{layer}"
        for name, shape in {
            "attn_q": (64, 64),
            "attn_k": (32, 64),
            "attn_v": (32, 64),
            "attn_output": (64, 64),
            "ffn_gate": (96, 64),
            "ffn_up": (96, 64),
            "ffn_down": (64, 96),
        }.items():
            shapes[f"{stem}.{name}.weight"] = (matrix, shape)
            if name in biases:
                shapes[f"{stem}.{name}.bias"] = ("F32", shape[:1])
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"{stem}.{name}.weight"] = ("F32", (64,))
    shapes["output_norm.weight"] = ("F32", (64,))
    if not tied:
        shapes["output.weight"] = (embedding, (len(TOKENS), 64))
    made = {name: random_tensor(rng, kind, shape) for name, (kind, shape) in shapes.items()}
    return {name: item[0] for name, item in made.items()}, {name: item[1] for name, item in made.items()}


def tiny_gguf(
    path: Path, *, seed: int = 0, metadata: dict[str, Any] | None = None, **options: Any
) -> dict[str, np.ndarray]:
    """Write the tiny llama to `path`; the values of its tensors."""
    tensors, values = tiny_tensors(np.random.default_rng(seed), **options)
    write_gguf(path, tiny_metadata(**(metadata or {})), tensors)
    return values
