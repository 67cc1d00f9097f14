"""Tiny random models for tests: real mlx-lm classes and real drafters, small enough to run in milliseconds."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache

from dflash_mlx.caches.row_layers import RowKVCache
from dflash_mlx.caches.rows import Rows
from dflash_mlx.decoding.accept import Greedy, Outcome, Reading
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.checkpoint import make_drafter
from dflash_mlx.drafters.config import DraftConfig, Rope
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.drafters.eagle3 import PLACES, Eagle3Config, Eagle3Drafter, Eagle3Network
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.targets.target import Target, wrap_model

VOCAB, HIDDEN, LAYERS = 48, 32, 4

_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 16},
}
SECOND: dict[str, Any] = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3}


def mostly_slow(values: Sequence[Any], *quick: Any) -> list[Any]:
    """Parameters of a test, or tuples of them; all but the quick ones are left to CI."""
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [
        pytest.param(*case, marks=() if value in quick else pytest.mark.slow)
        for case, value in zip(cases, values, strict=True)
    ]


def tiny_target(family: str, *, seed: int = 0, **changes: Any) -> Target:
    """A random float32 model of a family, from its real mlx-lm class; `changes` go into its config."""
    config = {"model_type": family, **_COMMON, **FAMILIES[family], **changes}
    module = import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    randomize(model, seed)
    return wrap_model(model, config)


def tiny_drafter(
    *, block_size: int = 8, seed: int = 1, taps: tuple[int, ...] = (0, 2), **changes: Any
) -> DFlashDrafter:
    """A random DFlash drafter for `tiny_target`; with `**SECOND` a DFlash 2 drafter."""
    config = DraftConfig(
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        block_size=block_size,
        mask_token_id=3,
        target_layer_ids=taps,
        num_target_layers=LAYERS,
        layer_types=("full_attention", "full_attention"),
    )
    drafter = make_drafter(replace(config, **changes))
    randomize(drafter, seed)
    return drafter


def tiny_eagle3(
    seed: int,
    *,
    places: int = PLACES,
    vocab_size: int = VOCAB,
    target_layer_ids: tuple[int, ...] = (1, 2, 0),
    **changes: Any,
) -> Eagle3Drafter:
    """A random EAGLE-3 drafter for the targets of `tiny_target`."""
    config = Eagle3Config(
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=vocab_size,
        target_layer_ids=target_layer_ids,
        rope=Rope(10_000.0),
        **changes,
    )
    network = Eagle3Network(config)
    randomize(network, seed)
    return Eagle3Drafter(config, network, places=places)


def context_rows(drafter: DFlashDrafter, cache: Sequence[KVCache], block: int, *, length: int | None = None) -> Rows:
    """A drafter's caches as rows of one answer, with room for `block` places; the caches themselves stay as they are.

    length: how many positions count, all that the caches hold when None.
    """
    length = cache[0].offset if length is None else length
    rows = Rows.of(drafter.filled([copy(layer_cache) for layer_cache in cache]), length)
    rows.reserve(length + block)
    return rows


class ScriptedDrafter(DFlashDrafter):
    """A drafter that knows the answer: drafts `script[position]`, as its second choice at each position in `wrong`."""

    def __init__(self, config: DraftConfig, script: dict[int, int], wrong: frozenset[int] = frozenset()) -> None:
        super().__init__(config)
        randomize(self, 5)
        self._script, self._wrong = [script], [wrong]

    def __call__(self, block: mx.array, rows: Rows) -> mx.array:
        self._anchors = [rows.lengths.value.tolist()]
        return super().__call__(block, rows)

    def adjust_logits(self, logits: mx.array) -> mx.array:
        """logits: (B, W, n), of places after the anchors of the last block."""
        return mx.stack([self._scripted(anchor, logits.shape[1:]) for anchor in self._anchors[0]])

    def _scripted(self, anchor: int, shape: tuple[int, ...]) -> mx.array:
        rows = []
        for i in range(shape[0]):
            token = self._script[0].get(anchor + 1 + i, 0)
            first = (token + 1) % VOCAB if anchor + 1 + i in self._wrong[0] else token
            ids = mx.arange(shape[1])
            rows.append(mx.maximum((ids == token) * 99.5, (ids == first) * 100.0))
        return mx.stack(rows)


def plain_tokens(
    target: Target,
    prompt: list[int],
    max_tokens: int,
    eos_ids: set[int] | None = None,
    *,
    prefill_step_size: int = 2048,
) -> list[int]:
    """The truth: mlx-lm's own greedy decoding, cut at the first end-of-sequence token."""
    tokens: list[int] = []
    steps = generate_step(mx.array(prompt), target.model, max_tokens=max_tokens, prefill_step_size=prefill_step_size)
    for token, _ in steps:
        tokens.append(int(token))
        if token in (eos_ids or set()):
            break
    return tokens


def drafted_tokens(
    target: Target, drafter: DFlashDrafter, prompt: list[int], max_tokens: int, policy: FixedWidth
) -> list[int]:
    """Greedy tokens of the decode loop, over new caches."""
    session = Session(target, drafter)
    steps = decode(session, prompt, strategy=Greedy(), policy=policy, max_tokens=max_tokens, eos_ids=set())
    return [token for step in steps for token in step.tokens]


def randomize(model: Any, seed: int) -> None:
    """Weights large enough that the best token is never a matter of rounding."""
    keys = iter(mx.random.split(mx.random.key(seed), 400))

    def draw(array: mx.array) -> mx.array:
        if array.ndim == 1:
            return 1.0 + 0.1 * mx.random.normal(array.shape, key=next(keys))
        return mx.random.normal(array.shape, key=next(keys)) * (1.4 / array.shape[-1] ** 0.5)

    model.update(tree_map(draw, model.parameters()))
    model.eval()
    mx.eval(model.parameters())


def read(outcome: Outcome) -> Reading:
    """What the host learns of one answer's outcome."""
    [reading] = Outcome.stack([outcome], outcome.depth).read()
    return reading


def ends_of_writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on, where each write to the caches of a batch ends; a write beyond the buffers fails.

    The device does not check this, and would write on beyond its memory.
    """
    write, ends = RowKVCache.update_and_fetch, list[int]()

    def checked(cache: RowKVCache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        ends.append(int(cache.lengths.value.max().item()) + keys.shape[2])
        assert ends[-1] <= cache.keys.shape[2] == cache.lengths.capacity
        return write(cache, keys, values)

    monkeypatch.setattr(RowKVCache, "update_and_fetch", checked)
    return ends


def join(batch, *others):
    """Rows, or caches of a batch, with the rows of others after their own."""
    for other in others:
        added, before = (rows.count if hasattr(rows, "count") else rows.rows.count for rows in (other, batch))
        batch.add(added)
        batch.take_over(other, range(before, before + added))
    return batch
