"""A drafter beside drafting from the text: each round takes the one that is expected to be kept further."""

import random
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import test_sampling
from drafters.test_ngram import SimpleText, circling
from test_sampling import VOCAB
from test_stepwise import KINDS, anew, run
from tiny import HIDDEN, LAYERS, plain_tokens, randomize, tiny_drafter, tiny_target
from tiny_families import unavailable

from dflash_mlx.decoding.accept import Coupled, Greedy, Rejection
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters import with_ngram
from dflash_mlx.drafters.contract import Drafted, Nobody, Outlook, best_tokens
from dflash_mlx.drafters.medusa import MedusaDrafter, MedusaNetwork
from dflash_mlx.drafters.ngram import NgramState
from dflash_mlx.drafters.stepwise import StepwiseState
from dflash_mlx.drafters.with_ngram import WithNgram, WithNgramState
from dflash_mlx.policy.width import FixedWidth, RoundCosts, SteadyWidth
from dflash_mlx.sampling import SamplingParams

REPEATS, NEW = [*range(1, 20), *range(1, 12)], [*range(1, 20)]
TEXT_GOES_ON = [*range(12, 20), *range(1, 8)]


class Inner(SimpleNamespace):
    """A drafter's state that drafts 70, 71, ... and holds each likely at 0.5 or so."""

    vocabulary = None
    asked = 0
    withdrawn = False

    def outlook(self, writers):
        return Outlook.DEVICE

    def withdraw(self):
        self.withdrawn = True

    def propose(self, writers, anchors, at, places, *, room, tree=False):
        self.asked += 1
        logits = mx.broadcast_to(mx.array([[0.0, 0.0]]), (len(writers), places, 2))
        return Drafted(mx.broadcast_to(mx.arange(70, 70 + places), (len(writers), places)), logits)


def proposed(state, *texts, places=3):
    writers = [SimpleText(text) for text in texts]
    zeros = mx.zeros((len(texts),))
    return state.propose(writers, zeros, zeros, places, room=9), writers


def test_a_text_that_repeats_itself_is_drafted_from_without_the_drafter():
    state = WithNgramState(Inner(), places=15, vocab_size=100)
    drafted, writers = proposed(state, REPEATS)
    assert drafted.tokens.tolist() == [[12, 13, 14]]
    assert state.inner.asked == 0
    assert state.outlook(writers) is Outlook.HOST


def test_what_the_text_will_keep_is_told_and_nothing_of_the_drafters_drafts():
    state = WithNgramState(Inner(), places=15, vocab_size=100)
    expected = NgramState(always=False).lookup(SimpleText(REPEATS)).promise(15)
    assert state.told(SimpleText(REPEATS)) == pytest.approx(expected)
    assert expected > 5
    assert state.told(SimpleText(NEW)) == 0


def test_a_new_text_is_the_drafters():
    state = WithNgramState(Inner(), places=15, vocab_size=100)
    drafted, writers = proposed(state, NEW)
    assert drafted.tokens.tolist() == [[70, 71, 72]]
    assert drafted.logits is not None
    assert state.outlook(writers) is Outlook.DEVICE


def test_answers_together_draft_in_different_ways():
    state = WithNgramState(Inner(), places=15, vocab_size=100)
    drafted, writers = proposed(state, NEW, REPEATS, places=7)
    assert drafted.tokens.tolist() == [[*range(70, 77)], [12, 13, 14, 15, 16, 17, 18]]
    chances = np.exp(np.array(drafted.confidence))
    assert chances[0] == pytest.approx([0.5] * 7)
    assert (chances[1] > 0.7).all()
    assert state.outlook(writers) is Outlook.HOST


@pytest.mark.parametrize(("kind", "others", "worth_it"), [("cpu", 12, True), ("cuda", 12, False), ("cuda", 1, True)])
def test_many_answers_wait_for_the_text_of_one_only_if_that_pays(kind, others, worth_it, monkeypatch):
    """As many tokens more as the one gains by its text have to make up for the wait of all; rows without answers do
    not count."""
    monkeypatch.setattr(with_ngram, "backend", lambda: SimpleNamespace(kind=kind))
    state = WithNgramState(Inner(), places=15, vocab_size=100)
    drafted, writers = proposed(state, *[NEW] * others, REPEATS, places=15)
    assert drafted.tokens[-1].tolist() == (TEXT_GOES_ON if worth_it else [*range(70, 85)])
    assert state.outlook(writers) is (Outlook.HOST if worth_it else Outlook.DEVICE)
    zeros, padded = mx.zeros((len(writers) + 20,)), [*writers, *(Nobody() for _ in range(20))]
    again = state.propose(padded, zeros, zeros, 15, room=9).tokens[others].tolist()
    assert again == drafted.tokens[-1].tolist()


def test_together_a_text_promises_no_more_than_is_verified_of_every_answer():
    """With three drafts each, a text that would go on for many more gains too little to be waited for."""
    state = WithNgramState(Inner(), places=15, vocab_size=100)
    _, writers = proposed(state, REPEATS, REPEATS)
    assert state.outlook(writers) is Outlook.DEVICE
    zeros = mx.zeros((2,))
    # Nobody has waited for the texts' newest tokens, so they do not draft, however many drafts it now is.
    assert state.propose(writers, zeros, zeros, 15, room=40).tokens.tolist() == [[*range(70, 85)]] * 2
    assert state.outlook(writers) is Outlook.HOST
    assert state.propose(writers, zeros, zeros, 15, room=40).tokens.tolist() == [TEXT_GOES_ON] * 2
    state.propose(writers, zeros, zeros, 3, room=40)
    assert state.outlook(writers) is Outlook.DEVICE
    # An answer by itself can have as many drafts as its text promises.
    assert state.propose(writers[:1], zeros[:1], zeros[:1], 3, room=9).tokens.tolist() == [[12, 13, 14]]


def test_a_drafter_that_keeps_more_is_preferred():
    state = WithNgramState(Inner(), places=15, vocab_size=100)
    text = [1, 2, 3, 4, 5, 6, 60]
    writer, zeros = SimpleText(text), mx.zeros((1,))
    for start in range(200, 400, 20):
        state.propose([writer], zeros, zeros, 15, room=40)
        text += range(start, start + 16)  # 15 drafts were kept, and a token of the target's own
    text += [1, 2, 3, 4, 5, 6]
    asked = state.inner.asked
    assert state.propose([writer], zeros, zeros, 3, room=40).tokens.tolist() == [[70, 71, 72]]
    assert state.inner.asked == asked + 1


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_text_that_promised_too_much_is_believed_less(goes_on):
    """The same 12 tokens come again and again; what comes after them is the same, too, or new each time."""
    state = WithNgramState(Inner(), places=15, vocab_size=100)
    text: list[int] = [*range(1, 13), 90, *range(50, 70)]
    writer, zeros = SimpleText(text), mx.zeros((1,))
    for i in range(6):
        text += range(1, 13)
        state.propose([writer], zeros, zeros, 15, room=40)
        text += [90, *range(50, 70)] if goes_on else [100 + i]
        state.outlook([writer])
    text += range(1, 13)
    assert (state.outlook([writer]) is Outlook.HOST) == goes_on


def test_rounds_are_fewer_and_answers_the_same():
    target = circling()
    one_layer = {"num_hidden_layers": 1, "layer_types": ("full_attention",), "num_target_layers": 1}
    drafter = tiny_drafter(block_size=8, taps=(0,), vocab_size=VOCAB, **one_layer)
    rounds = []
    for own in (drafter, WithNgram(drafter)):
        steps = list(
            decode(
                Session(target, own),
                [1, 2, 3],
                strategy=Greedy(),
                policy=FixedWidth(7),
                max_tokens=150,
                eos_ids=set(),
            )
        )
        assert [token for step in steps for token in step.tokens] == plain_tokens(target, [1, 2, 3], 150)
        rounds.append(len(steps))
    assert rounds[1] < 0.6 * rounds[0]


def test_a_text_that_repeats_itself_is_used_while_drafting_pauses():
    target = circling()
    one_layer = {"num_hidden_layers": 1, "layer_types": ("full_attention",), "num_target_layers": 1}
    drafter = WithNgram(tiny_drafter(block_size=8, taps=(0,), vocab_size=VOCAB, **one_layer))
    policy = SteadyWidth(RoundCosts({0: 1.0, 1: 1.5, 7: 1.5}, {1: 0.1, 7: 0.1}, steep=False), 7)
    policy.pauses.resting = 1000
    lane = {"strategy": Greedy(), "policy": policy, "max_tokens": 150, "eos_ids": set()}
    steps = list(decode(Session(target, drafter), [1, 2, 3], **lane))
    assert [token for step in steps for token in step.tokens] == plain_tokens(target, [1, 2, 3], 150)
    assert {0, 7} <= {step.width for step in steps}
    assert sum(step.num_accepted for step in steps) > 75
    assert policy.pauses.resting > 900


def at_random(monkeypatch, seed):
    """From now on drafts are the text's or the drafter's at random. Returns whose they were, by answer and round."""
    rng, propose, by_drafter = random.Random(seed), WithNgramState.propose, {}

    def chosen(state, writers, anchors, at, places, *, room, tree=False):
        by_text = {id(writer): rng.random() < 0.5 for writer in writers}
        state._by_text = lambda writers: [by_text[id(writer)] for writer in writers]
        for writer in writers:
            by_drafter.setdefault(id(writer), []).append(not by_text[id(writer)])
        return propose(state, writers, anchors, at, places, room=room, tree=tree)

    monkeypatch.setattr(WithNgramState, "propose", chosen)
    monkeypatch.setattr(WithNgramState, "outlook", lambda state, writers: Outlook.HOST)
    return by_drafter


def answers_together(target, drafter, count, width, max_tokens):
    """Answers made together, and the steps of each that verified drafts; its tokens are checked."""
    steps = run(target, drafter, [[3 + i, 1, 4, 1, 5] for i in range(count)], max_tokens, width)
    for lane, own in steps.items():
        tokens = [token for step in own for token in step.tokens]
        assert tokens == plain_tokens(target, lane.prompt, max_tokens)
    return {lane: [step for step in own if step.width] for lane, own in steps.items()}


@pytest.mark.parametrize("kind", ["dflash", "medusa", *KINDS])
def test_answers_of_every_kind_stay_the_same(kind, monkeypatch):
    if kind == "mtp" and (reason := unavailable("qwen3_5")):
        pytest.skip(reason)
    by_drafter = at_random(monkeypatch, 7)
    if kind in KINDS:
        target, drafter = KINDS[kind]()
    elif kind == "dflash":
        target, drafter = tiny_target("llama"), tiny_drafter(block_size=6)
    else:
        network = MedusaNetwork(4, HIDDEN, 48, 1)
        randomize(network, 5)
        target, drafter = tiny_target("llama"), MedusaDrafter(network, target_layers=LAYERS)
    answers_together(target, WithNgram(drafter), 3, 4, 24)
    assert {True, False} <= {own for rounds in by_drafter.values() for own in rounds}


def test_a_drafter_goes_on_from_what_was_kept_of_the_texts_drafts(monkeypatch):
    """The text drafts what is right, which a draft model would not have: its next drafts are those of one that reads
    all anew."""
    target, model = KINDS["draft_model"]()
    at_random(monkeypatch, 3)
    truth = {3 + i: [3 + i, 1, 4, 1, 5, *plain_tokens(target, [3 + i, 1, 4, 1, 5], 60)] for i in range(3)}
    drafted, propose = [], StepwiseState.propose

    def right(state, writers, anchors, at, places, *, room, tree=False):
        texts = [truth[writer.prompt[0]] if isinstance(writer, Lane) else [0] * 99 for writer in writers]
        tokens = [text[place + 1 : place + 1 + places] for text, place in zip(texts, at.tolist(), strict=True)]
        return Drafted(mx.array(tokens), log_probs=mx.zeros((len(writers), places)))

    def watched(state, writers, anchors, at, places, *, room, tree=False):
        found = propose(state, writers, anchors, at, places, room=room, tree=tree)
        rows = zip(writers, at.tolist(), found.tokens.tolist(), strict=True)
        drafted.extend((writer.prompt[0], place, own) for writer, place, own in rows if isinstance(writer, Lane))
        return found

    monkeypatch.setattr(NgramState, "propose", right)
    monkeypatch.setattr(StepwiseState, "propose", watched)
    steps = answers_together(target, WithNgram(model), 3, 4, 40)
    assert {step.num_accepted for own in steps.values() for step in own} > {1, 4}
    for first, at, tokens in drafted[::3]:
        text = truth[first][: at + 1]
        expected, _ = anew(target, model, text, len(tokens), lambda logits, place: best_tokens(logits, None))
        assert tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [False, True])
def test_sampling_keeps_the_targets_distribution(seeded, monkeypatch):
    """Whether a round's drafts are the text's, which were not drawn, or the drafter's, which were."""
    rounds = {True: 0, False: 0}

    def by_turns(state, writers):
        found = [len(state.text.lookup(writer).tokens) % 2 == 0 for writer in writers]
        for by_text in found:
            rounds[by_text] += 1
        return found

    monkeypatch.setattr(WithNgramState, "_by_text", by_turns)
    params, runs = SamplingParams(temperature=0.8, seed=1 if seeded else None), 600
    target = tiny_target("llama", seed=3, vocab_size=VOCAB, num_hidden_layers=1)
    one_layer = {"num_hidden_layers": 1, "layer_types": ("full_attention",), "num_target_layers": 1}
    drafter = WithNgram(tiny_drafter(block_size=4, taps=(0,), vocab_size=VOCAB, **one_layer))
    assert drafter.allows_rejection
    strategy = Coupled if seeded else Rejection
    counts = test_sampling.sample(target, drafter, params, runs, lambda run: strategy(params, seed=run))
    assert test_sampling.chi_square_p(counts, test_sampling.exact_joint(target, params), runs) > 1e-3
    assert min(rounds.values()) > runs / 2
