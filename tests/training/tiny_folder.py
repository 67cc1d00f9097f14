"""A complete tiny chat model on disk: config, weights, tokenizer and chat template."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tiny import FAMILIES, VOCAB, tiny_drafter, tiny_target
from tiny_families import family_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflash_mlx.targets.target import Target
from dflash_mlx.training import TrainOptions

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|spare|>"]
ROLES = ["system", "user", "assistant"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def write_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> None:
    """One token a character (or role name), `VOCAB` of them; None for a model without a chat template."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789. "
    words = SPECIALS + ROLES + ["one"] + list(letters)
    vocab = {word: i for i, word in enumerate(words[:VOCAB])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<|spare|>"))
    tokenizer.add_special_tokens(SPECIALS + ROLES)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "clean_up_tokenization_spaces": False,
        **({"chat_template": template} if template else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_target(
    folder: Path, *, family: str = "llama", seed: int = 0, orderly: bool = False, template: str | None = TEMPLATE
) -> Path:
    """A random float32 model with a tokenizer, loadable by mlx-lm; of `tiny_target`, or of `family_target`.

    orderly: a model with something to learn: a token is mostly followed by the same other one (see `make_orderly`).
    """
    folder.mkdir(parents=True)
    if family in FAMILIES:
        target = tiny_target(family, seed=seed, **({"tie_word_embeddings": False} if orderly else {}))
    else:
        target = family_target(family)
    if orderly:
        make_orderly(target)
    weights = dict(tree_flatten(target.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = {**target.config, "eos_token_id": 2, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, template=template)
    return folder


def make_orderly(target: Target) -> None:
    """Let the head prefer one successor for each token; the layers still change its mind now and then."""
    model = target.model
    order = np.random.default_rng(0).permutation(VOCAB)
    successors = np.empty(VOCAB, int)
    successors[order] = np.roll(order, -1)
    embedding = model.model.embed_tokens.weight
    head = mx.zeros_like(embedding)
    head[mx.array(successors)] = 2.0 * embedding
    model.lm_head.weight = head
    for layer in model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight = 0.06 * projection.weight
    mx.eval(model.parameters())


def short_run(model: Path, out: Path, **changes: Any) -> TrainOptions:
    """Options of a training from scratch that takes seconds, with `changes`."""
    return TrainOptions(
        model=str(model),
        out=out,
        data_tokens=6000,
        data_batch=64,
        max_length=48,
        max_user_tokens=8,
        greedy_share=0.5,
        layers=1,
        block_size=6,
        taps=(1, 3),
        batch_size=8,
        anchors=12,
        learning_rate=5e-3,
        holdout=0.15,
        **changes,
    )


def write_drafter(folder: Path) -> Path:
    """The random drafter of `tiny_drafter`, for the targets of `write_target`."""
    folder.mkdir(parents=True)
    drafter = tiny_drafter()
    config = drafter.config
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "vocab_size", "block_size", "num_target_layers")
    nested = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    fields = {name: getattr(config, name) for name in names}
    whole = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", **fields, "dflash_config": nested}
    (folder / "config.json").write_text(json.dumps({**whole, "rms_norm_eps": 1e-6, "rope_theta": config.rope_theta}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(drafter.parameters())), {"format": "pt"})
    return folder
