"""Medusa heads (arXiv 2401.10774, section 2.1): small networks over the target's last hidden state, one for each place.

The hidden state (after the final norm) of the position before the anchor gave the anchor; head 0 guesses from it the
token after the anchor, head 1 the one after that. No head knows what another has guessed, so drafts may be a tree.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from dflash_mlx.caches.replay import replayed
from dflash_mlx.caches.rows import Rows
from dflash_mlx.drafters.checkpoint import Weights, filled, read_weights
from dflash_mlx.drafters.contract import Drafted, Writer, draft_each_place
from dflash_mlx.drafters.row_state import RowState
from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.folder import read_json
from dflash_mlx.targets.target import Target

_NAME = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(?:linear\.)?(weight|bias|scales|biases)$")


class MedusaHead(nn.Module):
    """Some residual blocks, and a vocabulary head."""

    def __init__(self, size: int, vocab_size: int, blocks: int) -> None:
        super().__init__()
        self.blocks = [nn.Linear(size, size) for _ in range(blocks)]
        self.lm_head = nn.Linear(size, vocab_size, bias=False)

    def __call__(self, hidden: mx.array) -> mx.array:
        """Hidden states (..., D) -> logits (..., V)."""
        for block in self.blocks:
            hidden = hidden + nn.silu(block(hidden))
        return self.lm_head(hidden)


class MedusaNetwork(nn.Module):
    def __init__(self, heads: int, size: int, vocab_size: int, blocks: int) -> None:
        super().__init__()
        self.heads = [MedusaHead(size, vocab_size, blocks) for _ in range(heads)]


class MedusaDrafter:
    """See `contract.Drafter`. Its caches keep the hidden state of each position, so that any beginning can be had."""

    method = "medusa"
    supports_trees = allows_rejection = True
    drafts_on_host = False

    def __init__(self, network: MedusaNetwork, *, target_layers: int) -> None:
        """target_layers: how many the target has; what comes after them is what the heads read."""
        self.network, self.taps = network, (target_layers,)
        [first, *_] = network.heads
        self.vocab_size, self.hidden_size = first.lm_head.weight.shape[0], first.blocks[0].bias.shape[0]

    @property
    def dtype(self) -> mx.Dtype:
        """What it computes in; hidden states of another type are cast."""
        return self.network.heads[0].blocks[0].bias.dtype

    @property
    def places(self) -> int:
        return len(self.network.heads)

    @property
    def networks(self) -> Sequence[nn.Module]:
        return [self.network]

    def misfits(self, target: Target) -> list[str]:
        found = []
        if self.hidden_size != target.hidden_size:
            found.append(f"its heads read hidden states of {self.hidden_size}, the target's have {target.hidden_size}")
        if self.vocab_size != target.vocab_size:
            found.append(f"it was made for a vocabulary of {self.vocab_size}, the target has {target.vocab_size}")
        return found

    def rehearsal(self) -> "MedusaDrafter":
        return self

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def read(self, target: Target, tokens: mx.array, features: mx.array | None, caches: list[Any]) -> None:
        assert features is not None
        caches[0].update_and_fetch(*self.noted(features))

    def noted(self, features: mx.array) -> tuple[mx.array, mx.array]:
        """Features (B, L, D) as a cache's keys, with values that nobody reads: (B, 1, L, D) and (B, 1, L, 1)."""
        return features.astype(self.dtype)[:, None], mx.zeros((features.shape[0], 1, features.shape[1], 1))

    def _filled(self, caches: list[Any]) -> list[Any]:
        """The same caches, with buffers also where nothing was ever written."""
        if caches[0].keys is None:
            caches[0].update_and_fetch(*self.noted(mx.zeros((1, 1, self.hidden_size))))
            caches[0].trim(1)
        return caches

    def open(self, target: Target, caches: list[Any], length: int) -> "MedusaState":
        return MedusaState(self, target, Rows.of(self._filled(caches), length))

    def blank(self, target: Target, rows: int, positions: int) -> "MedusaState":
        return MedusaState(self, target, Rows.blank(self._filled(self.make_cache()), rows, positions))


class MedusaState(RowState):
    """See `contract.DraftState`."""

    vocabulary = None

    def __init__(self, drafter: MedusaDrafter, target: Target, rows: Rows) -> None:
        super().__init__(rows)
        self.drafter, self._passes = drafter, target.passes_of(drafter, _Passes)

    def extend(self, tokens: mx.array, features: mx.array | None, at: mx.array, *, room: int, all_kept: bool) -> None:
        # What is rejected is written, too.
        self.rows.reserve(room + self.drafter.places)
        self.rows.lengths.value = at
        self._passes.note(self.rows, features)

    def settle(self, at: mx.array) -> None:
        """Nothing waits."""

    def propose(
        self, writers: Sequence[Writer], anchors: mx.array, at: mx.array, places: int, *, room: int, tree: bool = False
    ) -> Drafted:
        self.rows.lengths.value = at
        [logits] = self._passes.draft(self.rows, mx.arange(places))
        return draft_each_place(writers, logits, at + 1, None)


class _Passes:
    """What the heads compute over rows; replayed where the target's passes are."""

    def __init__(self, drafter: MedusaDrafter, target: Target) -> None:
        self.drafter = drafter
        self.note, self.draft = (replayed(body, on=target.replays) for body in (self._note, self._draft))

    def _note(self, rows: Rows, features: mx.array) -> list[mx.array]:
        rows.layers[0].update_and_fetch(*self.drafter.noted(features))
        return []

    def _draft(self, rows: Rows, places: mx.array) -> list[mx.array]:
        """Logits (B, W, V) of so many places after the anchors, which are at the rows' lengths."""
        before = mx.maximum(rows.lengths.value - 1, 0)[:, None, None]
        hidden = mx.take_along_axis(rows.layers[0].keys[:, 0], before, axis=1)
        return [mx.concatenate([head(hidden) for head in self.drafter.network.heads[: places.shape[0]]], axis=1)]


def is_medusa(raw: dict[str, Any]) -> bool:
    """Whether a config.json is that of Medusa heads."""
    return "medusa_num_heads" in raw or "medusa" in str(raw.get("model_type")).lower()


def load_medusa(folder: Path, target: Target, *, dtype: mx.Dtype) -> MedusaDrafter:
    """Read a folder with config.json and the heads' weights, safetensors or `medusa_lm_head.pt`, for a target.

    How many heads there are and of what shape is seen in the tensors: published configs say otherwise. `dtype` is the
    target's (see `checkpoint.filled`). Raises CheckpointError.
    """
    weights = _named(read_weights(folder), folder)
    try:
        heads, blocks = (
            1 + max(int(name.split(".")[part]) for name in weights if ".blocks." in name) for part in (1, 3)
        )
        vocab_size, size = weights["heads.0.lm_head.weight"].shape[0], weights["heads.0.blocks.0.bias"].shape[0]
        network = MedusaNetwork(heads, size, vocab_size, blocks)
    except (LookupError, ValueError) as error:
        raise CheckpointError(
            f"the weights in {folder} are not those of Medusa heads: {error}. Fetch the folder again."
        ) from error
    quantization = read_json(folder / "config.json").get("quantization")
    network = filled(network, weights, folder, quantization=quantization, dtype=dtype)
    return MedusaDrafter(network, target_layers=len(target.layers))


def _named(weights: Weights, folder: Path) -> Weights:
    """The tensors under the names of this package: a head's parts are counted, and the last one is its LM head."""
    matches = {name: _NAME.match(name) for name in weights}
    last = max((int(match[2]) for match in matches.values() if match), default=0)
    named: Weights = {}
    for name, match in matches.items():
        if match is None:
            raise CheckpointError(
                f"the weights in {folder} hold {name}, which is no part of a Medusa head; expected names like "
                "0.0.linear.weight. Checkpoints that hold their target, too, are not read: choose one with the heads "
                "alone, or run with --no-draft."
            )
        part = "lm_head" if int(match[2]) == last else f"blocks.{int(match[2])}"
        named[f"heads.{int(match[1])}.{part}.{match[3]}"] = weights[name]
    return named
