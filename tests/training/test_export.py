"""The exported folder: read back, quantized, limited to some tokens, uploaded."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import HIDDEN, tiny_drafter

from dflash_mlx.drafters.checkpoint import load_drafter
from dflash_mlx.drafters.config import parse_draft_config
from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.training import export
from dflash_mlx.training.export import PUBLIC_FILES, export_drafter, push
from dflash_mlx.training.store import Conversation
from dflash_mlx.training.vocabulary import choose_tokens

KINDS = {
    "full": {},
    "sliding": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9},
    "numbers": {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "max_position_embeddings": 999, "num_target_layers": 7},
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_is_exported_is_read_again(tmp_path, kind):
    drafter = tiny_drafter(**KINDS[kind])
    export_drafter(drafter, tmp_path, quantize=None)
    read = load_drafter(tmp_path, dtype=mx.float32)
    assert read.config == drafter.config
    for (name, found), (_, expected) in zip(
        tree_flatten(read.parameters()), tree_flatten(drafter.parameters()), strict=True
    ):
        assert mx.array_equal(found, expected.astype(mx.bfloat16).astype(mx.float32)).item(), name


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_export_is_close(tmp_path, bits):
    drafter = tiny_drafter(hidden_size=64, intermediate_size=64, head_dim=16)
    export_drafter(drafter, tmp_path, quantize=bits)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["quantization"]["bits"] == bits
    read = load_drafter(tmp_path, dtype=mx.float32, keep_quantized=False)
    assert read.config == drafter.config
    for (name, found), (_, expected) in zip(
        tree_flatten(read.parameters()), tree_flatten(drafter.parameters()), strict=True
    ):
        # Half a step of the grid, whose range is at most that of the whole matrix, and rounding of scales to bfloat16.
        span = (expected.max() - expected.min()).item()
        assert mx.abs(found - expected).max().item() <= 0.5 * span / (2**bits - 1) + 0.02 * span, name


def test_widths_that_cannot_be_quantized_are_named(tmp_path):
    with pytest.raises(DFlashError, match="cannot quantize matrices of widths"):
        export_drafter(tiny_drafter(intermediate_size=50), tmp_path, quantize=4)


def test_tokens_to_draft_are_part_of_the_config(tmp_path):
    drafter = tiny_drafter()
    ids = [2, 5, 40]
    export_drafter(drafter, tmp_path, quantize=None, draft_token_ids=ids)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["dflash_config"]["draft_token_ids"] == ids
    assert parse_draft_config(raw) == replace(drafter.config, draft_token_ids=tuple(ids))


def test_a_kept_config_loses_what_belonged_to_its_own_export(tmp_path):
    """A warm start keeps the config.json it came with, in its own dialect."""
    drafter = tiny_drafter()
    export_drafter(drafter, tmp_path, quantize=None, draft_token_ids=[1, 2])
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"quantization": {"bits": 4, "group_size": 32}, "auto_map": {"AutoModel": "x"}}
    export_drafter(drafter, tmp_path / "b", config=raw, quantize=None)
    kept = json.loads((tmp_path / "b" / "config.json").read_text())
    assert "quantization" not in kept
    assert "draft_token_ids" not in kept["dflash_config"]
    assert kept["auto_map"] == raw["auto_map"]
    assert load_drafter(tmp_path / "b", dtype=mx.float32).config == drafter.config


def conversation(prompt, answer):
    tokens = np.array([*prompt, *answer], np.int32)
    return Conversation(tokens, ((len(prompt), len(tokens)),))


def test_the_most_frequent_tokens_of_the_answers_are_chosen():
    training = [conversation([9] * 50, [4, 4, 4, 7, 7, 1]), conversation([9], [4, 3, 3])]
    held = [conversation([1], [4, 4, 7, 8])]
    chosen = choose_tokens(training, held, 3, eos_ids={2}, vocab_size=10)
    # 4 (four times), 3 and 7 (twice); the end token is there though no answer reached it; 9 is in prompts only.
    assert chosen.ids == (2, 3, 4, 7)
    assert chosen.covered == pytest.approx(8 / 9)
    assert chosen.covered_held_out == pytest.approx(3 / 4)
    assert choose_tokens(training, held, 2, eos_ids={2}, vocab_size=10).ids == (2, 3, 4)
    # No more than the answers use.
    assert choose_tokens(training, held, 8, eos_ids={2}, vocab_size=10).ids == (1, 2, 3, 4, 7)
    with pytest.raises(UsageError, match="use 5 different tokens and the drafter's selector chooses among 6"):
        choose_tokens(training, held, 8, eos_ids={2}, vocab_size=10, least=6)
    with pytest.raises(UsageError, match="from 1 to 9"):
        choose_tokens(training, held, 10, eos_ids={2}, vocab_size=10)


class FakeHub:
    """Takes what would be uploaded."""

    def __init__(self, error=None):
        self.error, self.created, self.uploads = error, [], []

    def create_repo(self, repo, *, exist_ok):
        self.created.append((repo, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, allow_patterns):
        if self.error:
            raise self.error
        self.uploads.append((repo_id, sorted(p.name for p in folder_path.iterdir() if p.name in allow_patterns)))


def test_push_uploads_the_public_files_only(tmp_path):
    for name in (*PUBLIC_FILES, "notes.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "work").mkdir()
    hub = FakeHub()
    assert push(tmp_path, "me/drafter", api=hub) == "https://huggingface.co/me/drafter"
    assert hub.created == [("me/drafter", True)]
    assert hub.uploads == [("me/drafter", sorted(PUBLIC_FILES))]


def test_a_failed_upload_says_that_the_drafter_is_safe(tmp_path):
    with pytest.raises(DFlashError, match=r"could not upload to me/drafter: no network.*complete in"):
        push(tmp_path, "me/drafter", api=FakeHub(OSError("no network")))


def test_the_group_size_divides_all_widths():
    assert export._group_size(tiny_drafter(hidden_size=64, intermediate_size=128, head_dim=16)) == 64
    assert HIDDEN == 32
    assert export._group_size(tiny_drafter(intermediate_size=64)) == 32
