"""Drafter folders of every layout, read: reduced vocabularies, own heads and mask rows, precision, damage."""

import io
import json
import pickle
import zipfile
from collections import OrderedDict
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cases import CASES, HIDDEN, VOCAB, make_weights, write_folder
from tiny import context_rows, drafted_tokens, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters import checkpoint
from dflash_mlx.drafters.checkpoint import drafter_precision, load_drafter, read_checkpoint
from dflash_mlx.drafters.dflash2 import DFlash2Drafter
from dflash_mlx.drafters.dflash_state import draft_logits
from dflash_mlx.errors import CheckpointError
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.rounding import relative_difference

IDS = [3, 4, 9, 20, 33]


def write(folder, config=None, **tensors):
    """The plain case's folder with more fields and tensors."""
    write_folder(folder, {**CASES["full"], **(config or {})})
    weights = {name: mx.array(x) for name, x in make_weights(CASES["full"]).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), {**weights, **tensors})
    return folder


def offsets(ids):
    return mx.array([token - i for i, token in enumerate(ids)], dtype=mx.int64)


def speculators(folder, **tensors):
    """The plain case in the layout of speculators, with a reduced vocabulary."""
    layer = {k: v for k, v in CASES["full"].items() if k not in ("architectures", "dflash_config", "block_size")}
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "aux_hidden_state_layer_ids": [2, 5, 7],
        "block_size": 6,
        "mask_token_id": 39,
        "draft_vocab_size": len(IDS),
    }
    write(folder, None, **tensors)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def hidden_without_context(drafter):
    block = mx.random.normal((1, 4, HIDDEN), key=mx.random.key(0))
    return drafter(block, context_rows(drafter, drafter.make_cache(), 4))


def test_speculators_is_the_same_drafter(tmp_path):
    t2d = mx.array([token in IDS for token in range(VOCAB)])
    copies = {"embed_tokens.weight": mx.zeros((VOCAB, HIDDEN)), "verifier_norm.weight": mx.ones(HIDDEN)}
    folder = speculators(tmp_path / "a", d2t=offsets(IDS), t2d=t2d, **copies)
    drafter = load_drafter(folder, dtype=mx.float32)
    same = load_drafter(write(tmp_path / "b"), dtype=mx.float32)
    assert drafter.config.draft_token_ids == tuple(IDS)
    assert replace(drafter.config, draft_token_ids=(), num_target_layers=9) == same.config
    assert mx.array_equal(hidden_without_context(drafter), hidden_without_context(same)).item()


def test_a_head_of_its_own_drafts_its_own_tokens(tmp_path):
    head = mx.random.normal((len(IDS), HIDDEN), key=mx.random.key(1))
    folder = speculators(tmp_path, d2t=offsets(IDS), **{"lm_head.weight": head})
    drafter = load_drafter(folder, dtype=mx.float32)
    target = tiny_target("llama", vocab_size=VOCAB, num_hidden_layers=9)
    hidden = mx.random.normal((3, HIDDEN), key=mx.random.key(2))
    assert mx.allclose(draft_logits(drafter, target, hidden), hidden @ head.T, atol=1e-5).item()
    assert drafted_tokens(target, drafter, [1, 2], 20, FixedWidth(4)) == plain_tokens(target, [1, 2], 20)


def test_over_the_whole_vocabulary_the_head_is_the_targets(tmp_path):
    folder = write(tmp_path, {"draft_vocab_size": VOCAB}, **{"lm_head.weight": mx.zeros((VOCAB, HIDDEN))})
    config = load_drafter(folder, dtype=mx.float32).config
    assert not config.own_head
    assert config.draft_token_ids == ()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "drafts 5 of 40 tokens, and the tensor d2t, which says which ones, is missing"),
        ({"d2t": offsets([3, 4, 9, 20, 40])}, "should name 5 different tokens of 40; found 5 entries from 3 to 40"),
        ({"d2t": offsets([3, 3, 9, 20, 30])}, "5 different tokens"),
        ({"d2t": offsets([3, 4])}, "found 2 entries"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_refused(tensors, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load_drafter(speculators(tmp_path, **tensors), dtype=mx.float32)


@pytest.mark.parametrize("shape", [(HIDDEN,), (1, HIDDEN)])
def test_a_mask_row_of_its_own_takes_the_place_of_the_targets(shape, tmp_path):
    row = mx.random.normal(shape, key=mx.random.key(3))
    drafter = load_drafter(write(tmp_path, **{"mask_embedding.weight": row}), dtype=mx.float32)
    table = mx.random.normal((VOCAB, HIDDEN), key=mx.random.key(4))
    embedded = drafter.embed_block(mx.array([[5, 39, 39]]), lambda tokens: table[tokens])
    assert mx.array_equal(embedded, mx.stack([table[5], row.reshape(-1), row.reshape(-1)])[None]).item()


class Name:
    """Pickles as a reference to a global of that name, whether or not there is one here."""

    def __init__(self, module, name):
        self.module, self.name = module, name


def write_torch(path, value, storages, *, call=("torch._utils", "_rebuild_tensor_v2")):
    """A file as torch.save writes it, by hand: `value(tensors)` around tensors that are views of storages.

    storages: a storage's class, its bytes, and the tensor's shape, for each.
    """

    class Pickler(pickle._Pickler):
        def persistent_id(self, obj):
            if isinstance(obj, tuple) and obj and obj[0] == "storage":
                return obj
            return None

        def save(self, obj, save_persistent_id=True):
            if isinstance(obj, Name):
                self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
                return
            super().save(obj, save_persistent_id)

    class Tensor:
        def __init__(self, key):
            self.key = key

    def save_tensor(pickler, tensor):
        storage, _, shape = storages[tensor.key]
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        pickler.save(Name(*call))
        key = ("storage", Name("torch", storage), str(tensor.key), "cpu", int(np.prod(shape)))
        pickler.save((key, 0, tuple(shape), strides, False, None))
        pickler.write(pickle.REDUCE)

    Pickler.dispatch = {**pickle._Pickler.dispatch, Tensor: save_tensor}
    out = io.BytesIO()
    Pickler(out, protocol=2).dump(value([Tensor(key) for key in range(len(storages))]))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", out.getvalue())
        for key, (_, data, _) in enumerate(storages):
            archive.writestr(f"archive/data/{key}", data)


def torch_file(path, value, data, *, storage="BFloat16Storage", **options):
    """The same with one tensor of 32 numbers: `value(tensor)`."""
    write_torch(path, lambda tensors: value(tensors[0]), [(storage, data, (HIDDEN,))], **options)


STORAGES = {"float32": "FloatStorage", "int64": "LongStorage", "bool": "BoolStorage"}


def tensors_file(path, arrays):
    """The same with a dictionary of arrays, as a model's weights are saved."""
    storages = [(STORAGES[str(array.dtype)], array.tobytes(), array.shape) for array in arrays.values()]
    write_torch(path, lambda tensors: OrderedDict(zip(arrays, tensors, strict=True)), storages)


ROW = np.arange(HIDDEN, dtype=np.float32) / 8
BITS = (ROW.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.mark.parametrize(
    "value",
    [lambda row: row, lambda row: {"mask_token_id": 39, "embedding": row}],
    ids=["tensor", "dictionary"],
)
def test_a_mask_row_in_a_pytorch_file(value, tmp_path):
    torch_file(write(tmp_path) / "mask_embedding.pt", value, BITS)
    drafter = load_drafter(tmp_path, dtype=mx.float32)
    assert np.array(drafter.mask_embedding).tolist() == ROW.tolist()


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"call": ("os", "system")}, "it asks for os.system"),
        ({"storage": "DoubleStorage"}, "it asks for torch.DoubleStorage"),
        ({"storage": "IntStorage", "data": bytes(4 * HIDDEN)}, "numbers of the type mlx.core.int32"),
        ({"value": lambda row: {"mask_token_id": 7, "embedding": row}}, "for the mask token 7, config.json says 39"),
        ({"value": lambda row: [1]}, "cannot read the drafter's mask embedding"),
        ({"data": BITS[:9]}, "cannot read the drafter's mask embedding"),
        ({"data": BITS[:40]}, "cannot read the drafter's mask embedding"),
    ],
)
def test_a_pytorch_file_runs_nothing(file, message, tmp_path):
    torch_file(write(tmp_path) / "mask_embedding.pt", **{"value": lambda row: row, "data": BITS, **file})
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path, dtype=mx.float32)


def test_a_cut_pytorch_file_is_named(tmp_path):
    (write(tmp_path) / "mask_embedding.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt: it is no zip archive.*fetch the file again"):
        load_drafter(tmp_path, dtype=mx.float32)


def test_no_drafter_runs_in_float16():
    assert drafter_precision(mx.float16, lacks_bfloat16=False) == (mx.bfloat16, None)
    assert drafter_precision(mx.bfloat16, lacks_bfloat16=False) == (mx.bfloat16, None)
    assert drafter_precision(mx.float32, lacks_bfloat16=False) == (mx.float32, None)
    assert drafter_precision(mx.float16, lacks_bfloat16=True) == (mx.float32, 4)
    assert drafter_precision(mx.bfloat16, lacks_bfloat16=True) == (mx.float32, 4)
    assert drafter_precision(mx.float32, lacks_bfloat16=True) == (mx.float32, None)


@pytest.mark.parametrize("kind", [{}, {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 64}])
def test_where_bfloat16_is_imitated_small_weights_meet_wide_activations(kind, tmp_path, monkeypatch):
    """A float16 target with such a drafter: nothing overflows, and answers stay its own."""
    from dflash_mlx.training.export import checkpoint_config

    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, **kind}
    if kind:
        sizes["selector_top_k"] = 8
    saved = tiny_drafter(block_size=5, **sizes)
    raw = checkpoint_config(saved.config)
    raw["dflash_config"] |= {name: sizes[name] for name in sizes if name.startswith(("conv", "selector"))}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    saved.save_weights(str(tmp_path / "model.safetensors"))
    monkeypatch.setattr(checkpoint, "lacks_bfloat16", lambda: True)
    drafter = load_drafter(tmp_path, dtype=mx.float16)
    assert isinstance(drafter, DFlash2Drafter) == bool(kind)
    assert drafter.dtype == mx.float32
    assert drafter.layers[0].mlp.up_proj.bits == 4
    target = tiny_target("llama", hidden_size=64, intermediate_size=64, vocab_size=48)
    target.model.set_dtype(mx.float16)
    session = Session(target, drafter)
    steps = list(decode(session, [1, 2, 3], strategy=Greedy(), policy=FixedWidth(4), max_tokens=12, eos_ids=set()))
    assert sum(len(step.tokens) for step in steps) == 12
    assert session.draft_cache[0].keys.dtype == mx.float32


def test_weights_that_do_not_fit_are_named(tmp_path):
    write(tmp_path, **{"layers.0.mlp_gate.weight": mx.zeros((2, 2))})
    with pytest.raises(CheckpointError, match=r"do not fit its config\.json: .*mlp_gate.*[^.]\. Fetch"):
        load_drafter(tmp_path, dtype=mx.float32)


def test_public_names_of_codebooks(tmp_path):
    read = read_checkpoint(write_folder(tmp_path, CASES["second"]))
    assert "candidate_selector.predecessor_codebook.weight" in read.weights
    assert read.config.is_dflash2


def test_a_quantized_dflash_2_drafter(tmp_path):
    """Close to the plain one, and the answer stays the target's."""
    from dflash_mlx.hub.quantize import quantize_drafter

    config = {**CASES["second"], "dflash_config": {**CASES["second"]["dflash_config"], "selector_rank": 32}}
    (tmp_path / "small").mkdir()
    quantize_drafter(write_folder(tmp_path / "plain", config), tmp_path / "small", bits=8, group_size=32)
    drafter = load_drafter(tmp_path / "small", dtype=mx.float32, keep_quantized=True)
    plain = load_drafter(tmp_path / "plain", dtype=mx.float32)
    found, expected = hidden_without_context(drafter), hidden_without_context(plain)
    assert relative_difference(found, expected) < 0.1
    expanded = load_drafter(tmp_path / "small", dtype=mx.float32, keep_quantized=False)
    assert mx.allclose(hidden_without_context(expanded), found, atol=1e-4).item()
    target = tiny_target("llama", vocab_size=VOCAB, num_hidden_layers=9)
    assert drafted_tokens(target, drafter, [1, 2], 15, FixedWidth(4)) == plain_tokens(target, [1, 2], 15)


def test_a_quantized_reduced_vocabulary_keeps_its_tokens(tmp_path):
    from dflash_mlx.hub.quantize import quantize_drafter

    ids = [3, 4, 9, 20, 39]
    (tmp_path / "small").mkdir()
    head = mx.random.normal((len(ids), HIDDEN), key=mx.random.key(5))
    folder = speculators(tmp_path / "plain", d2t=offsets(ids), **{"lm_head.weight": head})
    quantize_drafter(folder, tmp_path / "small", bits=8, group_size=32)
    drafter = load_drafter(tmp_path / "small", dtype=mx.float32, keep_quantized=True)
    assert drafter.config.draft_token_ids == tuple(ids)
    assert drafter.lm_head.bits == 8


def test_what_scales_do_not_divide_stays_as_it_is(tmp_path, monkeypatch):
    """Where a drafter is quantized on loading, 64 weights share a scale: rows of 128 can be, those of 32 and 96 not."""
    monkeypatch.setattr(checkpoint, "drafter_precision", lambda *_, **__: (mx.float32, 8))
    config = {**CASES["full"], "intermediate_size": 128}
    drafter = load_drafter(write_folder(tmp_path, config), dtype=mx.float32)
    for layer in drafter.layers:
        assert isinstance(layer.mlp.down_proj, nn.QuantizedLinear)
        assert type(layer.mlp.up_proj) is nn.Linear
        assert type(layer.self_attn.q_proj) is nn.Linear
    assert type(drafter.fc) is nn.Linear
    assert mx.isfinite(hidden_without_context(drafter)).all().item()
