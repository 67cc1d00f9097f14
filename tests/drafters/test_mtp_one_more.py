"""Heads that are one more layer of their targets (DeepSeek-V3 and V3.2, GLM-4.5 to GLM-5): forwards against NumPy."""

import json
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from test_mtp import mlp, sigmoid, text_and_drafts
from tiny import HIDDEN, LAYERS, VOCAB, plain_tokens, randomize

from dflash_mlx.checks import check_pair
from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.mtp import load_mtp
from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.own_head import brings_head
from dflash_mlx.hub.quantize import choose_scheme, quantize_folder
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.targets.target import wrap_model

HEADS, KV_HEADS, HEAD_DIM, EXPERTS, EXPERT, CHOSEN, SCALE, EPS, THETA, ROTATED = 4, 2, 8, 6, 16, 2, 1.5, 1e-6, 1e4, 4
Q_RANK, KV_RANK, PLAIN, VALUE = 12, 10, 6, 5  # of DeepSeek's attention: its ranks, and the sizes of a head's parts
INDEX_HEADS, INDEX_DIM, SEEN = 3, 6, 4  # of the choice of the positions that are seen, and how many these are
SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": EXPERT,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "routed_scaling_factor": SCALE,
    "num_experts_per_tok": CHOSEN,
    "first_k_dense_replace": 1,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
GROUPED = {
    "head_dim": HEAD_DIM,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": ROTATED / HEAD_DIM,
}
LATENT = {
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": PLAIN,
    "qk_rope_head_dim": ROTATED,
    "v_head_dim": VALUE,
    "num_key_value_heads": HEADS,
}
SPARSE = {
    **LATENT,
    "index_head_dim": INDEX_DIM,
    "index_n_heads": INDEX_HEADS,
    "index_topk": SEEN,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
    "attention_bias": False,
}
CONFIGS = {
    "glm4_moe": {**SHARED, **GROUPED, "model_type": "glm4_moe"},
    "glm4_moe_lite": {**SHARED, **LATENT, "model_type": "glm4_moe_lite"},
    "deepseek_v3": {**SHARED, **LATENT, "model_type": "deepseek_v3"},
    "deepseek_v32": {**SHARED, **SPARSE, "model_type": "deepseek_v32"},
    "glm_moe_dsa": {
        **SHARED,
        **SPARSE,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "model_type": "glm_moe_dsa",
    },
}


def target_of(family):
    module = pytest.importorskip(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(CONFIGS[family]))
    randomize(model, 3)
    return wrap_model(model, CONFIGS[family])


@pytest.fixture(scope="module", params=CONFIGS)
def target(request):
    return target_of(request.param)


def has_latents(target):
    return "kv_lora_rank" in target.config


def head_of(target):
    """A random head's tensors as they are published, without their layer's number."""
    rng = np.random.default_rng(3)
    shapes = {
        "eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        "mlp.gate.weight": (EXPERTS, HIDDEN),
        "mlp.gate.e_score_correction_bias": (EXPERTS,),
    }
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"{name}.weight": (HIDDEN,) for name in norms}
    if has_latents(target):
        shapes |= {
            "self_attn.q_a_proj.weight": (Q_RANK, HIDDEN),
            "self_attn.q_a_layernorm.weight": (Q_RANK,),
            "self_attn.q_b_proj.weight": (HEADS * (PLAIN + ROTATED), Q_RANK),
            "self_attn.kv_a_proj_with_mqa.weight": (KV_RANK + ROTATED, HIDDEN),
            "self_attn.kv_a_layernorm.weight": (KV_RANK,),
            "self_attn.kv_b_proj.weight": (HEADS * (PLAIN + VALUE), KV_RANK),
            "self_attn.o_proj.weight": (HIDDEN, HEADS * VALUE),
        }
        if "index_topk" in target.config:
            shapes |= {
                "self_attn.indexer.wq_b.weight": (INDEX_HEADS * INDEX_DIM, Q_RANK),
                "self_attn.indexer.wk.weight": (INDEX_DIM, HIDDEN),
                "self_attn.indexer.k_norm.weight": (INDEX_DIM,),
                "self_attn.indexer.k_norm.bias": (INDEX_DIM,),
                "self_attn.indexer.weights_proj.weight": (INDEX_HEADS, HIDDEN),
            }
    else:
        shapes |= {f"self_attn.{name}_norm.weight": (HEAD_DIM,) for name in ("q", "k")}
        shapes["self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"self_attn.{name}_proj.weight"] = (heads * HEAD_DIM, HIDDEN)
            shapes[f"self_attn.{name}_proj.bias"] = (heads * HEAD_DIM,)
    for own in ("shared_experts", *(f"experts.{i}" for i in range(EXPERTS))):
        shapes |= {f"mlp.{own}.{name}_proj.weight": (EXPERT, HIDDEN) for name in ("gate", "up")}
        shapes[f"mlp.{own}.down_proj.weight"] = (HIDDEN, EXPERT)
    draws = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {
        name: 1 + x / 10 if "norm" in name else x / x.shape[-1] ** np.float32(0.5) if x.ndim > 1 else x / 10
        for name, x in draws.items()
    }


def write(folder, target, tensors, *, layer=LAYERS):
    """The head as the layer after the last one, beside some of the target's own and with copies of them."""
    folder.mkdir(exist_ok=True)
    copies = {"embed_tokens.weight": np.zeros((VOCAB, HIDDEN)), "shared_head.head.weight": np.zeros((VOCAB, HIDDEN))}
    arrays = {f"model.layers.{layer}.{name}": mx.array(x) for name, x in {**tensors, **copies}.items()}
    arrays[f"model.layers.{LAYERS - 1}.mlp.gate.weight"] = mx.zeros((EXPERTS, HIDDEN))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(target.config))
    return folder


def normed(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def turned(x, positions):
    """x: (L, heads, ROTATED), each half of a head turned against the other."""
    angles = positions[:, None, None] / THETA ** (np.arange(ROTATED // 2) * 2 / ROTATED)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


def neighbours_turned(x):
    """The same for neighbours in a head; what comes of it stands in halves."""
    return turned(np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1), np.arange(len(x)))


def seen(x, w, *, neighbours):
    """DeepSeek-V3.2, section 2.1: which positions each one sees (L, L), those with the best scores of an index.

    neighbours: these are turned against each other (GLM-5), and not halves (DeepSeek-V3.2).
    """
    w = {name.removeprefix("self_attn."): x for name, x in w.items()}
    small = normed(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"])
    q = (small @ w["indexer.wq_b.weight"].T).reshape(len(x), INDEX_HEADS, INDEX_DIM)
    k = x @ w["indexer.wk.weight"].T
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-5)
    k = (k * w["indexer.k_norm.weight"] + w["indexer.k_norm.bias"])[:, None]
    turn = neighbours_turned if neighbours else lambda part: turned(part, np.arange(len(x)))
    q, k = (np.concatenate([turn(part[..., :ROTATED]), part[..., ROTATED:]], axis=-1) for part in (q, k))
    each = np.maximum(np.einsum("ihd,jd->ihj", q, k[:, 0]), 0)
    scores = np.einsum("ihj,ih->ij", each, x @ w["indexer.weights_proj.weight"].T)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    chosen = np.argsort(scores)[:, -SEEN:]
    mask = np.zeros_like(scores, dtype=bool)
    np.put_along_axis(mask, chosen, True, axis=-1)
    return mask


def grouped(x, w):
    """GLM-4.5's attention: queries, keys and values of all heads, (L, HEADS, ...), of which a part is turned."""
    length = len(x)
    q, k, v = (
        (x @ w[f"self_attn.{name}_proj.weight"].T + w[f"self_attn.{name}_proj.bias"]).reshape(length, -1, HEAD_DIM)
        for name in ("q", "k", "v")
    )
    q, k = (normed(part, w[f"self_attn.{name}_norm.weight"]) for name, part in (("q", q), ("k", k)))
    positions = np.arange(length)
    q, k = (np.concatenate([turned(part[..., :ROTATED], positions), part[..., ROTATED:]], axis=-1) for part in (q, k))
    k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (k, v))
    return q, k, v


def latent(x, w):
    """DeepSeek-V3's (section 2.1.1): the same from small vectors; neighbours are turned against each other."""
    w = {name.removeprefix("self_attn."): x for name, x in w.items()}
    q = (normed(x @ w["q_a_proj.weight"].T, w["q_a_layernorm.weight"]) @ w["q_b_proj.weight"].T).reshape(
        len(x), HEADS, -1
    )
    small, turning = np.split(x @ w["kv_a_proj_with_mqa.weight"].T, [KV_RANK], axis=-1)
    both = (normed(small, w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].T).reshape(len(x), HEADS, -1)
    k, v = np.split(both, [PLAIN], axis=-1)
    q = np.concatenate([q[..., :PLAIN], neighbours_turned(q[..., PLAIN:])], axis=-1)
    k = np.concatenate([k, np.repeat(neighbours_turned(turning[:, None]), HEADS, axis=1)], axis=-1)
    return q, k, v


def experts(x, w):
    """DeepSeek-V3, section 2.1.2: the best experts by their scores and biases, weighted by their scores alone."""
    scores = sigmoid(x @ w["mlp.gate.weight"].T)
    out = mlp(x, w, "mlp.shared_experts")
    for row, own in enumerate(scores):
        best = np.argsort(own + w["mlp.gate.e_score_correction_bias"])[-CHOSEN:]
        out[row] += sum(SCALE * own[i] / own[best].sum() * mlp(x[row], w, f"mlp.experts.{i}") for i in best)
    return out


def reference(w, hidden, embedded, *, neighbours):
    """All entries at once: hidden states and embeddings, both (L, D) -> what is computed there (L, D)."""
    length = len(hidden)
    parts = [normed(embedded, w["enorm.weight"]), normed(hidden, w["hnorm.weight"])]
    h = np.concatenate(parts, axis=-1) @ w["eh_proj.weight"].T
    x = normed(h, w["input_layernorm.weight"])
    q, k, v = latent(x, w) if "self_attn.kv_b_proj.weight" in w else grouped(x, w)
    scores = np.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    mask = np.tri(length, dtype=bool)
    if "self_attn.indexer.wk.weight" in w:
        mask = mask & seen(x, w, neighbours=neighbours)
    scores = np.where(mask, scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v)
    h = h + out.reshape(length, -1) @ w["self_attn.o_proj.weight"].T
    return h + experts(normed(h, w["post_attention_layernorm.weight"]), w)


def test_a_forward_equals_the_definition(target, tmp_path):
    """Of a text, and then of two drafts, which read what was computed before without the last norm."""
    w = head_of(target)
    drafter = load_mtp(write(tmp_path / "head", target, w), target, dtype=mx.float32)
    # Before 0.32 mlx-lm turned neighbours for every family.
    neighbours = getattr(target.model.args, "indexer_rope_interleave", True)
    said, expected = text_and_drafts(target, drafter, partial(reference, w, neighbours=neighbours))
    assert np.abs(np.array(said[0]) - expected).max() < 1e-4
    logits = normed(expected, w["shared_head.norm.weight"]) @ np.array(target.model.lm_head.weight).T
    assert np.abs(np.array(drafter.logits(target, said)[0]) - logits).max() < 1e-3


def test_answers_are_the_targets_own(target, tmp_path):
    drafter = load_mtp(write(tmp_path / "head", target, head_of(target)), target, dtype=mx.float32)
    assert "drafts are finite" in check_pair(target, drafter, dtype=mx.float32)
    session, prompt = Session(target, drafter), [3, 1, 4, 1, 5]
    steps = decode(session, prompt, strategy=Greedy(), policy=FixedWidth(3), max_tokens=20, eos_ids=set())
    assert [token for step in steps for token in step.tokens] == plain_tokens(target, prompt, 20)


def test_it_is_found_in_the_targets_folder_and_stays_when_that_is_quantized(target, tmp_path):
    source = write(tmp_path / "source", target, head_of(target))
    assert brings_head(source)
    # mlx-lm reads model*.safetensors; of DeepSeek-V3 it leaves out no other layer than the 61st.
    (source / "model.safetensors").rename(source / "mtp.safetensors")
    mx.save_safetensors(str(source / "model.safetensors"), dict(tree_flatten(target.model.parameters())))
    (tmp_path / "small").mkdir()
    quantize_folder(source, tmp_path / "small", choose_scheme(bits=8, group_size=32))
    assert brings_head(tmp_path / "small")
    networks = [load_mtp(folder, target, dtype=mx.float32).network for folder in (source, tmp_path / "small")]
    own, small = (dict(tree_flatten(network.parameters())) for network in networks)
    assert own.keys() == small.keys()
    for name, array in own.items():
        assert mx.abs(small[name] - array).max().item() <= 0.02 * mx.abs(array).max().item(), name


def test_more_layers_and_none_are_refused(target, tmp_path):
    with pytest.raises(CheckpointError, match=r"more than one layer \(mtp\.layers\.1\."):
        load_mtp(write(tmp_path / "second", target, head_of(target), layer=LAYERS + 1), target, dtype=mx.float32)
    assert not brings_head(tmp_path / "second")
    with pytest.raises(CheckpointError, match="have no tensors of such a head"):
        load_mtp(write(tmp_path / "none", target, {}, layer=LAYERS - 1), target, dtype=mx.float32)
    assert not brings_head(tmp_path / "none")


def test_weights_in_fp8(tmp_path):
    """As DeepSeek-V3 is published: numbers of 8 bits, and a scale for each block of 128 by 128."""
    target = target_of("deepseek_v3")
    w = {name: mx.array(x) for name, x in head_of(target).items()}
    packed, meant = {}, {}
    for name, array in w.items():
        if name.endswith("proj.weight"):
            packed[name], packed[f"{name}_scale_inv"] = mx.to_fp8(array * 4), mx.full((1, 1), 0.25)
            meant[name] = np.array(mx.from_fp8(packed[name], dtype=mx.float32) / 4)
        else:
            packed[name], meant[name] = array, np.array(array)
    found, expected = (
        load_mtp(write(tmp_path / folder, target, tensors), target, dtype=mx.float32).network
        for folder, tensors in (("packed", packed), ("meant", meant))
    )
    own, wanted = (dict(tree_flatten(network.parameters())) for network in (found, expected))
    assert own.keys() == wanted.keys()
    assert all(mx.allclose(own[name], wanted[name], atol=1e-2, rtol=1e-2).item() for name in wanted)
