"""Wrong and damaged drafters of every kind: the command says in one line what is wrong and what to do, and ends."""

import os
import pickle
import zipfile

import mlx.core as mx
import numpy as np
import pytest
import test_eagle3
import test_medusa
import test_mtp
from tiny import HIDDEN, VOCAB
from tiny_families import family_target, unavailable
from tiny_folder import write_drafter, write_target


class Code:
    """What a pickled file may hold: something that would be run when it is read."""

    def __reduce__(self):
        return os.mkdir, ("this-was-run",)


def eagle3(folder, layout="SGLang", **changes):
    test_eagle3.write(folder, layout, **changes)


def cut(folder, name="model.safetensors"):
    path = folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_eagle3(folder):
    eagle3(folder)
    cut(folder)


def eagle3_with_code(folder):
    eagle3(folder, "authors")
    with zipfile.ZipFile(folder / "pytorch_model.bin") as file:
        members = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as file:
        for name, content in members.items():
            file.writestr(name, pickle.dumps(Code()) if name.endswith("data.pkl") else content)


def medusa(folder, **changes):
    weights = {**test_medusa.heads_of(), **changes}
    test_medusa.write(folder, {name: array for name, array in weights.items() if array is not None})


def cut_medusa(folder):
    medusa(folder)
    cut(folder, "medusa_lm_head.pt")


def medusa_of_another_target(folder):
    test_medusa.write(folder, test_medusa.heads_of(2 * HIDDEN))


def mtp(folder, **tensors):
    head = {**test_mtp.head_of(family_target("qwen3_5")), **tensors}
    test_mtp.write(folder, {name: array for name, array in head.items() if array is not None})


def cut_mtp(folder):
    mtp(folder)
    cut(folder)


def another_kind(folder):
    eagle3(folder)
    (folder / "config.json").write_text('{"model_type": "hydra"}')


def draft_model(folder, family="llama"):
    if family != "llama" and (reason := unavailable(family)):
        pytest.skip(reason)
    folder.rmdir()
    write_target(folder, family=family)


def other_tokens(folder):
    draft_model(folder)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"one": 7', '"two": 7'))


def broken_config(folder):
    draft_model(folder)
    cut(folder, "config.json")


def without_weights(folder):
    draft_model(folder)
    (folder / "model.safetensors").unlink()


def dflash_without_a_tensor(folder):
    folder.rmdir()
    write_drafter(folder)
    arrays = mx.load(str(folder / "model.safetensors"))
    del arrays["fc.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)


FLOATS = np.zeros((2, 2), np.float32)
CASES = {
    "EAGLE-3 without a tensor": (lambda f: eagle3(f, without=["fc.weight"]), "do not fit its config.json"),
    "EAGLE-3, cut": (cut_eagle3, "is damaged: expected"),
    "EAGLE-3 of two layers": (lambda f: eagle3(f, num_hidden_layers=2), "has 2 layers, for which there is no code"),
    "EAGLE-3 of another target": (lambda f: eagle3(f, vocab_size=VOCAB + 1), "a vocabulary of 49, the target has 48"),
    "EAGLE-3, tokens out of range": (
        lambda f: eagle3(f, tensors={"d2t": np.full(test_eagle3.DRAFTED, 90)}),
        "should name 30 different tokens of 48",
    ),
    "EAGLE-3 with code in its weights": (eagle3_with_code, "mkdir. Expected a dictionary of tensors"),
    "Medusa, cut": (cut_medusa, "medusa_lm_head.pt"),
    "Medusa without a tensor": (lambda f: medusa(f, **{"1.0.linear.bias": None}), "do not fit its config.json"),
    "Medusa with its target": (lambda f: medusa(f, **{"model.norm.weight": FLOATS}), "no part of a Medusa head"),
    "Medusa of another target": (medusa_of_another_target, "read hidden states of 64, the target's have 32"),
    "a model with other tokens": (other_tokens, "found 46 and 46 tokens, of which 45 are the same"),
    "a recurrent model": (lambda f: draft_model(f, "qwen3_5"), "should have full attention in all layers"),
    "a model whose config is cut": (broken_config, "config.json cannot be read"),
    "a model without weights": (without_weights, "has no weights"),
    "DFlash without a tensor": (dflash_without_a_tensor, "do not fit its config.json"),
    "another kind": (another_kind, "Hydra heads (hydra)"),
}


HEADS = {
    "for another family": ("llama", mtp, "the target is of the family llama"),
    "cut": ("qwen3_5", cut_mtp, "is damaged: expected"),
    "without a tensor": ("qwen3_5", lambda f: mtp(f, **{"fc.weight": None}), "do not fit its config.json"),
    "of two layers": (
        "qwen3_5",
        lambda f: mtp(f, **{"layers.1.mlp.up_proj.weight": FLOATS}),
        "has more than one layer",
    ),
    "that is not there": ("qwen3_5", lambda f: test_mtp.write(f, {}), "have no tensors of such a head"),
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets")
    families = ["llama"] if unavailable("qwen3_5") else ["llama", "qwen3_5"]
    return {family: str(write_target(folder / family, family=family)) for family in families}


def refused(run, target, folder, write, *options):
    """The one line with which the command ends, when the drafter is what `write` makes."""
    folder.mkdir()
    write(folder)
    code, out, err = run("generate", "one", "--model", target, "--draft-model", str(folder), *options)
    assert (code, out) == (1, "")
    [line] = [line for line in err.splitlines() if not line.startswith("loading the")]
    assert line.startswith("error: ")
    assert line.endswith(".")
    return line


@pytest.mark.parametrize("case", CASES)
def test_one_line_says_what_is_wrong(case, run, targets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write, message = CASES[case]
    assert message in refused(run, targets["llama"], tmp_path / "drafter", write)
    assert not (tmp_path / "this-was-run").exists()


@pytest.mark.parametrize("case", HEADS)
def test_one_line_says_what_is_wrong_with_a_head(case, run, targets, tmp_path):
    if reason := unavailable("qwen3_5"):
        pytest.skip(reason)
    family, write, message = HEADS[case]
    assert message in refused(run, targets[family], tmp_path / "head", write, "--method", "mtp")
