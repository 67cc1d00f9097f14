"""The shapes of published drafters, as their config.json describes them, are read as their authors mean them."""

from typing import Any

import pytest
from mlx.utils import tree_flatten

from dflash_mlx.drafters.checkpoint import make_drafter
from dflash_mlx.drafters.config import parse_draft_config

SLIDING, FULL = "sliding_attention", "full_attention"


def config(
    layers: int, hidden: int, inner: int, heads: tuple[int, int, int], vocab: int, **rest: Any
) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocab,
        **rest,
    }


PUBLISHED = {
    "Qwen3-4B": config(
        5,
        2560,
        9728,
        (32, 8, 128),
        151936,
        block_size=16,
        rope_theta=1000000,
        rope_scaling=None,
        use_sliding_window=False,
        sliding_window=None,
        num_target_layers=36,
        dflash_config={"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    ),
    "Qwen3.6-35B-A3B, retrained": config(
        6,
        2048,
        6144,
        (32, 8, 128),
        248320,
        layer_types=[SLIDING] * 5 + [FULL],
        use_sliding_window=True,
        sliding_window=4096,
        rope_parameters={"rope_theta": 10000000, "rope_type": "default"},
        num_target_layers=40,
        dflash_config={
            "block_size": 16,
            "mask_token_id": 248077,
            "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
        },
    ),
    "Gemma-4-31B-it": config(
        5,
        5376,
        10752,
        (64, 8, 128),
        262144,
        block_size=16,
        layer_types=[SLIDING] * 4 + [FULL],
        use_sliding_window=True,
        sliding_window=2048,
        rope_theta=1000000,
        final_logit_softcapping=30.0,
        num_target_layers=60,
        dflash_config={"mask_token_id": 4, "target_layer_ids": [1, 12, 23, 35, 46, 57]},
    ),
    "gpt-oss-20b": config(
        8,
        2880,
        7680,
        (64, 8, 64),
        201088,
        block_size=8,
        attention_bias=True,
        rope_theta=150000,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        num_target_layers=24,
        dflash_config={"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
    ),
    "Kimi-K2.5": config(
        6,
        7168,
        18432,
        (64, 8, 128),
        163840,
        block_size=8,
        rope_theta=50000,
        rope_scaling={
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        num_target_layers=61,
        dflash_config={"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
    ),
    "Qwen3.8-27B-DFlash2": config(
        5,
        5120,
        17408,
        (32, 8, 128),
        248320,
        architectures=["DFlash2DraftModel"],
        is_causal=False,
        layer_types=[SLIDING] * 5,
        use_sliding_window=True,
        sliding_window=2048,
        rope_parameters={"rope_theta": 10000000, "rope_type": "default"},
        num_target_layers=64,
        dflash_config={
            "block_size": 8,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
            "mask_token_id": 248070,
            "target_layer_ids": [5, 19, 33, 47, 61],
        },
    ),
    "Muse-Glimmer-30B-DFlash2": config(
        5,
        6656,
        19968,
        (32, 8, 128),
        202048,
        architectures=["DFlash2DraftModel"],
        is_causal=False,
        layer_types=[SLIDING] * 5,
        use_sliding_window=True,
        sliding_window=2048,
        rope_theta=500000,
        rms_norm_eps=1e-5,
        num_target_layers=52,
        dflash_config={
            "block_size": 16,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
            "mask_token_id": 201818,
            "target_layer_ids": [1, 13, 25, 37, 49],
            "output_multiplier": 0.19611613513818404,
            "final_logit_softcapping": 20.0,
        },
    ),
}
# Causality inside the block by layer, block size, rope base, features, soft cap, biases, DFlash 2.
MEANT = {
    "Qwen3-4B": ([False] * 5, 16, 1e6, 5, None, False, False),
    "Qwen3.6-35B-A3B, retrained": ([True] * 5 + [False], 16, 1e7, 8, None, False, False),
    "Gemma-4-31B-it": ([True] * 4 + [False], 16, 1e6, 6, 30.0, False, False),
    "gpt-oss-20b": ([False] * 8, 8, 1.5e5, 5, None, True, False),
    "Kimi-K2.5": ([False] * 6, 8, 5e4, 6, None, False, False),
    "Qwen3.8-27B-DFlash2": ([False] * 5, 8, 1e7, 5, None, False, True),
    "Muse-Glimmer-30B-DFlash2": ([False] * 5, 16, 5e5, 5, 20.0, False, True),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name):
    read = parse_draft_config(PUBLISHED[name])
    causal = [read.layer_is_causal(i) for i in range(read.num_hidden_layers)]
    taps = len(read.target_layer_ids)
    said = (causal, read.block_size, read.rope_theta, taps, read.final_logit_softcapping, read.attention_bias)
    assert (*said, read.is_dflash2) == MEANT[name]
    assert read.feature_size == taps * read.hidden_size
    assert all(0 <= i < read.num_target_layers for i in read.target_layer_ids)


@pytest.mark.parametrize(
    ("name", "gibibytes", "tensors"),
    [
        ("Qwen3-4B", 1.00, 58),
        ("Qwen3.6-35B-A3B, retrained", 0.72, 69),
        ("Gemma-4-31B-it", 2.86, 58),
        ("gpt-oss-20b", 1.46, 91 + 4 * 8),
        ("Kimi-K2.5", 6.48, 69),
        ("Qwen3.8-27B-DFlash2", 3_848_817_896 / 2**30, 81),
    ],
)
def test_a_drafter_has_the_size_of_the_published_file(name, gibibytes, tensors):
    """In bfloat16. The arrays are never computed, so nothing of that size is in memory."""
    arrays = dict(tree_flatten(make_drafter(parse_draft_config(PUBLISHED[name])).parameters()))
    assert len(arrays) == tensors
    assert sum(array.size for array in arrays.values()) * 2 / 2**30 == pytest.approx(gibibytes, abs=0.006)
