"""Medusa heads: what they compute against NumPy, their files, what is refused, and answers with chains and trees."""

import json
import random

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save_file
from test_batches import RandomGroup
from test_checkpoint import tensors_file
from test_lossless import RandomWidth
from tiny import HIDDEN, VOCAB, plain_tokens, tiny_target

from dflash_mlx.checks import check_pair, check_shapes
from dflash_mlx.decoding.accept import Coupled, Greedy, Rejection
from dflash_mlx.decoding.decode import decode, prefill
from dflash_mlx.decoding.engine import Engine
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.contract import Drafted, Nobody
from dflash_mlx.drafters.medusa import MedusaDrafter, MedusaState, is_medusa, load_medusa
from dflash_mlx.errors import CheckpointError, PairError
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams

HEADS, BLOCKS = 5, 2
CONFIG = {"medusa_num_heads": 2, "medusa_num_layers": BLOCKS, "base_model_name_or_path": "some/model"}


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def heads_of(size=HIDDEN, vocab=VOCAB):
    rng = np.random.default_rng(4)
    shapes = {}
    for i in range(HEADS):
        for j in range(BLOCKS):
            shapes |= {f"{i}.{j}.linear.weight": (size, size), f"{i}.{j}.linear.bias": (size,)}
        shapes[f"{i}.{BLOCKS}.weight"] = (vocab, size)
    draws = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: x / x.shape[-1] ** np.float32(0.5) for name, x in draws.items()}


def write(folder, weights, file="medusa_lm_head.pt", **changes):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    if file.endswith(".pt"):
        tensors_file(folder / file, weights)
    else:
        save_file(weights, folder / file)
    return folder


@pytest.fixture
def drafter(target, tmp_path):
    return load_medusa(write(tmp_path, heads_of()), target, dtype=mx.float32)


def reference(w, hidden):
    """Section 2.1 of the paper: a hidden state (D,) -> logits (HEADS, V)."""
    rows = []
    for i in range(HEADS):
        x = hidden
        for j in range(BLOCKS):
            inner = x @ w[f"{i}.{j}.linear.weight"].T + w[f"{i}.{j}.linear.bias"]
            x = x + inner / (1 + np.exp(-inner))
        rows.append(x @ w[f"{i}.{BLOCKS}.weight"].T)
    return np.stack(rows)


@pytest.mark.parametrize(("file", "prefix"), [("medusa_lm_head.pt", ""), ("model.safetensors", "medusa_head.")])
def test_drafts_follow_from_the_state_before_the_anchor(target, file, prefix, tmp_path):
    """However many heads config.json tells of."""
    w = heads_of()
    drafter = load_medusa(write(tmp_path, {prefix + name: x for name, x in w.items()}, file), target, dtype=mx.float32)
    assert (drafter.method, drafter.places, drafter.taps) == ("medusa", HEADS, (len(target.layers),))
    text = [5, 9, 2, 30, 7]
    _, states = target.forward_tapped(mx.array([text]), target.make_cache(), drafter.taps)
    session = Session(target, drafter)
    prefill(session, text[:-1])
    state = drafter.open(target, session.draft_cache, 4)
    drafted = state.propose([Nobody()], mx.array([7]), mx.array([4]), HEADS, room=9)
    expected = reference(w, np.array(states[0, 3]))
    assert np.abs(np.array(drafted.logits[0]) - expected).max() < 1e-4
    assert drafted.tokens[0].tolist() == expected.argmax(axis=-1).tolist()


def test_a_pair_is_checked_by_running_it(target, drafter):
    check_shapes(target, drafter)
    assert "drafts are finite" in check_pair(target, drafter, dtype=mx.float32)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))])
def test_answers_made_together_are_the_targets_own(target, drafter, seed, monkeypatch):
    """With chains and trees, of drafts of which some are the answer's; each is made from the newest state before it."""
    rng, texts, w = random.Random(seed), {}, heads_of()
    propose, compared = MedusaState.propose, []

    def helped(state, writers, anchors, at, places, *, room, tree=False):
        drafted = propose(state, writers, anchors, at, places, room=room, tree=tree)
        logits = np.array(drafted.logits)
        for row, writer in enumerate(writers):
            text, begin = texts.get(id(writer), []), int(at[row])
            if 0 < begin < len(text):
                states = target.forward_tapped(mx.array([text[:begin]]), target.make_cache(), drafter.taps)[1]
                compared.append(np.abs(logits[row] - reference(w, np.array(states[0, -1]))[:places]).max())
                for place, token in enumerate(text[begin + 1 :][: rng.randint(0, places)]):
                    logits[row, place, token] = 100
        return Drafted(mx.array(logits.argmax(axis=-1)), mx.array(logits))

    monkeypatch.setattr(MedusaState, "propose", helped)
    engine, found = Engine(target, drafter, policy=RandomGroup(rng)), {}
    for _ in range(rng.choice([1, 3])):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 9]))]
        session = Session(target, drafter)
        prefill(session, prompt[:-1])
        options = {"strategy": Greedy(), "policy": RandomWidth(rng, HEADS), "max_tokens": 25, "eos_ids": set()}
        lane = Lane(session=session, prompt=prompt, **options)
        found[lane], texts[id(lane)] = [], prompt + plain_tokens(target, prompt, 25)
        engine.join(lane)
    while engine.lanes:
        for lane, step in engine.advance():
            found[lane] += step.tokens
    for lane, tokens in found.items():
        assert lane.prompt + tokens == texts[id(lane)]
        assert {cache.offset for cache in lane.session.draft_cache} == {len(lane.session.tokens)}
    assert compared
    assert max(compared) < 1e-4


def test_sampled_answers(target, drafter):
    """With a seed, the same as without a drafter; without one, drafts are judged by rejection."""
    params = SamplingParams(temperature=1.0)

    def answer(strategy, drafter, width):
        options = {"policy": FixedWidth(width), "max_tokens": 20, "eos_ids": set()}
        steps = decode(Session(target, drafter), [3, 1, 4], strategy=strategy, **options)
        return [token for step in steps for token in step.tokens]

    assert answer(Coupled(params, seed=5), drafter, HEADS) == answer(Coupled(params, seed=5), None, 0)
    assert len(answer(Rejection(params, seed=5), drafter, HEADS)) == 20
    assert drafter.allows_rejection


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.0.weight": np.zeros((2, 2), np.float32)}, "hold model.layers.0.weight, .* no part of a Medusa"),
        ({"0.0.linear.bias": None}, "are not those of Medusa heads: 'heads.0.blocks.0.bias'"),
        ({"1.0.linear.bias": None}, "do not fit its config.json: Missing 1 parameters"),
        ({"1.2.weight": np.zeros((VOCAB - 1, HIDDEN), np.float32)}, "do not fit its config.json: .*heads.1.lm_head"),
    ],
)
def test_what_is_not_understood_is_refused(changes, message, target, tmp_path):
    weights = {name: x for name, x in {**heads_of(), **changes}.items() if x is not None}
    with pytest.raises(CheckpointError, match=message):
        load_medusa(write(tmp_path, weights), target, dtype=mx.float32)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((HIDDEN, VOCAB - 1), "a vocabulary of 47, the target has 48"), ((16, VOCAB), "hidden states of 16, .* have 32")],
)
def test_another_target_is_refused(sizes, message, target, tmp_path):
    drafter = load_medusa(write(tmp_path, heads_of(*sizes)), target, dtype=mx.float32)
    assert isinstance(drafter, MedusaDrafter)
    with pytest.raises(PairError, match=message):
        check_shapes(target, drafter)


def test_it_is_known_by_its_config():
    assert is_medusa(CONFIG)
    assert is_medusa({"model_type": "medusa"})
    assert not is_medusa({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
