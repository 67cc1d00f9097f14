"""Make drafters of other kinds for a small target, so that every way of drafting can be compared on it.

    dflash-mlx pull demo --json                                        # says where the demo target is
    .venv/bin/python scripts/stand_ins.py TARGET stand-ins --answers 256 --steps 60

TARGET is the folder of a model of Llama's kind. Three folders are written, each in its public layout:

- `half`: a copy of the target with every second layer left out, for `draft_model`;
- `eagle3`: an EAGLE-3 drafter, in its authors' layout;
- `medusa`: four Medusa heads.

They learn from the target's own answers for so many steps each, which takes a minute on a GPU and many on a CPU. That
shows what each kind can do, not what good ones would do. With `--steps 0` they have learnt nothing: then only the time
of their rounds says something.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dflash_mlx  # noqa: F401  # before mlx, which it sets up

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model, load_tokenizer

from dflash_mlx.drafters.eagle3 import Eagle3Drafter, Eagle3Network
from dflash_mlx.drafters.eagle3_checkpoint import default_layers, parse_eagle3_config
from dflash_mlx.drafters.medusa import MedusaNetwork
from dflash_mlx.errors import DFlashError
from dflash_mlx.hub.new_folder import write_new_folder
from dflash_mlx.targets.loading import expand
from dflash_mlx.targets.target import Target, wrap_model
from dflash_mlx.training.store import Conversation
from dflash_mlx.training.template import chat_frame
from dflash_mlx.training.writer import Limits, Plan, write_batch

LENGTH, USER_TOKENS = 192, 48
HEADS, DRAFTED_TOKENS = 4, 8192
# Places that EAGLE-3 learns to draft from what it computed itself.
UNROLLED = 3
RATE = 1e-3

# Of tokens (B, LENGTH), and of which of them the target answered.
Loss = Callable[[mx.array, mx.array], mx.array]
Learn = Callable[[nn.Module, Loss], None]
Weights = dict[str, mx.array]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the target's folder")
    parser.add_argument("out", type=Path, help="a folder for the three drafters")
    parser.add_argument("--answers", type=int, default=256, help="answers to learn from (default: 256)")
    parser.add_argument("--steps", type=int, default=60, help="steps that each drafter learns (default: 60)")
    parser.add_argument("--batch-size", type=int, default=8, help="answers in a step (default: 8)")
    options = parser.parse_args()
    try:
        make_stand_ins(
            options.target, options.out, answers=options.answers, steps=options.steps, batch_size=options.batch_size
        )
    except DFlashError as error:
        parser.error(str(error))


def make_stand_ins(folder: Path, out: Path, *, answers: int, steps: int, batch_size: int) -> None:
    """Write the three drafters for the target in `folder`. Raises UsageError where one of them is there already."""
    mx.random.seed(0)
    target = load(folder)
    texts = own_answers(target, folder, answers) if steps else []

    def learn(network: nn.Module, loss: Loss) -> None:
        train(network, loss, batches(texts, steps, batch_size))

    write_new_folder(out / "half", lambda work: make_half(work, folder, learn))
    write_new_folder(out / "eagle3", lambda work: make_eagle3(work, target, texts, learn))
    write_new_folder(out / "medusa", lambda work: make_medusa(work, target, learn))


def load(folder: Path) -> Target:
    """The target in float32, in which gradients are computed."""
    model, config = load_model(folder, lazy=True)
    return wrap_model(expand(model, mx.float32), config)


def own_answers(target: Target, folder: Path, count: int) -> list[Conversation]:
    """Conversations in the target's own words: it invents the question, too. Half of the answers are greedy."""
    frame, limits = chat_frame(load_tokenizer(folder)), Limits(LENGTH, USER_TOKENS, turns=1)
    rows, found = min(count, 1024 if mx.default_device() == mx.gpu else 32), []
    for seed in range(-(-count // rows)):
        plan = Plan([list(frame.prefix)] * rows, user_follows=True, temperatures=np.arange(rows) % 2 * 0.8)
        found += write_batch(target, frame, plan, limits, seed=seed)
        print(f"{len(found)} answers", flush=True)
    return found


def batches(texts: list[Conversation], steps: int, size: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Tokens (B, LENGTH), and which of them the target answered."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        tokens, answered = np.zeros((size, LENGTH), np.int32), np.zeros((size, LENGTH), np.float32)
        for row, index in enumerate(rng.integers(0, len(texts), size)):
            text = texts[index]
            tokens[row, : len(text.tokens)] = text.tokens
            for start, end in text.spans:
                answered[row, start:end] = 1
        yield mx.array(tokens), mx.array(answered)


def train(network: nn.Module, loss: Loss, steps: Iterator[tuple[mx.array, mx.array]]) -> None:
    gradients, optimizer = nn.value_and_grad(network, loss), optim.AdamW(RATE)
    for number, (tokens, answered) in enumerate(steps, 1):
        value, gradient = gradients(tokens, answered)
        optimizer.update(network, optim.clip_grad_norm(gradient, 1.0)[0])
        mx.eval(network.parameters(), optimizer.state)
        if number % 20 == 0:
            print(f"{type(network).__name__}: step {number}, loss {value.item():.3f}", flush=True)


def mean_loss(logits: mx.array, labels: mx.array, weights: mx.array) -> mx.array:
    """Cross-entropy of logits (B, L, n) for labels (B, L), averaged with weights (B, L)."""
    losses = nn.losses.cross_entropy(logits.astype(mx.float32), labels)
    return (losses * weights).sum() / mx.maximum(weights.sum(), 1)


def make_half(work: Path, folder: Path, learn: Learn) -> None:
    """A model that draft_model takes: it has the target's tokenizer, too."""
    half = load(folder)
    model: Any = half.model
    model.model.layers = model.model.layers[::2]

    def loss(tokens: mx.array, answered: mx.array) -> mx.array:
        return mean_loss(model(tokens[:, :-1]), tokens[:, 1:], answered[:, 1:])

    learn(model, loss)
    config = unquantized(half.config) | {"num_hidden_layers": len(model.model.layers)}
    save(work, config, dict(tree_flatten(model.parameters())))
    for file in folder.glob("*token*"):
        shutil.copy(file, work)


def make_eagle3(work: Path, target: Target, texts: list[Conversation], learn: Learn) -> None:
    """It drafts the tokens that the answers hold most often."""
    said = np.concatenate([np.zeros(0, np.int64), *(text.tokens for text in texts)])
    ids = np.sort(np.argsort(-np.bincount(said, minlength=target.vocab_size), kind="stable")[:DRAFTED_TOKENS])
    raw = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": len(ids)}
    raw = unquantized(target.config) | raw
    taps = default_layers(len(target.layers))
    config = replace(parse_eagle3_config(raw), target_layer_ids=taps, draft_token_ids=tuple(ids.tolist()))
    network = Eagle3Network(config)
    network.lm_head.weight = head_weight(target)[mx.array(ids)]
    drafter = Eagle3Drafter(config, network)
    numbers = np.full(target.vocab_size, -1)
    numbers[ids] = np.arange(len(ids))
    number_of = mx.array(numbers)

    def loss(tokens: mx.array, answered: mx.array) -> mx.array:
        """After each token: what comes next, by the target's features at first and then by what it computed itself."""
        hidden, total = drafter.project(features_of(target, tokens, taps))[:, :-1], mx.array(0.0)
        for place in range(UNROLLED):
            read, labels = tokens[:, 1 + place : -1], number_of[tokens[:, 2 + place :]]
            hidden = drafter.feed(target, read, hidden[:, : read.shape[1]], [KVCache()])
            weights = answered[:, 2 + place :] * (labels >= 0)
            total = total + mean_loss(drafter.logits(target, hidden), mx.maximum(labels, 0), weights)
        return total / UNROLLED

    learn(network, loss)
    weights = dict(tree_flatten(network.parameters()))
    drafted = mx.array(np.isin(np.arange(target.vocab_size), ids))
    save(work, raw, weights, extra={"d2t": mx.array(ids - np.arange(len(ids))), "t2d": drafted})


def make_medusa(work: Path, target: Target, learn: Learn) -> None:
    """Heads that begin as the target's own, of which the blocks learn."""
    network = MedusaNetwork(HEADS, target.hidden_size, target.vocab_size, blocks=1)
    for head in network.heads:
        [block] = head.blocks
        block.weight, block.bias = mx.zeros_like(block.weight), mx.zeros_like(block.bias)
        head.lm_head.weight = head_weight(target)
        head.lm_head.freeze()

    def loss(tokens: mx.array, answered: mx.array) -> mx.array:
        hidden, total = features_of(target, tokens, (len(target.layers),)), mx.array(0.0)
        for place, head in enumerate(network.heads):
            labels, weights = tokens[:, 2 + place :], answered[:, 2 + place :]
            total = total + mean_loss(head(hidden[:, : labels.shape[1]]), labels, weights)
        return total / HEADS

    learn(network, loss)
    weights: Weights = {}
    for i, head in enumerate(network.heads):
        [block] = head.blocks
        weights |= {f"{i}.0.linear.weight": block.weight, f"{i}.0.linear.bias": block.bias}
        weights[f"{i}.1.weight"] = head.lm_head.weight
    save(work, {"medusa_num_heads": HEADS, "medusa_num_layers": 1}, weights)


def features_of(target: Target, tokens: mx.array, taps: tuple[int, ...]) -> mx.array:
    """Features (B, L, taps * D) of tokens (B, L)."""
    return mx.stop_gradient(target.forward_tapped(tokens, target.make_cache(), taps)[1])


def head_weight(target: Target) -> mx.array:
    """The rows of the target's head, (V, D)."""
    weight: mx.array = target.head_module.weight
    return weight


def unquantized(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if not key.startswith("quantization")}


def save(work: Path, config: dict[str, Any], weights: Weights, *, extra: Weights | None = None) -> None:
    """config.json, and the weights in bfloat16; extra: tensors that keep their type."""
    tensors = {name: array.astype(mx.bfloat16) for name, array in weights.items()} | (extra or {})
    mx.save_safetensors(str(work / "model.safetensors"), tensors, {"format": "mlx"})
    (work / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()
