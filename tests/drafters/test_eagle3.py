"""EAGLE-3: a forward against NumPy, written from the paper; the public layouts; what is refused."""

import json

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file
from test_checkpoint import tensors_file
from tiny import HIDDEN, LAYERS, VOCAB, tiny_target

from dflash_mlx.checks import check_pair, check_shapes
from dflash_mlx.drafters.eagle3 import Eagle3Drafter, Eagle3Network
from dflash_mlx.drafters.eagle3_checkpoint import default_layers, is_eagle3, load_eagle3, parse_eagle3_config
from dflash_mlx.errors import CheckpointError, PairError

SIZE, HEADS, KV_HEADS, HEAD_DIM, INNER, DRAFTED, EPS, THETA = 24, 4, 2, 8, 20, 30, 1e-5, 5e4
TAPS = (1, 2, 0)
AUTHORS = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFTED,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 2048,
}
SGLANG = {**AUTHORS, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True}}
_INNER_FIELDS = ("model_type", "hidden_act", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps", "rope_theta")  # fmt: skip
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": VOCAB,
    "target_hidden_size": HIDDEN,
    "norm_before_residual": True,
    "norm_before_fc": True,
    "eagle_aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
    "transformer_layer_config": {name: AUTHORS[name] for name in _INNER_FIELDS} | {"hidden_size": SIZE},
}
# The folder's config.json, the prefix of its layer's tensors, whether it brings an embedding, and its file.
FOLDERS = {
    "authors": (AUTHORS, "midlayer", False, "pytorch_model.bin"),
    "SGLang": (SGLANG, "midlayer", False, "model.safetensors"),
    "speculators": (SPECULATORS, "layers.0", True, "model.safetensors"),
}


def weights_of(config, layer, own_embedding):
    rng = np.random.default_rng(5)
    size = config.get("hidden_size") or config["transformer_layer_config"]["hidden_size"]
    drafted = config["draft_vocab_size"]
    shapes = {
        "fc.weight": (size, 3 * HIDDEN),
        "norm.weight": (size,),
        "lm_head.weight": (drafted, size),
        f"{layer}.hidden_norm.weight": (size,),
        f"{layer}.input_layernorm.weight": (size,),
        f"{layer}.post_attention_layernorm.weight": (size,),
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * size),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * size),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * size),
        f"{layer}.self_attn.o_proj.weight": (size, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": (INNER, size),
        f"{layer}.mlp.up_proj.weight": (INNER, size),
        f"{layer}.mlp.down_proj.weight": (size, INNER),
    }
    if own_embedding:
        shapes |= {"embed_tokens.weight": (VOCAB, size), "input_norm.weight": (3 * HIDDEN,)}
    weights = {
        name: (
            1 + 0.1 * rng.standard_normal(shape) if len(shape) == 1 else rng.standard_normal(shape) / shape[1] ** 0.5
        )
        for name, shape in shapes.items()
    }
    weights = {name: array.astype(np.float32) for name, array in weights.items()}
    if drafted < VOCAB:
        ids = np.sort(rng.permutation(VOCAB)[:drafted])
        weights["d2t"] = (ids - np.arange(drafted)).astype(np.int64)
        weights["t2d"] = np.isin(np.arange(VOCAB), ids)
    return weights


def write(folder, name="SGLang", *, without=(), tensors=None, **changes):
    """A folder of one layout, with some fields and tensors changed; returns its tensors under the authors' names."""
    config, layer, own_embedding, file = FOLDERS[name]
    weights = {**weights_of(config, layer, own_embedding), **(tensors or {})}
    weights = {key: array for key, array in weights.items() if key not in without}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    if file.endswith(".bin"):
        tensors_file(folder / file, weights)
    else:
        save_file(weights, folder / file)
    return {key.replace(layer, "midlayer"): array for key, array in weights.items()}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def normed(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def rotated(x, positions):
    """x: (L, heads, HEAD_DIM), each half of a head turned against the other."""
    angles = positions[:, None, None] / THETA ** (np.arange(HEAD_DIM // 2) * 2 / HEAD_DIM)
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1)


def reference(w, features, embedded, *, before_residual):
    """Section 3 of the paper, over all entries at once: mixed features, or what was computed at the places before, and
    embeddings, both (L, D) -> what is computed there (L, D), and logits (L, n)."""
    length = len(embedded)
    if features.shape[-1] == 3 * HIDDEN:
        features = (normed(features, w["input_norm.weight"]) if "input_norm.weight" in w else features) @ w[
            "fc.weight"
        ].T
    own = normed(features, w["midlayer.hidden_norm.weight"])
    x = np.concatenate([normed(embedded, w["midlayer.input_layernorm.weight"]), own], axis=-1)
    q, k, v = (
        (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).reshape(length, -1, HEAD_DIM) for name in ("q", "k", "v")
    )
    q, k = rotated(q, np.arange(length)), rotated(k, np.arange(length))
    k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / HEAD_DIM**0.5
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    out = np.einsum("hij,jhd->ihd", shares, v).reshape(length, -1) @ w["midlayer.self_attn.o_proj.weight"].T
    h = (own if before_residual else features) + out
    inner = normed(h, w["midlayer.post_attention_layernorm.weight"])
    gate = inner @ w["midlayer.mlp.gate_proj.weight"].T
    up = inner @ w["midlayer.mlp.up_proj.weight"].T
    h = h + (gate / (1 + np.exp(-gate)) * up) @ w["midlayer.mlp.down_proj.weight"].T
    return h, normed(h, w["norm.weight"]) @ w["lm_head.weight"].T


@pytest.mark.parametrize("name", FOLDERS)
def test_a_forward_equals_the_papers(name, target, tmp_path):
    """Of a text, and then of two drafts."""
    w = write(tmp_path, name)
    drafter = load_eagle3(tmp_path, target, dtype=mx.float32)
    assert (drafter.method, drafter.places) == ("eagle3", 7)
    taps = TAPS if name != "authors" else (1, LAYERS // 2 - 1, LAYERS - 4)
    assert drafter.taps == taps
    tokens = [5, 9, 2, 30, 7, 11]
    _, features = target.forward_tapped(mx.array([tokens]), target.make_cache(), taps)
    caches = drafter.make_layer_caches()
    found = [drafter.feed(target, mx.array([tokens[1:]]), drafter.project(features[:, :-1]), caches)]
    for draft in (3, 8):
        found.append(drafter.feed(target, mx.array([[draft]]), found[-1][:, -1:], caches))
    found = mx.concatenate(found, axis=1)

    embedding = w.get("embed_tokens.weight", np.array(target.embed(mx.arange(VOCAB))))
    before = name == "speculators"
    features = np.array(features[0, :-1])
    mixed = (normed(features, w["input_norm.weight"]) if before else features) @ w["fc.weight"].T
    for draft in (3, 8, 0):
        expected, logits = reference(w, mixed, embedding[tokens[1:]], before_residual=before)
        tokens, mixed = [*tokens, draft], np.concatenate([mixed, expected[-1:]])
    assert np.abs(np.array(found[0]) - expected).max() < 1e-4
    assert np.abs(np.array(drafter.logits(target, found)[0]) - logits).max() < 1e-4
    vocabulary = drafter.vocabulary(target)
    if name == "speculators":
        assert vocabulary is None
    else:
        assert vocabulary.token_ids.tolist() == np.flatnonzero(w["t2d"]).tolist()


def test_a_pair_is_checked_by_running_it(target, tmp_path):
    write(tmp_path)
    drafter = load_eagle3(tmp_path, target, dtype=mx.float32, places=3)
    assert drafter.places == 3
    check_shapes(target, drafter)
    assert "drafts are finite" in check_pair(target, drafter, dtype=mx.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 16}, "features of the size 16, the target's have 32"),
        ({"vocab_size": 40}, "a vocabulary of 40, the target has 48"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}}, r"layers \[4\], the target has .* 0 to 3"),
        ({"hidden_size": 16}, "no embedding and a hidden size of 16, the target's is 32"),
    ],
)
def test_another_target_is_refused(changes, message, target):
    config = parse_eagle3_config({**SGLANG, **changes})
    with pytest.raises(PairError, match=message):
        check_shapes(target, Eagle3Drafter(config, Eagle3Network(config)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "has 2 layers, for which there is no code"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"norm_output": True}, "norm_output"),
        ({"fc_norm": True}, "fc_norm"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"layer_types": ["sliding_attention"]}, "a sliding window"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, "reads the target's embedding"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_attention_heads": "four"}, "does not describe an EAGLE-3 drafter"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope is of the type 'dynamic'"),
        ({"draft_vocab_size": 20}, "d2t should name 20 different tokens"),
        ({"intermediate_size": 21}, "do not fit its config.json"),
        ({"without": ("norm.weight",)}, "do not fit its config.json: Missing 1 parameters.* norm.weight"),
        ({"without": ("d2t",)}, "the tensor d2t, which says which ones, is missing"),
        ({"tensors": {"other.weight": np.zeros((2, 2), np.float32)}}, "do not fit its config.json: .*other.weight"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes, message, target, tmp_path):
    write(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_eagle3(tmp_path, target, dtype=mx.float32)


def test_a_folder_without_weights_is_refused(target, tmp_path):
    write(tmp_path, "authors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: it is no zip archive.*save the tensors as safet"):
        load_eagle3(tmp_path, target, dtype=mx.float32)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        load_eagle3(tmp_path, target, dtype=mx.float32)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (AUTHORS, True),
        (SPECULATORS, True),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, True),
        ({"architectures": ["LlamaForCausalLMEagle"]}, False),
        ({"architectures": None, "speculators_model_type": "dflash"}, False),
    ],
)
def test_it_is_known_by_its_config(raw, expected):
    assert is_eagle3(raw) == expected


def test_speculators_may_leave_out_llamas_own_values():
    layer = {"model_type": "llama", "num_key_value_heads": 8, "rope_parameters": {"rope_theta": 5e5}}
    raw = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    config = parse_eagle3_config(raw)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (4096, 11_008, 128)
    assert (config.rope.theta, config.target_layer_ids) == (5e5, ())
    assert default_layers(32) == (1, 15, 28)
