"""Heads for multi-token prediction: a forward against NumPy, the published layouts, and what is refused."""

import json
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import HIDDEN, VOCAB, plain_tokens, tiny_target
from tiny_families import family_target, unavailable

from dflash_mlx.checks import check_pair, check_shapes
from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.mtp import load_mtp
from dflash_mlx.errors import CheckpointError
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.targets.whole_layers import WholeLayers

HEADS, KV_HEADS, HEAD_DIM, INNER, EXPERTS, EXPERT, CHOSEN, EPS = 4, 2, 8, 48, 4, 16, 2, 1e-5
ROTATED, THETA = 4, 1e4  # dimensions of a head that are turned
LAYER = "layers.0"
PROJECTIONS = {"gate_proj": (EXPERT, HIDDEN), "up_proj": (EXPERT, HIDDEN), "down_proj": (HIDDEN, EXPERT)}


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def target(request):
    if reason := unavailable(request.param):
        pytest.skip(reason)
    return family_target(request.param)


def has_experts(target):
    return any("switch_mlp" in name for name in target.parameter_names())


def head_of(target):
    """A random head's tensors as they are published: norms less 1, each expert by itself."""
    rng = np.random.default_rng(3)
    shapes = {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        f"{LAYER}.self_attn.q_proj.weight": (2 * HEADS * HEAD_DIM, HIDDEN),
        f"{LAYER}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{LAYER}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{LAYER}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    }
    shapes |= {f"{LAYER}.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in ("q", "k")}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", f"{LAYER}.input_layernorm")
    shapes |= {f"{name}.weight": (HIDDEN,) for name in (*norms, f"{LAYER}.post_attention_layernorm")}
    if has_experts(target):
        shapes |= {f"{LAYER}.mlp.gate.weight": (EXPERTS, HIDDEN), f"{LAYER}.mlp.shared_expert_gate.weight": (1, HIDDEN)}
        owners = ["shared_expert", *(f"experts.{i}" for i in range(EXPERTS))]
        shapes |= {f"{LAYER}.mlp.{own}.{name}.weight": PROJECTIONS[name] for own in owners for name in PROJECTIONS}
    else:
        shapes |= {f"{LAYER}.mlp.{name}.weight": (INNER, HIDDEN) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{LAYER}.mlp.down_proj.weight": (HIDDEN, INNER)}
    draws = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: x / x.shape[1] ** np.float32(0.5) if x.ndim > 1 else x / 10 for name, x in draws.items()}


def write(folder, tensors, *, layout="each expert", prefix="mtp.", **config):
    """The tensors in a folder beside some of the target's own, as the layouts hold them."""
    tensors = dict(tensors)
    if layout != "each expert" and f"{LAYER}.mlp.gate.weight" in tensors:
        gate, up, down = (
            np.stack([tensors.pop(f"{LAYER}.mlp.experts.{i}.{name}.weight") for i in range(EXPERTS)])
            for name in PROJECTIONS
        )
        if layout == "two in one":
            tensors[f"{LAYER}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
            tensors[f"{LAYER}.mlp.experts.down_proj"] = down
        else:
            stacked = zip(PROJECTIONS, (gate, up, down), strict=True)
            tensors |= {f"{LAYER}.mlp.switch_mlp.{name}.weight": part for name, part in stacked}
    if layout == "MLX":
        tensors = {name: array + 1 if "norm" in name else array for name, array in tensors.items()}
    arrays = {prefix + name: mx.array(array) for name, array in tensors.items()}
    arrays["model.layers.0.input_layernorm.weight"] = mx.zeros((HIDDEN,))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx" if layout == "MLX" else "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def normed(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * (1 + weight)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rotated(x, positions):
    """x: (L, heads, HEAD_DIM), of which the first dimensions are turned, each half of them against the other."""
    angles = positions[:, None, None] / THETA ** (np.arange(ROTATED // 2) * 2 / ROTATED)
    a, b = np.split(x[..., :ROTATED], 2, axis=-1)
    turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
    return np.concatenate([*turned, x[..., ROTATED:]], axis=-1)


def mlp(x, w, name):
    gate = x @ w[f"{name}.gate_proj.weight"].T
    return (gate * sigmoid(gate) * (x @ w[f"{name}.up_proj.weight"].T)) @ w[f"{name}.down_proj.weight"].T


def experts(x, w):
    """The best experts of each row, weighted by their shares among themselves, and the one that all rows share."""
    name = f"{LAYER}.mlp"
    scores = x @ w[f"{name}.gate.weight"].T
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    out = sigmoid(x @ w[f"{name}.shared_expert_gate.weight"].T) * mlp(x, w, f"{name}.shared_expert")
    for row, own in enumerate(shares):
        best = np.argsort(own)[-CHOSEN:]
        out[row] += sum(own[i] / own[best].sum() * mlp(x[row], w, f"{name}.experts.{i}") for i in best)
    return out


def reference(w, hidden, embedded):
    """All entries at once: hidden states and embeddings, both (L, D) -> what is computed there (L, D)."""
    length = len(hidden)
    parts = [normed(embedded, w["pre_fc_norm_embedding.weight"]), normed(hidden, w["pre_fc_norm_hidden.weight"])]
    h = np.concatenate(parts, axis=-1) @ w["fc.weight"].T
    x = normed(h, w[f"{LAYER}.input_layernorm.weight"])
    q, k, v = (x @ w[f"{LAYER}.self_attn.{name}_proj.weight"].T for name in ("q", "k", "v"))
    q, gate = np.split(q.reshape(length, HEADS, -1), 2, axis=-1)
    k, v = (part.reshape(length, KV_HEADS, HEAD_DIM) for part in (k, v))
    q, k = (normed(part, w[f"{LAYER}.self_attn.{name}_norm.weight"]) for name, part in (("q", q), ("k", k)))
    q, k = rotated(q, np.arange(length)), rotated(k, np.arange(length))
    k, v = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (k, v))
    scores = np.where(np.tri(length, dtype=bool), np.einsum("ihd,jhd->hij", q, k) / HEAD_DIM**0.5, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v) * sigmoid(gate)
    h = h + out.reshape(length, -1) @ w[f"{LAYER}.self_attn.o_proj.weight"].T
    inner = normed(h, w[f"{LAYER}.post_attention_layernorm.weight"])
    h = h + (experts(inner, w) if f"{LAYER}.mlp.gate.weight" in w else mlp(inner, w, f"{LAYER}.mlp"))
    return normed(h, w["norm.weight"])


def text_and_drafts(target, drafter, reference):
    """What a head says of a text and then of two drafts (1, L, D), and the same by the reference, all at once (L, D).

    reference: hidden states and embeddings, both (L, D) -> what is computed there (L, D). For each draft it stands for
    the next place's hidden state.
    """
    tokens, caches = [5, 9, 2, 30, 7, 11], drafter.make_layer_caches()
    features = target.forward_tapped(mx.array([tokens]), target.make_cache(), drafter.taps)[1]
    found = [drafter.feed(target, mx.array([tokens[1:]]), features[:, :-1], caches)]
    for draft in (3, 8):
        found.append(drafter.feed(target, mx.array([[draft]]), found[-1][:, -1:], caches))

    embedding, hidden = np.array(target.embed(mx.arange(VOCAB))), np.array(features[0, :-1])
    for draft in (3, 8, 0):
        expected = reference(hidden, embedding[tokens[1:]])
        tokens, hidden = [*tokens, draft], np.concatenate([hidden, expected[-1:]])
    return mx.concatenate(found, axis=1), expected


@pytest.mark.parametrize("layout", ["each expert", "two in one", "MLX"])
def test_a_forward_equals_the_definition(target, layout, tmp_path):
    """Of a text, and then of two drafts."""
    w = head_of(target)
    write(tmp_path, w, layout=layout, prefix="language_model.mtp." if layout == "MLX" else "mtp.")
    drafter = load_mtp(tmp_path, target, dtype=mx.float32)
    assert (drafter.method, drafter.places, drafter.taps) == ("mtp", 3, (len(target.layers),))
    logits, features = target.forward_tapped(mx.array([[5, 9, 2]]), target.make_cache(), drafter.taps)
    assert mx.abs(target.head(features) - logits).max().item() < 1e-5
    said, expected = text_and_drafts(target, drafter, partial(reference, w))
    assert np.abs(np.array(said[0]) - expected).max() < 1e-4
    assert mx.array_equal(drafter.logits(target, said), target.head(said)).item()


def test_answers_are_the_targets_own(target, tmp_path):
    write(tmp_path, head_of(target))
    drafter = load_mtp(tmp_path, target, dtype=mx.float32, places=5)
    check_shapes(target, drafter)
    assert "drafts are finite" in check_pair(target, drafter, dtype=mx.float32)
    for width in (1, 5):
        session, prompt = Session(target, drafter), [3, 1, 4, 1, 5]
        steps = decode(session, prompt, strategy=Greedy(), policy=FixedWidth(width), max_tokens=20, eos_ids=set())
        assert [token for step in steps for token in step.tokens] == plain_tokens(target, prompt, 20)


def test_a_head_beside_a_target_whose_first_layers_are_on_another_machine(tmp_path):
    whole, rank_0 = family_target("qwen3_next"), family_target("qwen3_next")
    write(tmp_path, head_of(whole))
    WholeLayers(rank_0.layers, [1] * len(rank_0.layers), SimpleNamespace(rank=0, size=2, ranks=None))
    said = []
    for target in (whole, rank_0):
        drafter = load_mtp(tmp_path, target, dtype=mx.float32)
        said.append(drafter.feed(target, mx.array([[5, 9]]), mx.ones((1, 2, HIDDEN)), drafter.make_layer_caches()))
    assert mx.allclose(*said, atol=1e-5).item()
    assert not mx.allclose(said[0], mx.ones((1, 2, HIDDEN)), atol=0.1).item()


def test_quantized_heads(tmp_path):
    """Of groups of 32: what a quantized layer computes is what its own weights, expanded, compute."""
    target = family_target("qwen3_5")
    w = {name: mx.array(array) for name, array in head_of(target).items()}
    how = {"group_size": 32, "bits": 4}
    expanded, packed = {}, {}
    for name, array in w.items():
        if array.shape[-1] % 32 == 0 and name.endswith("proj.weight"):
            parts = dict(zip(("weight", "scales", "biases"), mx.quantize(array, **how), strict=True))
            packed |= {name.replace("weight", part): value for part, value in parts.items()}
            expanded[name] = mx.dequantize(*parts.values(), **how)
        else:
            packed[name] = expanded[name] = array
    heads = []
    for name, tensors, config in (("packed", packed, {"quantization": how}), ("expanded", expanded, {})):
        (tmp_path / name).mkdir()
        write(tmp_path / name, tensors, **config)
        heads.append(load_mtp(tmp_path / name, target, dtype=mx.float32).network)
    first, second = (dict(tree_flatten(head.parameters())) for head in heads)
    assert first.keys() == second.keys()
    assert all(mx.allclose(first[name], second[name], atol=1e-6).item() for name in first)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "have no tensors of such a head .*--no-draft"),
        ({"layers.1.mlp.up_proj.weight": np.zeros((2, 2))}, r"more than one layer \(mtp\.layers\.1\.mlp"),
        ({"embed_tokens.weight": np.zeros((2, 2))}, "do not fit its config.json: .*embed_tokens"),
        ({"fc.weight": np.zeros((HIDDEN, HIDDEN))}, "do not fit its config.json: .*fc.weight"),
    ],
)
def test_what_is_not_understood_is_refused(tensors, message, tmp_path):
    target = family_target("qwen3_5")
    write(tmp_path, {**head_of(target), **tensors} if tensors else {})
    with pytest.raises(CheckpointError, match=message):
        load_mtp(tmp_path, target, dtype=mx.float32)


def test_other_targets_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"of the family llama; heads .* qwen3_next, qwen3_5"):
        load_mtp(tmp_path, tiny_target("llama"), dtype=mx.float32)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(CheckpointError, match="cannot read the weights in"):
        load_mtp(tmp_path, family_target("qwen3_5"), dtype=mx.float32)
