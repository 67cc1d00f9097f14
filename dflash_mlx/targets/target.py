"""The target: a model of mlx-lm, used as it is, and what a drafter needs of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from dflash_mlx.caches import target_caches, tree_rows
from dflash_mlx.caches.own import OwnCaches, copies
from dflash_mlx.caches.replay import Pass
from dflash_mlx.caches.rollback import choose_rollback
from dflash_mlx.caches.rows import Rows
from dflash_mlx.caches.target_caches import BatchCaches, SingleCaches
from dflash_mlx.caches.trimming import leaves
from dflash_mlx.errors import PairError
from dflash_mlx.ranks.mirror import Mirrored, mirrored
from dflash_mlx.targets.parts import EMBEDDINGS, FINAL_NORMS, HEADS, candidates, embedding_scale, head_rows
from dflash_mlx.targets.taps import tapped
from dflash_mlx.targets.whole_layers import Attempting, WholeLayers
from dflash_mlx.tree_steps import PLAIN, TreeSteps

P = TypeVar("P")


@dataclass
class Recorded:
    """What is computed in one way and may have been recorded to be replayed (`caches.replay`).

    passes: the target's, by the layers whose outputs are features; drafting: what drafters compute for the target, by
    the drafter's id.
    """

    passes: dict[tuple[int, ...], Pass] = field(default_factory=dict)
    drafting: dict[int, Any] = field(default_factory=dict)


@dataclass
class Target(Mirrored):
    """A loaded target model.

    `embed` maps token ids (1, L) to embeddings (1, L, D); `head` maps final hidden states (..., D) to logits
    (..., V). Both are the model's own and are shared with the drafter.
    """

    model: nn.Module
    config: dict[str, Any]
    layers: Sequence[nn.Module]
    embed: Callable[[mx.array], mx.array]
    head: Callable[[mx.array], mx.array]
    head_module: nn.Module
    final_norm: Callable[[mx.array], mx.array] | None
    _heads: dict[tuple[int, ...], Callable[[mx.array], mx.array]] = field(default_factory=dict)
    recorded: Recorded = field(default_factory=Recorded)
    replays: bool = False
    # Which kernels its layers use instead of MLX's operations, and how the steps of trees of drafts are computed.
    kernels: str = ""
    tree_steps: TreeSteps = PLAIN
    # Among how many it is divided (`division.divide`).
    machines: int = 1
    # Where each of them has whole layers: which ones this one has.
    whole_layers: WholeLayers | None = None
    _rows: bool | None = None
    _trees: bool | None = None

    def head_for(self, token_ids: Sequence[int]) -> Callable[[mx.array], mx.array]:
        """The head's rows for some tokens only: hidden states (..., D) -> logits (..., len(token_ids))."""
        key = tuple(token_ids)
        if key not in self._heads:
            self._heads[key] = head_rows(self.head_module, mx.array(key))
        return self._heads[key]

    # What happens to the model's caches. Where the model is on several machines, it happens on all of them.

    @mirrored
    def make_cache(self) -> OwnCaches:
        """Empty caches of one answer."""
        return self._own(make_prompt_cache(self.model))

    @mirrored
    def blank_cache(self) -> OwnCaches:
        """New caches that hold nothing, with buffers and states, whose shapes only running the model tells."""
        caches = self.make_cache()
        self.forward(mx.zeros((1, 1), dtype=mx.int32), caches)
        for leaf in leaves(caches):
            if isinstance(leaf, ArraysCache):
                states: list[Any] = leaf.cache
                states[:] = [mx.zeros_like(array) for array in states]
            else:
                leaf.offset = 0
        return caches

    @mirrored
    def copy_caches(self, caches: OwnCaches | BatchCaches, row: int, length: int) -> OwnCaches:
        """One answer's own caches, with a copy of the first `length` positions (see `caches.own.copies`)."""
        layers = caches.rows.layers if isinstance(caches, BatchCaches) else caches
        return self._own(copies(layers, row, length))

    @mirrored
    def alone(self, caches: OwnCaches) -> SingleCaches:
        """Caches of one answer for the decode loop."""
        return SingleCaches(caches)

    @mirrored
    def as_row(self, caches: OwnCaches, length: int) -> BatchCaches:
        """A batch of one row, to which what the caches hold, `length` positions, moves."""
        return BatchCaches(Rows.of(caches, length), self.layers, self.tree_steps)

    def blank_rows(self, rows: int, positions: int) -> BatchCaches:
        """A batch of this many rows that hold nothing, with room for some positions."""
        return self._rows_like(self.blank_caches, rows, positions)

    @mirrored
    def _rows_like(self, blank: OwnCaches, rows: int, positions: int) -> BatchCaches:
        return BatchCaches(Rows.blank(blank, rows, positions), self.layers, self.tree_steps)

    def _own(self, layers: list[Any]) -> OwnCaches:
        return OwnCaches(layers, choose_rollback(layers, self.layers, self.forward))

    @mirrored
    def read(self, tokens: mx.array, caches: OwnCaches, layer_ids: Sequence[int]) -> mx.array | None:
        """Feed the next tokens (1, L) of a prompt; returns features, if there are `layer_ids`. Logits are left out."""
        if layer_ids:
            return self.forward_tapped(tokens, caches, layer_ids)[1]
        self.forward(tokens, caches)
        return None

    @mirrored
    def forward(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """tokens (1, L) -> logits (1, L, V); appends the tokens to the cache."""
        return self.model(tokens, cache=cache)

    @mirrored
    def forward_tapped(self, tokens: mx.array, cache: list[Any], layer_ids: Sequence[int]) -> tuple[mx.array, mx.array]:
        """`forward`, and the features: tapped layer outputs concatenated, (1, L, taps * D).

        The number of layers itself stands for the hidden states after the final norm.
        """
        norm = [self.final_norm] if isinstance(self.final_norm, nn.Module) else []
        with tapped([*self.layers, *norm], layer_ids) as outputs:
            logits = self.model(tokens, cache=cache)
        if self.whole_layers is not None:
            self.whole_layers.complete(outputs)
        return logits, mx.concatenate([self._stream(outputs[i]) for i in layer_ids], axis=-1)

    def pass_for(self, layer_ids: Sequence[int]) -> Pass:
        """The model's pass in a batch: logits, and the features of these layers unless there are none."""
        key = tuple(layer_ids)
        passes = self.recorded.passes
        if key not in passes:
            passes[key] = self._make_pass(key)
        return passes[key]

    @mirrored
    def _make_pass(self, layer_ids: Sequence[int]) -> Pass:
        def run(tokens: mx.array, caches: list[Any]) -> tuple[mx.array, mx.array | None]:
            return self.forward_tapped(tokens, caches, layer_ids) if layer_ids else (self.forward(tokens, caches), None)

        return Pass(run, ropes=self.ropes, replays=self.replays, steps=self.tree_steps)

    @mirrored
    def _probe_rows(self) -> bool:
        return target_caches.works_with(self._attempted(), self.layers, self.vocab_size, self.make_cache)

    @mirrored
    def _probe_trees(self) -> bool:
        if self.kernels == "exact" and any(isinstance(leaf, ArraysCache) for leaf in leaves(self.blank_caches)):
            return False  # the rows of a tree go through recurrent layers together, and those of a chain one by one
        return target_caches.trees_work_with(self._attempted(), self.layers, self.vocab_size, self.make_cache)

    def _attempted(self) -> nn.Module:
        """The model, for passes that may fail."""
        return self.model if self.whole_layers is None else Attempting(self.model, self.whole_layers, self.embed)

    def drain(self) -> None:
        """Where the model is on several machines: wait until all of them have done everything that was launched."""
        if self.leader is not None:
            self._wait_for_all()

    @mirrored
    def _wait_for_all(self) -> None:
        mx.synchronize()
        mx.eval(mx.distributed.all_sum(mx.array(1)))

    # What is known of the model.

    @cached_property
    def blank_caches(self) -> OwnCaches:
        """Caches that hold nothing, to be copied from: their shapes are those that `blank_cache` gives."""
        return self.blank_cache()

    @cached_property
    def position_bytes(self) -> int:
        """Bytes that a token takes in the caches of attention."""
        held = [leaf for leaf in leaves(self.blank_caches) if not isinstance(leaf, ArraysCache)]
        return sum(array.nbytes // array.shape[2] for leaf in held for array in (leaf.keys, leaf.values))

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return weight_bytes(self.model)

    def takes_rows(self) -> bool:
        """Whether the model computes several answers in one batch; found out by running it, the first time."""
        if self._rows is None:
            self._rows = self._probe_rows()
        return self._rows

    def takes_trees(self) -> bool:
        """Whether the model takes a tree of drafts; found out by running it, the first time."""
        if self._trees is None:
            self._trees = self._probe_trees()
        return self._trees

    def assume(self, *, rows: bool, trees: bool) -> None:
        """Take as known what running this model has shown before, so that it is not run again to find out."""
        self._rows, self._trees = rows, trees

    @cached_property
    def ropes(self) -> list[nn.Module]:
        """The model's rotary embeddings."""
        return tree_rows.find_ropes(self.model)

    def passes_of(self, drafter: Any, make: "Callable[[Any, Target], P]") -> P:
        """What a drafter computes for this target, made the first time."""
        drafting = self.recorded.drafting
        if id(drafter) not in drafting:
            drafting[id(drafter)] = make(drafter, self)
        found: P = drafting[id(drafter)]
        return found

    def set_replays(self, on: bool, recorded: Recorded | None = None) -> None:
        """Let passes in a batch, and drafts for it, be replayed (`caches.replay`), or no longer.

        What was recorded is forgotten; so this is to be called, too, when the model's layers compute in another way.
        recorded: instead, what was recorded when all was computed in the way that it is now.
        """
        self.replays, self.recorded = on, recorded or Recorded()

    @property
    def ways(self) -> tuple[bool, str, int]:
        """How passes are computed, and on how many machines: what a round costs depends on these."""
        return self.replays, self.kernels, self.machines

    def _stream(self, output: mx.array) -> mx.array:
        """The residual stream (1, L, D) in a layer's output; gemma3n's carries several, (streams, 1, L, D)."""
        return output[int(self.text_config("altup_active_idx", 0))] if output.ndim == 4 else output

    def parameter_names(self) -> list[str]:
        return list(dict(tree_flatten(self.model.parameters())))

    def text_config(self, key: str, default: Any = None) -> Any:
        """A config value, looked up in `text_config` first as multimodal checkpoints nest it."""
        return (self.config.get("text_config") or {}).get(key, self.config.get(key, default))

    @property
    def vocab_size(self) -> int:
        return int(self.text_config("vocab_size"))

    @property
    def hidden_size(self) -> int:
        return int(self.text_config("hidden_size"))

    @property
    def head_dim(self) -> int | None:
        """Size of an attention head, or None where the config has names of its own for it."""
        heads = self.text_config("num_attention_heads")
        size = self.text_config("head_dim") or (self.hidden_size // heads if heads else None)
        return int(size) if size else None

    @property
    def context_length(self) -> int | None:
        """Positions the model was made for, or None where its config does not say."""
        value = self.text_config("max_position_embeddings")
        return int(value) if value else None


def wrap_model(model: nn.Module, config: dict[str, Any]) -> Target:
    """Find the parts of an mlx-lm model that a drafter shares. Raises PairError when there are none."""
    holders = candidates(model)
    found = next(((m, name) for m in holders for name in EMBEDDINGS if name in m), None)
    if found is None:
        raise PairError(
            f"cannot find the token embedding of {type(model).__module__}; a drafter needs to share it. "
            "Run this model with --no-draft."
        )
    inner, name = found
    embedding = inner[name]
    scale = embedding_scale(inner)
    heads = (m[name] for m in holders for name in HEADS if name in m)
    head = next((head for head in heads if isinstance(head, nn.Module)), None)
    norms = (inner[name] for name in FINAL_NORMS if name in inner)
    # gemma3n mixes its streams after the last layer, so no single one goes through the norm.
    final_norm = next(norms, None) if "altup_unembed_projections" not in inner else None
    return Target(
        model=model,
        config=config,
        layers=model.layers,
        embed=embedding if scale is None else lambda tokens: embedding(tokens) * scale,
        # Looked up at each call: a kernel may take the method's place (`kernels.quantized_rows`).
        head=head if head is not None else lambda hidden: embedding.as_linear(hidden),
        head_module=head if head is not None else embedding,
        final_norm=final_norm,
    )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters of a model."""
    return sum(array.nbytes for array in dict(tree_flatten(model.parameters())).values())
