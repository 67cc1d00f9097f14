"""Wrong pairs are refused at load, with the reason; a drafter that guesses like random weights is reported."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from cases import CASES, write_folder
from mlx.utils import tree_map
from tiny import FAMILIES, HIDDEN, LAYERS, SECOND, ScriptedDrafter, randomize, tiny_drafter, tiny_eagle3, tiny_target
from tiny_folder import write_target

from dflash_mlx.caches import rows
from dflash_mlx.checks import GUESS_TEXT, Guesses, check_pair, check_shapes, following, guesses_at, read_guesses
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.checkpoint import load_drafter
from dflash_mlx.drafters.contract import Nobody
from dflash_mlx.drafters.denoising import DFlashConfig
from dflash_mlx.drafters.draft_model import DraftModel
from dflash_mlx.drafters.medusa import MedusaDrafter, MedusaNetwork
from dflash_mlx.drafters.ngram import NgramDrafter
from dflash_mlx.drafters.with_ngram import WithNgram
from dflash_mlx.errors import PairError
from dflash_mlx.loading import load_pair
from dflash_mlx.runtime import backend


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_right_pair_passes(family):
    target, drafter = tiny_target(family), tiny_drafter()
    check_shapes(target, drafter)
    assert len(check_pair(target, drafter, dtype=mx.float32)) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden size of 64, the target has 32"),
        ({"vocab_size": 50}, "vocabulary of 50, the target has 48"),
        ({"num_target_layers": 6}, "6 target layers, the target has 4"),
        ({"target_layer_ids": (1, 4), "num_target_layers": None}, r"layers \[4\], the target has layers 0 to 3"),
        ({"target_layer_ids": (2, 1)}, "rising order"),
    ],
)
def test_shapes_that_do_not_fit(changes, message):
    with pytest.raises(PairError, match=message):
        check_shapes(tiny_target("llama"), tiny_drafter(**changes))


def test_a_target_whose_blocks_differ_from_its_steps():
    """A model that forgets its cache gives other logits for a block than token by token."""
    target = tiny_target("llama")
    forward = target.forward

    def forgetful(tokens, cache):
        return forward(tokens, target.make_cache() if tokens.shape[1] == 1 else cache)

    target.forward = forgetful
    with pytest.raises(PairError, match="block forward"):
        check_pair(target, tiny_drafter(), dtype=mx.float32)


def test_a_wrong_vocabulary_head():
    target = tiny_target("qwen2")
    target.head = nn.Linear(32, 48, bias=False)
    with pytest.raises(PairError, match="vocabulary head"):
        check_pair(target, tiny_drafter(), dtype=mx.float32)


def test_features_and_drafts_must_be_finite():
    drafter = tiny_drafter()
    drafter.norm.weight = drafter.norm.weight * mx.inf
    with pytest.raises(PairError, match="drafter's logits are not finite"):
        check_pair(tiny_target("llama"), drafter, dtype=mx.float32)


@pytest.mark.parametrize(("dtype", "advised"), [(mx.float32, False), (mx.bfloat16, True)])
def test_float32_is_only_advised_where_it_is_not_in_use(dtype, advised):
    drafter, target = tiny_drafter(), tiny_target("llama")
    drafter.norm.weight = drafter.norm.weight * mx.nan
    drafter.set_dtype(dtype)
    target.model.set_dtype(dtype)
    with pytest.raises(PairError, match="not finite") as caught:
        check_pair(target, drafter, dtype=dtype)
    assert ("float32" in str(caught.value)) == advised
    assert "fetch" in str(caught.value)


# Of a vocabulary in which random weights are seldom right.
MANY = 2000
TEXT = np.random.default_rng(7).integers(4, MANY, 80).tolist()
PLACES = np.linspace(8, 63, 32).astype(int).tolist()


@pytest.fixture(scope="module")
def wide():
    return tiny_target("llama", vocab_size=MANY)


def wanted_by(target, text):
    """The target's own next token at each place of a text."""
    return mx.argmax(target.forward(mx.array([text]), target.make_cache())[0], axis=-1).tolist()


def scripted(target, *, known=PLACES, second=()):
    """A drafter that knows the target's tokens at some places, at the places `second` as its second choice."""
    wanted = wanted_by(target, TEXT[:64])
    script = {place + 1: wanted[place] for place in known}
    return ScriptedDrafter(tiny_drafter(vocab_size=MANY).config, script, frozenset(place + 1 for place in second))


@pytest.mark.parametrize("changes", [{}, SECOND, {"draft_token_ids": tuple(range(MANY - 1, -1, -1))}])
@pytest.mark.parametrize("seed", range(1, 5))
def test_random_weights_are_noise(wide, seed, changes):
    guesses = read_guesses(wide, tiny_drafter(seed=seed, vocab_size=MANY, **changes), TEXT)
    assert (guesses.places, guesses.are_noise) == (32, True)
    assert abs(guesses.following - 0.5) < 0.2


def test_a_drafter_that_knows_something_is_not_noise(wide):
    """Two right guesses are enough, or the right token as second choice everywhere."""
    assert read_guesses(wide, scripted(wide), TEXT) == Guesses(32, 32, 1.0)
    lucky = read_guesses(wide, scripted(wide, known=PLACES[5:6]), TEXT)
    assert (lucky.right, lucky.are_noise) == (1, True)
    weak = read_guesses(wide, scripted(wide, known=PLACES[5:7]), TEXT)
    assert (weak.right, weak.are_noise) == (2, False)
    second = read_guesses(wide, scripted(wide, second=PLACES), TEXT)
    assert (second.right, second.following, second.are_noise) == (0, 1.0, False)


def medusa(seed):
    network = MedusaNetwork(2, HIDDEN, MANY, 1)
    randomize(network, seed)
    return MedusaDrafter(network, target_layers=LAYERS)


SLIDING = {"sliding_window": 12, "layer_types": ("sliding_attention",) * 2}
OTHERS = {
    "sliding": lambda seed: tiny_drafter(seed=seed, vocab_size=MANY, **SLIDING),
    "two steps": lambda seed: tiny_drafter(seed=seed, vocab_size=MANY).drafting_as(DFlashConfig(diffusion_steps=2)),
    "dflash+ngram": lambda seed: WithNgram(tiny_drafter(seed=seed, vocab_size=MANY)),
    "eagle3": lambda seed: tiny_eagle3(seed, vocab_size=MANY),
    "eagle3, some tokens": lambda seed: tiny_eagle3(
        seed, vocab_size=MANY, draft_token_ids=tuple(range(MANY - 1, 3, -1))
    ),
    "medusa": medusa,
    "draft_model": lambda seed: DraftModel(tiny_target("qwen3", seed=seed, vocab_size=MANY)),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("seed", range(1, 4))
def test_random_weights_of_every_kind_are_noise(wide, kind, seed):
    guesses = read_guesses(wide, OTHERS[kind](seed), TEXT)
    assert (guesses.places, guesses.are_noise) == (32, True)


def test_a_draft_model_that_is_the_target_guesses_all(wide):
    assert read_guesses(wide, DraftModel(tiny_target("llama", vocab_size=MANY)), TEXT) == Guesses(32, 32, 1.0)


def test_what_has_no_weights_is_not_judged(wide):
    assert read_guesses(wide, NgramDrafter(), TEXT) is None


@pytest.mark.parametrize("kind", ["dflash", *OTHERS])
@pytest.mark.parametrize("cuda", [False, True])
def test_guesses_are_those_of_the_decode_loop(wide, kind, cuda, monkeypatch):
    """At each place, what the drafter says there of the next token after a fresh session has read what is before.

    cuda: caches have more room than the text needs, as on such a GPU.
    """
    if cuda:
        monkeypatch.setattr(rows, "backend", lambda: replace(backend(), kind="cuda"))
    drafter = OTHERS[kind](1) if kind in OTHERS else tiny_drafter(vocab_size=MANY)
    drafter = getattr(drafter, "drafter", drafter)
    _, features = wide.pass_for(drafter.taps)(mx.array([TEXT[:64]]), wide.make_cache())
    guesses, vocabulary = guesses_at(wide, drafter, TEXT[:64], features, np.array(PLACES))
    for row, place in list(enumerate(PLACES))[::5]:
        session = Session(wide, drafter)
        session.feed(TEXT[:place])
        state = drafter.open(wide, session.draft_cache, place)
        drafted = state.propose([Nobody()], mx.array([TEXT[place]]), mx.array([place]), 1, room=place + 2)
        assert mx.allclose(guesses[row], drafted.logits[0], rtol=1e-3, atol=1e-3).item()
        assert (state.vocabulary is None) == (vocabulary is None)


def test_too_little_to_judge(wide):
    assert read_guesses(wide, tiny_drafter(vocab_size=MANY), TEXT[:20]) is None
    few = tuple(token for token in range(40) if token not in wanted_by(wide, TEXT[:64]))
    assert read_guesses(wide, tiny_drafter(vocab_size=MANY, draft_token_ids=few), TEXT) is None


def test_following():
    """Three places that want the tokens a, b and a; scores of their tokens at each of them."""
    wanted = np.array([5, 9, 5])
    assert following(np.array([[3.0, 0.0, 3.0], [0.0, 3.0, 0.0], [3.0, 0.0, 3.0]]), wanted) == 1.0
    assert following(np.array([[0.0, 3.0, 0.0], [3.0, 0.0, 3.0], [0.0, 3.0, 0.0]]), wanted) == 0.0
    # The first place has it right, the second and the third are alike: 1, (1 + 0.5) / 2 and 0.5.
    assert following(np.array([[3.0, 0.0, 3.0], [0.0, 3.0, 0.0], [0.0, 3.0, 0.0]]), wanted) == 0.75
    # A liking for some tokens, and places where all score higher, say nothing.
    assert following(np.array([[1.0], [8.0], [4.0]]) + np.array([2.0, 8.0, 2.0]), wanted) == 0.5
    assert following(np.zeros((3, 3)), np.array([5, 5, 5])) == 0.5


def test_loading_a_pair_reports_noise_and_goes_on(tmp_path, monkeypatch):
    folder = write_target(tmp_path / "target")
    write_folder(tmp_path / "drafter", CASES["full"])
    plain = load_pair(model=str(folder), draft=False)
    text = plain.encode_prompt(GUESS_TEXT)[:64]
    wanted = wanted_by(plain.target, text)
    unwanted = min(set(range(plain.vocab_size)) - set(wanted))

    def load(drafter):
        monkeypatch.setattr("dflash_mlx.drafters.loading.load_drafter", lambda folder, dtype: drafter)
        return load_pair(model=str(folder), draft_model=str(tmp_path / "drafter"), recheck=True)

    same = tiny_drafter()
    same.adjust_logits = lambda logits: mx.zeros_like(logits) + (mx.arange(logits.shape[-1]) == unwanted)
    [warning] = load(same).warnings
    assert warning.startswith("the drafter guessed 0 of 32 tokens of a short text")
    assert "50% of the comparisons, where chance is 50% and at least 70% was expected" in warning
    assert warning.endswith("or run with --no-draft.")
    right = load(ScriptedDrafter(same.config, {place + 1: token for place, token in enumerate(wanted)}))
    assert (right.warnings, right.checks[-1]) == ([], "the drafter guesses 32 of 32 tokens of a short text")


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_drafter_is_not_reported_and_its_shuffled_weights_are(demo_pair):
    """Far on either side of where noise ends: the drafter is right in 18 places."""
    text = demo_pair.encode_prompt(GUESS_TEXT)
    assert demo_pair.warnings == []
    guesses = read_guesses(demo_pair.target, demo_pair.drafter, text)
    assert guesses.right > 10
    assert guesses.following > 0.9
    drafter = load_drafter(demo_pair.folders[1], dtype=mx.float32)
    keys = iter(mx.random.split(mx.random.key(0), 100))
    drafter.update(
        tree_map(lambda x: mx.random.permutation(x.flatten(), key=next(keys)).reshape(x.shape), drafter.parameters())
    )
    assert read_guesses(demo_pair.target, drafter, text).are_noise
