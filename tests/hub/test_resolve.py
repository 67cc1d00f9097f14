"""Which drafter a target gets: by name, card and build; and what is refused."""

import json
from pathlib import Path

import pytest

from dflash_mlx.errors import UsageError
from dflash_mlx.hub import resolve
from dflash_mlx.hub.naming import base_name, families_of, split_precision
from dflash_mlx.hub.registry import list_pairs
from dflash_mlx.hub.resolve import TargetFacts, match_target, pair_for_target, read_card

QWEN3_4B = {"model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "vocab_size": 151936}
QWEN_27B = {
    "model_type": "qwen3_5",
    "text_config": {"model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248320},
}


@pytest.mark.parametrize(
    ("name", "base", "bits"),
    [
        ("Qwen3-4B", "Qwen3-4B", None),
        ("Qwen3-4B-4bit", "Qwen3-4B", 4.5),
        ("Qwen3-4B-8bit", "Qwen3-4B", 8.5),
        ("Qwen3-4B-bf16", "Qwen3-4B", 16.0),
        ("Qwen3-4B-4bit-DWQ", "Qwen3-4B", 4.5),
        ("Qwen3-4B-4bit-DWQ-053125", "Qwen3-4B", 4.5),
        ("Qwen3.5-27B-MLX-6bit", "Qwen3.5-27B", 6.5),
        ("gpt-oss-20b-MXFP4-Q8", "gpt-oss-20b", 4.25),
        ("gemma-4-31B-it-nvfp4", "gemma-4-31B-it", 4.5),
        ("GLM-5.1-FP8", "GLM-5.1", 8.25),
        ("Qwen3-4B-Instruct-2507-4bit", "Qwen3-4B-Instruct-2507", 4.5),
        ("Qwen3-Coder-30B-A3B-Instruct", "Qwen3-Coder-30B-A3B-Instruct", None),
    ],
)
def test_marks_of_precision(name: str, base: str, bits: float | None) -> None:
    assert split_precision(name) == (base, bits)
    assert base_name(f"someone/{name}@main") == base.lower()


def test_every_known_target_and_its_quantizations_find_their_own_pair() -> None:
    pairs = list_pairs()
    for pair in pairs:
        assert pair.base is not None
        repos = [pair.base, pair.target.repo, *(other.repo for other in pair.other_targets)]
        for repo in filter(None, repos):
            found = match_target(TargetFacts(repo), pairs)
            assert found is not None
            assert (found.pair.name, found.warning) == (pair.name, None)
        for mark in ("3bit", "6bit", "bf16", "4bit-DWQ", "mxfp4"):
            found = match_target(TargetFacts(f"mlx-community/{pair.base.partition('/')[2]}-{mark}"), pairs)
            assert found is not None
            assert (found.pair.name, found.how, found.warning) == (pair.name, "quantization", None)


def test_a_name_that_its_config_contradicts_is_not_believed() -> None:
    wrong = {**QWEN3_4B, "hidden_size": 1024}
    assert match_target(TargetFacts("me/Qwen3-4B-4bit", QWEN3_4B), list_pairs()) is not None
    assert match_target(TargetFacts("me/Qwen3-4B-4bit", wrong), list_pairs()) is None


def test_a_fine_tune_is_known_by_its_card_and_gets_a_warning() -> None:
    match = match_target(TargetFacts("me/Poet", QWEN3_4B, ("Qwen/Qwen3-4B",)), list_pairs())
    assert match is not None
    assert (match.pair.name, match.how) == ("qwen3-4b", "fine-tune")
    assert "fewer drafts" in (match.warning or "")


def test_a_fine_tune_is_known_by_its_build() -> None:
    match = match_target(TargetFacts("me/Poet", QWEN3_4B), list_pairs())
    assert match is not None
    assert (match.pair.name, match.how) == ("qwen3-4b", "fine-tune")


def test_targets_of_the_same_build_need_a_name_to_tell_them_apart() -> None:
    match = match_target(TargetFacts("me/Qwen3.6-27B-Poet", QWEN_27B), list_pairs())
    assert match is not None
    assert match.pair.name == "qwen3.6-27b"
    with pytest.raises(
        UsageError, match=r"several known targets.*z-lab/Qwen3\.5-27B-DFlash.*z-lab/Qwen3\.6-27B-DFlash"
    ):
        match_target(TargetFacts("me/Poet", QWEN_27B), list_pairs())


def test_a_drafter_is_no_target() -> None:
    facts = TargetFacts("me/d", {"architectures": ["DFlashDraftModel"], "dflash_config": {}})
    with pytest.raises(UsageError, match="is a drafter"):
        match_target(facts, list_pairs())


def test_an_unknown_folder_says_what_it_is_and_what_is_like_it(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(UsageError, match=r"\(qwen3, 28 layers, hidden size 1024\).*qwen3-4b.*dflash-mlx train"):
        pair_for_target(str(tmp_path))


def test_an_unknown_hub_model_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = TargetFacts("me/Poet", {**QWEN3_4B}, ("Qwen/Qwen3-4B",))
    monkeypatch.setattr(resolve, "_remote_facts", lambda source: facts)
    assert pair_for_target("me/Poet").pair.name == "qwen3-4b"


@pytest.mark.parametrize(
    ("head", "bases", "quantized"),
    [
        ("base_model: Qwen/Qwen3-4B", ("Qwen/Qwen3-4B",), False),
        ("tags: [a]\nbase_model:\n- Qwen/Qwen3-4B\n- a/b.c\nlicense: mit", ("Qwen/Qwen3-4B", "a/b.c"), False),
        ("base_model: a/b\nbase_model_relation: quantized", ("a/b",), True),
        ("base_model_relation: finetune", (), False),
    ],
)
def test_the_base_model_of_a_card(tmp_path: Path, head: str, bases: tuple[str, ...], quantized: bool) -> None:
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\n# A model\nbase_model: no/no\n")
    assert read_card(tmp_path / "README.md") == (bases, quantized)
    assert read_card(tmp_path / "none.md") == ((), False)


def test_a_card_that_says_quantized_brings_no_warning() -> None:
    match = match_target(TargetFacts("me/small", QWEN3_4B, ("Qwen/Qwen3-4B",), quantized=True), list_pairs())
    assert match is not None
    assert (match.pair.name, match.how, match.warning) == ("qwen3-4b", "quantization", None)


def test_families_are_mlx_lm_model_files() -> None:
    assert families_of(QWEN_27B) == ["qwen3_5"]
    assert families_of({"model_type": "minimax_m2"}) == ["minimax"]
    assert families_of({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}}) == ["gemma4"]
    assert families_of({"model_type": "kimi_k25", "text_config": {"model_type": "x"}}) == ["kimi_k25", "x"]
    assert families_of({}) == []
