"""Drafting from the text itself: where it looks, how sure it is, and that answers stay the same."""

import random
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import test_sampling
from tiny import VOCAB, drafted_tokens, plain_tokens, tiny_target

from dflash_mlx.decoding.accept import Coupled, Greedy, Rejection
from dflash_mlx.decoding.decode import decode, prefill
from dflash_mlx.decoding.engine import Engine
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.contract import Outlook
from dflash_mlx.drafters.ngram import Lookup, NgramDrafter, NgramState
from dflash_mlx.policy.group import FixedGroup
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams


def lookup_of(tokens):
    lookup = Lookup()
    lookup.extend(tokens)
    return lookup


def repeats(tokens, least=2):
    """Whether the newest tokens stood in the text before, by looking everywhere."""
    return any(tokens[i : i + least] == tokens[-least:] for i in range(len(tokens) - least))


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_stood_there_before(seed):
    rng, lookup, text = random.Random(seed), Lookup(), []
    while len(text) < 300:
        copied = rng.randrange(len(text)) if len(text) > 20 and rng.random() < 0.3 else None
        new = [rng.randrange(6)] if copied is None else text[copied : copied + rng.randint(1, 30)]
        lookup.extend(new)
        text += new
        assert lookup.tokens == text
        assert (lookup.length > 0) == repeats(text)
        if lookup.length:
            # What is drafted goes on after the same tokens, somewhere in the text; beyond its end it repeats itself.
            drafts, length = lookup.draft(40), min(lookup.length, 32)
            starts = [i for i in range(length, len(text)) if text[i - length : i] == text[-length:]]
            assert any(all((text + drafts)[i + n] == drafts[n] for n in range(40)) for i in starts)


def test_of_several_places_it_takes_the_one_with_most_in_common_and_then_the_newest():
    assert lookup_of([9, 1, 2, 3, 70, 8, 1, 2, 3, 71, 9, 1, 2, 3]).draft(1) == [70]
    assert lookup_of([7, 1, 2, 3, 70, 8, 1, 2, 3, 71, 9, 1, 2, 3]).draft(1) == [71]


def test_a_text_that_repeats_itself_is_continued_by_its_period():
    assert lookup_of([5, 1, 2, 1, 2, 1, 2]).draft(5) == [1, 2, 1, 2, 1]


def test_longer_agreement_and_kept_drafts_make_it_surer():
    text = list(range(40))
    short, long = lookup_of([*text, 90, 4, 5, 6]), lookup_of([*text, 90, *range(4, 24)])
    assert 0 < short.chance() < short.chance(9) <= long.chance() < 1
    assert lookup_of(text).chance() == 0
    misled = lookup_of(text)
    for token in range(0, 30, 5):
        misled.extend([token, token + 1, token + 2, 99])  # never what followed
    misled.extend([33, 34, 35])
    assert misled.length == short.length
    assert misled.chance() < short.chance()


def writer_of(text):
    return SimpleText(text)


class SimpleText(SimpleNamespace):
    """A writer whose text is known."""

    is_plain_greedy = True
    __hash__ = object.__hash__

    def __init__(self, text):
        super().__init__(text=text)

    def text_from(self, position):
        return self.text[position:]


def test_answers_that_repeat_nothing_have_no_drafts():
    state = NgramState(always=False)
    writers = [SimpleText([1, 2, 3, 4, 50, 60, 1, 2, 3, 4]), SimpleText([1, 2, 3, 4])]
    assert state.outlook(writers[1:]) is Outlook.NOTHING
    assert state.outlook(writers) is Outlook.HOST
    drafted = state.propose(writers, mx.array([4, 4]), mx.array([9, 3]), 3, room=20)
    assert drafted.tokens.tolist()[0] == [50, 60, 1]
    chances = np.exp(np.array(drafted.log_probs))
    assert (chances[0] > 0).all()
    assert (chances[1] == 0).all()
    writers[1].text = [*writers[1].text, 1, 2, 3]
    assert state.outlook(writers[1:]) in (Outlook.HOST, Outlook.NOTHING)
    assert state.propose(writers[1:], mx.array([3]), mx.array([6]), 2, room=20).tokens.tolist() == [[4, 1]]


def test_a_rehearsal_drafts_whatever_the_text():
    drafter = NgramDrafter(5).rehearsal()
    assert drafter.places == 5
    state = drafter.blank(None, 1, 8)
    assert state.outlook([]) is Outlook.HOST
    drafted = state.propose([SimpleText([1, 2])], mx.array([2]), mx.array([1]), 5, room=20)
    assert drafted.tokens.shape == (1, 5)
    assert drafted.log_probs.tolist() == [[0.0] * 5]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("always", [False, True])
def test_answers_are_those_of_plain_decoding(family, always):
    target = tiny_target(family)
    for seed in range(6):
        rng = random.Random(seed)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 4, 12]))] * rng.choice([1, 3])
        policy = FixedWidth(5, waits=seed % 2 == 0)
        assert drafted_tokens(target, NgramDrafter(5, always=always), prompt, 50, policy) == plain_tokens(
            target, prompt, 50
        )


def circling():
    return tiny_target("llama", seed=3, vocab_size=5, num_hidden_layers=1)


def test_drafts_are_kept_where_an_answer_repeats_itself():
    """A tiny model of few words soon runs in circles."""
    target = circling()
    steps = list(
        decode(
            Session(target, NgramDrafter(7)),
            [1, 2, 3],
            strategy=Greedy(),
            policy=FixedWidth(7, waits=True),
            max_tokens=200,
            eos_ids=set(),
        )
    )
    assert sum(len(step.tokens) for step in steps) == 200
    assert len(steps) < 100


def test_what_a_round_fed_fits_the_room_that_is_told(monkeypatch):
    """Rejected drafts, too: a drafter beside it writes them all, and nothing checks on the device whether they fit."""
    rooms = []

    def extend(self, tokens, features, at, *, room, all_kept):
        rooms.append(room - int(at.max().item()) - tokens.shape[1])

    monkeypatch.setattr(NgramState, "extend", extend)
    drafted_tokens(tiny_target("llama"), NgramDrafter(5, always=True), [1, 2, 3], 20, FixedWidth(5))
    assert min(rooms) == 0


def test_lanes_draft_from_their_own_texts():
    target, drafter = circling(), NgramDrafter(4)
    running, found = Engine(target, drafter, policy=FixedGroup(4, waits=True)), {}
    prompts = [[1, 2, 3, 4] * 3, [3], [0, 1, 2] * 4, [1, 0, 1, 0, 1, 0, 1]]
    for i, prompt in enumerate(prompts):
        session = Session(target, drafter)
        prefill(session, prompt[:-1])
        strategy = Greedy() if i % 2 == 0 else Coupled(SamplingParams(temperature=0.5, seed=i))
        lane = Lane(
            session=session, prompt=prompt, strategy=strategy, policy=FixedWidth(4), max_tokens=60, eos_ids=set()
        )
        running.join(lane)
        found[lane] = []
        running.advance()
    kept = 0
    while running.lanes:
        for lane, step in running.advance():
            found[lane] += step.tokens
            kept += step.num_accepted
    assert kept > 20
    for i, (lane, tokens) in enumerate(found.items()):
        strategy = Greedy() if i % 2 == 0 else Coupled(SamplingParams(temperature=0.5, seed=i))
        alone = decode(
            Session(target, None),
            lane.prompt,
            strategy=strategy,
            policy=FixedWidth(0),
            max_tokens=60,
            eos_ids=set(),
        )
        expected = [token for step in alone for token in step.tokens]
        assert expected[-len(tokens) :] == tokens


def test_sampling_without_a_seed_keeps_the_targets_distribution():
    """Each draft is kept only while it is the target's own draw."""
    params, runs = SamplingParams(temperature=0.8), 600
    target = tiny_target("llama", seed=3, vocab_size=test_sampling.VOCAB, num_hidden_layers=1)
    drafter = NgramDrafter(3, always=True)
    counts = test_sampling.sample(target, drafter, params, runs, lambda run: Rejection(params, seed=run))
    expected = test_sampling.exact_joint(target, params)
    assert test_sampling.chi_square_p(counts, expected, runs) > 1e-3
