"""Drafting in several denoising steps: which places are fixed when, drafts against a loop over one answer, sampling."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from test_sampling import PROMPT as SHORT
from test_sampling import VOCAB as FEW
from test_sampling import chi_square_p, exact_joint, sample
from tiny import SECOND, context_rows, join, tiny_drafter, tiny_target

from dflash_mlx.decoding.accept import Coupled, Greedy, Rejection
from dflash_mlx.decoding.choosing import can_branch
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.contract import DraftVocabulary, Nobody
from dflash_mlx.drafters.denoising import DFlashConfig, surest
from dflash_mlx.drafters.dflash_state import draft_logits
from dflash_mlx.drafters.loading import in_steps
from dflash_mlx.drafters.ngram import NgramDrafter
from dflash_mlx.drafters.with_ngram import WithNgram
from dflash_mlx.errors import UsageError
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams

PROMPTS, PLACES = ([5, 9, 2, 30, 7], [8, 8, 1, 40, 11, 2, 6]), 7
RUNS = 400


@pytest.mark.parametrize(
    ("steps", "schedule", "places", "counts"),
    [
        (1, "cosine", 15, [15]),
        # 15 times 1 - cos 45 degrees is 4.39; then 22.5 (1.14), 45 and 67.5 (9.26).
        (2, "cosine", 15, [4, 15]),
        (4, "cosine", 15, [1, 4, 9, 15]),
        (3, "linear", 15, [5, 10, 15]),
        # No step for nothing, and no more steps than places.
        (4, "cosine", 3, [1, 2, 3]),
        (9, "linear", 2, [1, 2]),
        (3, "cosine", 1, [1]),
    ],
)
def test_how_many_places_are_fixed_after_each_step(steps, schedule, places, counts):
    assert DFlashConfig(diffusion_steps=steps, noise_schedule=schedule).fixed_counts(places) == counts


def test_the_surest_places_are_fixed_and_stay_so():
    confidence = mx.log(mx.array([[0.9, 0.2, 0.5, 0.7], [0.1, 0.8, 0.3, 0.2]]))
    nothing = mx.zeros((2, 4), dtype=mx.bool_)
    two = surest(confidence, nothing, 2)
    assert two.tolist() == [[True, False, False, True], [False, True, True, False]]
    later = surest(mx.log(mx.array([[0.1, 0.6, 0.5, 0.1], [0.9, 0.1, 0.1, 0.8]])), two, 3)
    assert later.tolist() == [[True, True, False, True], [True, True, True, False]]


def reference(target, drafter, prompt, counts, strategy):
    """The drafts for one answer, a step after the other, each with a forward over caches of its own: the tokens, and
    each place's logits when it was fixed."""
    session = Session(target, drafter)
    session.feed(prompt[:-1])
    vocabulary = DraftVocabulary.of(drafter.config.draft_token_ids, target.vocab_size)
    tokens, logits, masked = [drafter.config.mask_token_id] * PLACES, {}, set(range(PLACES))
    for count in counts:
        rows = context_rows(drafter, session.draft_cache, PLACES + 1)
        block = mx.array([[prompt[-1], *tokens]], dtype=mx.uint32)
        hidden = drafter(drafter.embed_block(block, target.embed), rows)[:, 1:]
        said = draft_logits(drafter, target, hidden)[0]
        chosen, chances = strategy.propose(said, len(prompt), vocabulary).tokens.tolist(), softmax(np.array(said))
        for place in sorted(masked, key=lambda place: -chances[place].max())[: count - len(logits)]:
            tokens[place], logits[place] = chosen[place], np.array(said[place])
        masked -= logits.keys()
    return tokens, np.stack([logits[place] for place in range(PLACES)])


def softmax(logits):
    odds = np.exp(logits.astype(np.float64))
    return odds / odds.sum(axis=-1, keepdims=True)


def proposed(target, drafter, *, writer):
    """The drafts for both prompts together."""
    states = []
    for prompt in PROMPTS:
        session = Session(target, drafter)
        session.feed(prompt[:-1])
        states.append(drafter.open(target, session.draft_cache, len(prompt) - 1))
    state = join(*states)
    at, anchors = mx.array([len(prompt) - 1 for prompt in PROMPTS]), mx.array([prompt[-1] for prompt in PROMPTS])
    return state.propose([writer, writer], anchors, at, PLACES, room=20)


@pytest.mark.parametrize("strategy", [Greedy(), Coupled(SamplingParams(temperature=1.0, seed=5))])
@pytest.mark.parametrize("changes", [{}, {"is_causal": True}, {"draft_token_ids": tuple(range(40, 8, -2))}])
@pytest.mark.parametrize("steps", [2, 4])
def test_drafts_are_those_of_the_reference(steps, changes, strategy):
    target, drafter = tiny_target("llama"), tiny_drafter(**changes).drafting_as(DFlashConfig(diffusion_steps=steps))
    is_greedy = isinstance(strategy, Greedy)
    drafted = proposed(target, drafter, writer=SimpleNamespace(strategy=strategy, is_plain_greedy=is_greedy))
    for row, prompt in enumerate(PROMPTS):
        tokens, logits = reference(target, drafter, prompt, drafter.drafting.fixed_counts(PLACES), strategy)
        assert drafted.tokens[row].tolist() == tokens
        assert np.abs(np.array(drafted.logits[row]) - logits).max() < 1e-4
        _, in_one_step = reference(target, drafter, prompt, [PLACES], strategy)
        assert np.abs(logits - in_one_step).max() > 0.1


def test_passes_are_replayed_where_the_targets_are():
    target, drafter = tiny_target("llama"), tiny_drafter().drafting_as(DFlashConfig(diffusion_steps=3))
    found = []
    for replays in (False, True):
        target.set_replays(replays)
        found.append(proposed(target, drafter, writer=Nobody()))
    assert found[0].tokens.tolist() == found[1].tokens.tolist()
    assert mx.allclose(found[0].logits, found[1].logits, atol=1e-4).item()


@pytest.fixture(scope="module")
def few():
    """A target and a drafter of five tokens."""
    one_layer = {"num_hidden_layers": 1, "layer_types": ("full_attention",), "num_target_layers": 1}
    target = tiny_target("llama", seed=3, vocab_size=FEW, num_hidden_layers=1)
    return target, tiny_drafter(block_size=4, taps=(0,), vocab_size=FEW, **one_layer)


def test_sampling_keeps_the_targets_distribution(few):
    """Without a seed, too: such drafts are not judged by rejection."""
    target, drafter = few
    drafter, params = drafter.drafting_as(DFlashConfig(diffusion_steps=3)), SamplingParams(temperature=1.0)
    counts = sample(target, drafter, params, RUNS, lambda run: Rejection(params, seed=run))
    assert chi_square_p(counts, exact_joint(target, params), RUNS) > 1e-3


def test_with_a_seed_answers_are_those_without_a_drafter(few):
    target, drafter = few
    drafter = drafter.drafting_as(DFlashConfig(diffusion_steps=2, noise_schedule="linear"))
    strategy = Coupled(SamplingParams(temperature=1.0, seed=9))
    answers = []
    for own, width in ((None, 0), (drafter, 3)):
        run = {"strategy": strategy, "policy": FixedWidth(width), "max_tokens": 40, "eos_ids": set()}
        answers.append([token for step in decode(Session(target, own), SHORT, **run) for token in step.tokens])
    assert answers[0] == answers[1]


def test_only_the_way_of_drafting_changes():
    drafter = tiny_drafter()
    other = in_steps(WithNgram(drafter), DFlashConfig(diffusion_steps=2))
    assert other.method == "dflash(2 cosine steps)+ngram"
    assert other.drafter.layers is drafter.layers
    assert (drafter.method, drafter.supports_trees, drafter.allows_rejection) == ("dflash", True, True)
    assert not can_branch(tiny_target("llama"), other)
    assert in_steps(other, DFlashConfig()).method == "dflash+ngram"


@pytest.mark.parametrize(
    ("drafter", "found"),
    [(tiny_drafter(**SECOND), "a DFlash 2 drafter"), (NgramDrafter(), "ngram"), (None, "no drafter")],
)
def test_other_drafters_are_refused(drafter, found):
    with pytest.raises(UsageError, match=f"steps are for DFlash drafters; this pair has {found}. Leave --steps out"):
        in_steps(drafter, DFlashConfig(diffusion_steps=2))
    assert in_steps(drafter, DFlashConfig()) is drafter


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"diffusion_steps": 0}, "diffusion_steps should be at least 1; got 0"),
        ({"noise_schedule": "sine"}, "noise_schedule should be one of cosine, linear; got 'sine'"),
    ],
)
def test_values_that_cannot_be(values, message):
    with pytest.raises(UsageError, match=message):
        DFlashConfig(**values)
