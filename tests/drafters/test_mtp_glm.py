"""GLM-4.5's head for multi-token prediction, one more layer of the target's: a forward against NumPy, and its files."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from test_mtp import mlp, sigmoid
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

HEADS, KV_HEADS, HEAD_DIM, EXPERTS, EXPERT, CHOSEN, SCALE, EPS, THETA, ROTATED = 4, 2, 8, 6, 16, 2, 1.5, 1e-5, 1e4, 4
CONFIG = {
    "model_type": "glm4_moe",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": EXPERT,
    "norm_topk_prob": True,
    "num_attention_heads": HEADS,
    "n_group": 1,
    "head_dim": HEAD_DIM,
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
    "use_qk_norm": True,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "partial_rotary_factor": ROTATED / HEAD_DIM,
}


@pytest.fixture(scope="module")
def target():
    module = pytest.importorskip("mlx_lm.models.glm4_moe")
    model = module.Model(module.ModelArgs.from_dict(CONFIG))
    randomize(model, 3)
    return wrap_model(model, CONFIG)


def head_of():
    """A random head's tensors as they are published, without their layer's number."""
    rng = np.random.default_rng(3)
    shapes = {
        "eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate.weight": (EXPERTS, HIDDEN),
        "mlp.gate.e_score_correction_bias": (EXPERTS,),
    }
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"{name}.weight": (HIDDEN,) for name in norms}
    shapes |= {f"self_attn.{name}_norm.weight": (HEAD_DIM,) for name in ("q", "k")}
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


def write(folder, tensors, *, layer=LAYERS):
    """The head as the layer after the last one, beside some of the target's own and with copies of them."""
    folder.mkdir(exist_ok=True)
    copies = {"embed_tokens.weight": np.zeros((VOCAB, HIDDEN)), "shared_head.head.weight": np.zeros((VOCAB, HIDDEN))}
    arrays = {f"model.layers.{layer}.{name}": mx.array(x) for name, x in {**tensors, **copies}.items()}
    arrays[f"model.layers.{LAYERS - 1}.mlp.gate.weight"] = mx.zeros((EXPERTS, HIDDEN))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def normed(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def rotated(x, positions):
    """x: (L, heads, HEAD_DIM), of which the first dimensions are turned, each half of them against the other."""
    angles = positions[:, None, None] / THETA ** (np.arange(ROTATED // 2) * 2 / ROTATED)
    a, b = np.split(x[..., :ROTATED], 2, axis=-1)
    turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
    return np.concatenate([*turned, x[..., ROTATED:]], axis=-1)


def experts(x, w):
    """DeepSeek-V3, section 2.1.2: the best experts by their scores and biases, weighted by their scores alone."""
    scores = sigmoid(x @ w["mlp.gate.weight"].T)
    out = mlp(x, w, "mlp.shared_experts")
    for row, own in enumerate(scores):
        best = np.argsort(own + w["mlp.gate.e_score_correction_bias"])[-CHOSEN:]
        out[row] += sum(SCALE * own[i] / own[best].sum() * mlp(x[row], w, f"mlp.experts.{i}") for i in best)
    return out


def reference(w, hidden, embedded):
    """All entries at once: hidden states and embeddings, both (L, D) -> what is computed there (L, D)."""
    length = len(hidden)
    parts = [normed(embedded, w["enorm.weight"]), normed(hidden, w["hnorm.weight"])]
    h = np.concatenate(parts, axis=-1) @ w["eh_proj.weight"].T
    x = normed(h, w["input_layernorm.weight"])
    q, k, v = (
        (x @ w[f"self_attn.{name}_proj.weight"].T + w[f"self_attn.{name}_proj.bias"]).reshape(length, -1, HEAD_DIM)
        for name in ("q", "k", "v")
    )
    q, k = (normed(part, w[f"self_attn.{name}_norm.weight"]) for name, part in (("q", q), ("k", k)))
    q, k = rotated(q, np.arange(length)), rotated(k, np.arange(length))
    k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (k, v))
    scores = np.where(np.tri(length, dtype=bool), np.einsum("ihd,jhd->hij", q, k) / HEAD_DIM**0.5, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v)
    h = h + out.reshape(length, -1) @ w["self_attn.o_proj.weight"].T
    return h + experts(normed(h, w["post_attention_layernorm.weight"]), w)


def test_a_forward_equals_the_definition(target, tmp_path):
    """Of a text, and then of two drafts, which read what was computed before without the last norm."""
    w = head_of()
    drafter = load_mtp(write(tmp_path / "head", w), target, dtype=mx.float32)
    tokens, caches = [5, 9, 2, 30, 7, 11], drafter.make_layer_caches()
    features = target.forward_tapped(mx.array([tokens]), target.make_cache(), drafter.taps)[1]
    found = [drafter.feed(target, mx.array([tokens[1:]]), features[:, :-1], caches)]
    for draft in (3, 8):
        found.append(drafter.feed(target, mx.array([[draft]]), found[-1][:, -1:], caches))

    embedding, hidden = np.array(target.embed(mx.arange(VOCAB))), np.array(features[0, :-1])
    for draft in (3, 8, 0):
        expected = reference(w, hidden, embedding[tokens[1:]])
        tokens, hidden = [*tokens, draft], np.concatenate([hidden, expected[-1:]])
    said = mx.concatenate(found, axis=1)
    assert np.abs(np.array(said[0]) - expected).max() < 1e-4
    logits = normed(expected, w["shared_head.norm.weight"]) @ np.array(target.model.lm_head.weight).T
    assert np.abs(np.array(drafter.logits(target, said)[0]) - logits).max() < 1e-3


def test_answers_are_the_targets_own(target, tmp_path):
    drafter = load_mtp(write(tmp_path / "head", head_of()), target, dtype=mx.float32)
    assert "drafts are finite" in check_pair(target, drafter, dtype=mx.float32)
    session, prompt = Session(target, drafter), [3, 1, 4, 1, 5]
    steps = decode(session, prompt, strategy=Greedy(), policy=FixedWidth(3), max_tokens=20, eos_ids=set())
    assert [token for step in steps for token in step.tokens] == plain_tokens(target, prompt, 20)


def test_it_is_found_in_the_targets_folder_and_stays_when_that_is_quantized(target, tmp_path):
    source = write(tmp_path / "source", head_of())
    assert brings_head(source)
    arrays = dict(tree_flatten(target.model.parameters())) | mx.load(str(source / "model.safetensors"))
    arrays[f"model.layers.{LAYERS - 1}.mlp.gate.weight"] = target.model.layers[-1].mlp.gate.weight
    mx.save_safetensors(str(source / "model.safetensors"), arrays, {"format": "pt"})
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
        load_mtp(write(tmp_path / "second", head_of(), layer=LAYERS + 1), target, dtype=mx.float32)
    assert not brings_head(tmp_path / "second")
    with pytest.raises(CheckpointError, match="have no tensors of such a head"):
        load_mtp(write(tmp_path / "none", {}, layer=LAYERS - 1), target, dtype=mx.float32)
    assert not brings_head(tmp_path / "none")
