"""Multi-token prediction: a head of the target's own that was trained to see one token further, as drafter.

Qwen3-Next and GLM-4.5 bring one, and so do their successors: a layer like their own with full attention over the
embedding of a token and the target's last hidden state (after the final norm) of the position before (DeepSeek-V3,
arXiv 2412.19437, section 2.2). While it drafts, what it computed at a place stands for that place's hidden state.
mlx-lm leaves its tensors out; here they are read beside the target.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from dflash_mlx.caches.trimming import leaves
from dflash_mlx.drafters.checkpoint import Weights, filled
from dflash_mlx.drafters.contract import DraftVocabulary
from dflash_mlx.drafters.stepwise import StepwiseDrafter
from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.folder import read_json
from dflash_mlx.hub.own_head import HEAD_FAMILIES, NAMED, further_layers, name_in_head
from dflash_mlx.targets.target import Target

# It was trained to see one token further, and what it says gets worse with each of its own.
PLACES, MOST_PLACES = 3, 15
_EXPERT = re.compile(r"(.+\.mlp)\.experts\.(\d+)\.(\w+_proj)\.weight$")


class MTPNetwork(nn.Module):
    """The weights, under the names of the checkpoints without "mtp."."""

    def __init__(self, size: int, eps: float, layer: nn.Module, *, norms_between: bool) -> None:
        """norms_between: what stands for the next place's hidden state goes through the last norm, too."""
        super().__init__()
        self.norms_between = norms_between
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(size, eps=eps)

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        """Embeddings of tokens and the hidden states before them, both (B, L, D) -> hidden states (B, L, D).

        caches: the layer's; one, or where attention chooses what it sees (DeepSeek-V3.2, GLM-5), that choice's, too.
        """
        parts = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        h = self.fc(mx.concatenate(parts, axis=-1))
        mask = create_attention_mask(h, caches[0], return_array=True)
        h = self.layers[0](h, mask=mask, cache=caches if len(caches) > 1 else caches[0])
        return self.norm(h) if self.norms_between else h


class MTPDrafter(StepwiseDrafter):
    """See `StepwiseDrafter`. What is said of a position is the layer's output, normed or not."""

    method = "mtp"

    def __init__(self, network: MTPNetwork, target: Target, *, places: int = PLACES) -> None:
        super().__init__(network, places=places)
        self.network = network
        self._layers = len(target.layers)
        # As many as a layer of the target's has.
        self._caches = len(leaves(target.make_cache()[-1:]))
        self._target_dtype = target.embed(mx.zeros((1, 1), dtype=mx.uint32)).dtype

    @property
    def dtype(self) -> mx.Dtype:
        """What it computes in; hidden states and embeddings of another type are cast."""
        return self.network.norm.weight.dtype

    @property
    def taps(self) -> Sequence[int]:
        return (self._layers,)

    def misfits(self, target: Target) -> list[str]:
        """None: it was made like the target's own layers, and its weights had the right shapes."""
        return []

    def vocabulary(self, target: Target) -> DraftVocabulary | None:
        return None

    def make_layer_caches(self) -> list[Any]:
        return [KVCache() for _ in range(self._caches)]

    def project(self, features: mx.array) -> mx.array:
        return features.astype(self.dtype)

    def feed(self, target: Target, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        return self.network(target.embed(tokens).astype(self.dtype), hidden, caches)

    def logits(self, target: Target, hidden: mx.array) -> mx.array:
        normed = hidden if self.network.norms_between else self.network.norm(hidden)
        return target.head(normed.astype(self._target_dtype))


def load_mtp(folder: Path, target: Target, *, dtype: mx.Dtype, places: int = PLACES) -> MTPDrafter:
    """Read a target's head out of a folder: the target's own, or one beside it with the tensors `mtp.*`.

    `dtype` is the target's; weights may be quantized by MLX (see `checkpoint.filled`). Raises CheckpointError.
    """
    family = family_of(target.model)
    if family not in HEAD_FAMILIES:
        raise CheckpointError(
            f"the target is of the family {family}; heads for multi-token prediction are read for "
            f"{', '.join(HEAD_FAMILIES)}. Choose another drafter, or run with --no-draft."
        )
    weights = read_head(folder, target.config)
    if not weights:
        raise CheckpointError(
            f"the safetensors files in {folder} have no tensors of such a head (mtp.*, or a layer after the target's "
            "last): conversions of models often leave them out. Name a folder that has them with --draft-model, choose "
            "another drafter, or run with --no-draft."
        )
    if further := further_layers(weights):
        raise CheckpointError(
            f"the head in {folder} has more than one layer (mtp.{further[0]}), for which there is no code. Choose "
            "another drafter, or run with --no-draft."
        )
    text: Any = getattr(target.model, "language_model", target.model)
    # Of its last layer: of a divided target, rank 0 has only the form of the first ones.
    kind: Any = type(target.layers[-1])
    # One is like the target's first layer with full attention, the other like its last layer.
    layer = kind(text.args, text.args.full_attention_interval - 1 if family in NAMED else text.args.num_hidden_layers)
    network = MTPNetwork(target.hidden_size, text.args.rms_norm_eps, layer, norms_between=family in NAMED)
    weights = as_layer(weights, target.model)
    quantization = read_json(folder / "config.json").get("quantization")
    return MTPDrafter(filled(network, weights, folder, quantization=quantization, dtype=dtype), target, places=places)


def read_head(folder: Path, config: dict[str, Any]) -> Weights:
    """The tensors of a head in a folder, named as in `mtp.*`, and with norms as MLX multiplies by them.

    config: the target's. Files published with `mtp.*` hold norms less 1. A file that MLX has written says so
    (`format`), and holds them whole.
    """
    weights: Weights = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            loaded: Any = mx.load(str(file), return_metadata=True)
            arrays, about = loaded
            whole = about.get("format") == "mlx"
            for key, array in arrays.items():
                if name := name_in_head(key, config):
                    less = "norm" in name and "mtp." in key and not whole
                    weights[name] = array + 1.0 if less else array
    except RuntimeError as error:
        raise CheckpointError(f"cannot read the weights in {folder}: {error}. Fetch the folder again.") from error
    return weights


def as_layer(weights: Weights, model: nn.Module) -> Weights:
    """A head's tensors in the form in which a layer of its target (a model of mlx-lm) holds them."""
    if family_of(model) in NAMED:
        return with_stacked_experts(weights)
    # mlx-lm's own reading of a checkpoint, for a model of one layer, puts attention, FP8 and experts into their form.
    # Before 0.32 it looked at that layer.
    text: Any = model
    layers = text.layers[-1:]
    args = replace(text.args, num_hidden_layers=1)
    alone = SimpleNamespace(args=args, layers=layers, model=SimpleNamespace(layers=layers))
    named = {f"model.{name}" if name.startswith("layers.") else name: array for name, array in weights.items()}
    return {name.removeprefix("model."): array for name, array in type(text).sanitize(alone, named).items()}


def family_of(model: nn.Module) -> str:
    """The model file of mlx-lm that a model is of."""
    return type(model).__module__.rpartition(".")[2]


def with_stacked_experts(weights: Weights) -> Weights:
    """Experts as mlx-lm's layers hold them, (experts, out, in): Qwen3.5 has each by itself, Qwen3.6 two in one."""
    stacked: Weights = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, array in weights.items():
        if found := _EXPERT.match(name):
            experts.setdefault(f"{found[1]}.switch_mlp.{found[3]}.weight", {})[int(found[2])] = array
        elif name.endswith(".experts.gate_up_proj"):
            layer = name.removesuffix(".experts.gate_up_proj")
            gate, up = mx.split(array, 2, axis=-2)
            stacked |= {f"{layer}.switch_mlp.gate_proj.weight": gate, f"{layer}.switch_mlp.up_proj.weight": up}
        elif name.endswith(".experts.down_proj"):
            stacked[f"{name.removesuffix('.experts.down_proj')}.switch_mlp.down_proj.weight"] = array
        else:
            stacked[name] = array
    return stacked | {name: mx.stack([own[i] for i in sorted(own)]) for name, own in experts.items()}
