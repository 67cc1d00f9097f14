"""scripts/stand_ins.py writes drafters of three kinds, which load and draft, and which learn from answers."""

import importlib.util
import json
from pathlib import Path

import pytest
from tiny_folder import write_target

from dflash_mlx import SamplingParams, generate, load_pair

spec = importlib.util.spec_from_file_location("stand_ins", Path(__file__).parent.parent / "scripts" / "stand_ins.py")
assert spec is not None
assert spec.loader is not None
stand_ins = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_ins)

KINDS = {"half": "draft_model", "eagle3": "eagle3", "medusa": "medusa"}
PROMPTS = ["one two", "a sea", "9 times 9"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("stand-ins") / "target", orderly=True)


@pytest.fixture(scope="module")
def untaught(target):
    stand_ins.make_stand_ins(target, target.parent / "untaught", answers=0, steps=0, batch_size=1)
    return target.parent / "untaught"


def acceptance_length(target, drafter, method):
    """Of greedy answers, which have to be those of plain decoding."""
    pair = load_pair(model=str(target), draft_model=str(drafter), check=False)
    assert pair.method == method
    rounds = tokens = 0
    for prompt in PROMPTS:
        drafted = generate(pair, prompt, SamplingParams(max_tokens=24), width=2)
        assert drafted.token_ids == generate(pair, prompt, SamplingParams(max_tokens=24), draft=False).token_ids
        rounds, tokens = rounds + drafted.acceptance.rounds, tokens + drafted.acceptance.tokens
    return tokens / rounds


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_known_by_its_files_and_drafts(kind, target, untaught):
    assert acceptance_length(target, untaught / kind, KINDS[kind]) >= 1


def test_half_of_the_layers_are_left(target, untaught):
    layers = [
        json.loads((folder / "config.json").read_text())["num_hidden_layers"] for folder in (target, untaught / "half")
    ]
    assert layers[0] == 2 * layers[1]


@pytest.mark.long
def test_what_has_learnt_keeps_more_drafts(target):
    """This target mostly says the same token after a token, which one can learn. Untaught drafters keep none."""
    out = target.parent / "taught"
    stand_ins.make_stand_ins(target, out, answers=32, steps=50, batch_size=8)
    for kind in ("eagle3", "medusa"):
        assert acceptance_length(target, out / kind, KINDS[kind]) > 1.5
