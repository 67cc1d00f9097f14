"""A complete tiny chat model on disk: config, weights, tokenizer and chat template."""

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from tiny import VOCAB, tiny_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|spare|>"]
ROLES = ["system", "user", "assistant"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """One token a character (or role name), `VOCAB` of them; the chat template uses no system turn."""
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
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_target(folder: Path, *, family: str = "llama", seed: int = 0) -> Path:
    """A random float32 model of `tiny.tiny_target` with a tokenizer, loadable by mlx-lm."""
    folder.mkdir(parents=True)
    target = tiny_target(family, seed=seed)
    weights = dict(tree_flatten(target.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = {**target.config, "eos_token_id": 2, "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder
