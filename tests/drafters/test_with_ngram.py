"""A drafter beside drafting from the text: each round takes the one that is expected to be kept further."""

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from drafters.test_ngram import SimpleText, circling
from test_sampling import VOCAB
from tiny import plain_tokens, tiny_drafter

from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.contract import Drafted, Outlook
from dflash_mlx.drafters.with_ngram import WithNgram, WithNgramState
from dflash_mlx.policy.width import FixedWidth

REPEATS, NEW = [*range(1, 20), *range(1, 12)], [*range(1, 20)]


class Inner(SimpleNamespace):
    """A drafter's state that drafts 70, 71, ... and holds each likely at 0.5 or so."""

    vocabulary = None
    asked = 0

    def outlook(self, writers):
        return Outlook.DEVICE

    def propose(self, writers, anchors, at, places, *, room):
        self.asked += 1
        logits = mx.broadcast_to(mx.array([[0.0, 0.0]]), (len(writers), places, 2))
        return Drafted(mx.broadcast_to(mx.arange(70, 70 + places), (len(writers), places)), logits)


def proposed(state, *texts):
    writers = [SimpleText(text) for text in texts]
    zeros = mx.zeros((len(texts),))
    return state.propose(writers, zeros, zeros, 3, room=9), writers


def test_a_text_that_repeats_itself_is_drafted_from_without_the_drafter():
    state = WithNgramState(Inner())
    drafted, writers = proposed(state, REPEATS)
    assert drafted.tokens.tolist() == [[12, 13, 14]]
    assert state.inner.asked == 0
    assert state.outlook(writers) is Outlook.HOST


def test_a_new_text_is_the_drafters():
    state = WithNgramState(Inner())
    drafted, writers = proposed(state, NEW)
    assert drafted.tokens.tolist() == [[70, 71, 72]]
    assert drafted.logits is not None
    assert state.outlook(writers) is Outlook.DEVICE


def test_answers_together_draft_in_different_ways():
    state = WithNgramState(Inner())
    drafted, writers = proposed(state, NEW, REPEATS)
    assert drafted.tokens.tolist() == [[70, 71, 72], [12, 13, 14]]
    chances = np.exp(np.array(drafted.confidence))
    assert chances[0] == pytest.approx([0.5] * 3)
    assert (chances[1] > 0.7).all()
    assert state.outlook(writers) is Outlook.HOST


def test_a_drafter_that_keeps_more_is_preferred():
    state = WithNgramState(Inner())
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
    state = WithNgramState(Inner())
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
