"""The two forwards of a round over device caches, as functions of arrays alone, so that they can be compiled."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.targets.device_cache import DeviceCaches, DeviceKVCache
from dflash_mlx.targets.target import Target

Layers = list[DeviceKVCache]


@dataclass
class Forwards:
    """A pair's forwards. `compiled` ones are traced once for each shape: building a round then takes the host less
    time, which counts where the device is faster than the host.
    """

    target: Target
    drafter: DFlashDrafter
    compiled: bool = False
    _functions: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def verify(self, tokens: mx.array, caches: DeviceCaches) -> tuple[mx.array, mx.array]:
        """tokens (1, L) behind the caches' length -> logits (1, L, V) and features (1, L, taps * D)."""
        return self._run("verify", self._verify, caches, tokens)

    def draft(
        self, features: mx.array, block: mx.array, end: mx.array, caches: DeviceCaches
    ) -> tuple[mx.array, mx.array]:
        """Write `features` (1, L, taps * D) behind the caches' length, then draft behind position `end`, ().

        block: (W + 1,), the anchor and masks. Returns logits (W, V), or (W, n) for the n tokens that may be drafted,
        and hidden states (W, D).
        """
        return self._run("draft", self._draft, caches, features, block, end)

    def draft_logits(self, hidden: mx.array) -> mx.array:
        """The drafter's logits for its hidden states, (W, D) -> (W, V), or (W, n) for the n tokens it may draft."""
        config = self.drafter.config
        head = self.target.head_for(config.draft_token_ids) if config.draft_token_ids else self.target.head
        if config.own_head:
            head = self.drafter.lm_head
        return self.drafter.adjust_logits(head(hidden))

    def _verify(self, layers: Layers, tokens: mx.array) -> tuple[mx.array, mx.array]:
        return self.target.forward_tapped(tokens, layers, self.drafter.config.target_layer_ids)

    def _draft(self, layers: Layers, features: mx.array, block: mx.array, end: mx.array) -> tuple[mx.array, mx.array]:
        self.drafter.extend_context(features, layers)
        embedded = self.drafter.embed_block(block[None], self.target.embed)
        hidden = self.drafter(embedded, layers, context_length=end)[0, 1:]
        return self.draft_logits(hidden), hidden

    def _run(self, name: str, run: Callable[..., Any], caches: DeviceCaches, *inputs: mx.array) -> Any:
        if not self.compiled:
            return run(caches.layers, *inputs)
        if name not in self._functions:
            self._functions[name] = _compile(run)
        layers = caches.layers
        outputs, keys, values = self._functions[name](
            caches.length.value, [layer.keys for layer in layers], [layer.values for layer in layers], *inputs
        )
        for layer, new_keys, new_values in zip(layers, keys, values, strict=True):
            layer.keys, layer.values = new_keys, new_values
        return outputs


def _compile(run: Callable[..., Any]) -> Callable[..., Any]:
    def traced(start: mx.array, keys: list[mx.array], values: list[mx.array], *inputs: mx.array) -> Any:
        layers = DeviceCaches.of_arrays(start, keys, values).layers
        outputs = run(layers, *inputs)
        return outputs, [layer.keys for layer in layers], [layer.values for layer in layers]

    compiled: Callable[..., Any] = mx.compile(traced)
    return compiled
