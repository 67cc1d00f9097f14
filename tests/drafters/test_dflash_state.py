"""A DFlash drafter at work on a batch: what it drafts for answers that choose their tokens in different ways."""

from types import SimpleNamespace

import mlx.core as mx
import pytest
from tiny import SECOND, tiny_drafter, tiny_target

from dflash_mlx.decoding.accept import Coupled, Greedy
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.contract import Outlook
from dflash_mlx.sampling import SamplingParams

PROMPT, PLACES = [5, 9, 2, 30, 7], 4


def writer(strategy, *, plain=False):
    return SimpleNamespace(strategy=strategy, is_plain_greedy=plain)


def state_of(drafter, *, replays=False):
    target = tiny_target("llama")
    target.set_replays(replays)
    session = Session(target, drafter)
    session.feed(PROMPT)
    return drafter.open(target, session.draft_cache, len(PROMPT))


def drafted(drafter, *writers):
    state = state_of(drafter)
    state.add(len(writers) - 1)
    at = mx.array([len(PROMPT)] + [0] * (len(writers) - 1))
    return state.propose(writers, mx.array([3] * len(writers)), at, PLACES, room=16)


@pytest.mark.parametrize("options", [{}, {"draft_token_ids": tuple(range(40, 8, -2))}], ids=["all tokens", "some"])
def test_plain_lanes_get_the_best_tokens_together(options):
    together = drafted(tiny_drafter(**options), writer(None, plain=True), writer(None, plain=True))
    assert together.proposals is None
    best = mx.argmax(together.logits, axis=-1)
    ids = options.get("draft_token_ids")
    assert together.tokens.tolist() == (mx.array(ids)[best] if ids else best).tolist()


@pytest.mark.parametrize("options", [{}, SECOND], ids=["DFlash", "DFlash 2"])
def test_each_other_lane_drafts_by_its_own_strategy(options):
    drafter = tiny_drafter(**options)
    strategies = [Coupled(SamplingParams(temperature=1.0), seed=seed) for seed in (1, 2)]
    mixed = drafted(drafter, *[writer(strategy) for strategy in strategies])
    assert len(mixed.proposals) == 2
    assert mixed.tokens.tolist() == [proposal.tokens.tolist() for proposal in mixed.proposals]
    # The first lane, alone, drafts the same: the noise of its places is its own.
    assert drafted(drafter, writer(strategies[0])).tokens.tolist() == mixed.tokens[:1].tolist()
    others = [Coupled(SamplingParams(temperature=5.0), seed=seed) for seed in range(5)]
    found = {tuple(drafted(drafter, writer(strategy)).tokens[0].tolist()) for strategy in [Greedy(), *others]}
    assert len(found) > 2


def test_it_never_waits_for_the_host():
    assert state_of(tiny_drafter()).outlook([]) is Outlook.DEVICE


@pytest.mark.parametrize("replays", [False, True], ids=["each shape", "few shapes"])
@pytest.mark.parametrize(("waiting", "few"), [(1, 1), (2, 2), (8, 8), (11, 16), (256, None), (259, 4), (507, 256)])
def test_features_that_have_waited_are_taken_in_as_they_came(waiting, few, replays, monkeypatch):
    """In few shapes: with some more, which are written over later, where each shape would be compiled."""
    drafter = tiny_drafter()
    features = mx.random.normal((1, waiting, drafter.config.feature_size), key=mx.random.key(0))
    held, fed = [], []
    for together in (True, False):
        state = state_of(drafter, replays=replays)
        absorb = state._passes.absorb
        monkeypatch.setattr(state._passes, "absorb", lambda rows, x, on=absorb: (fed.append(x.shape[1]), on(rows, x)))
        for i in range(waiting):
            at = mx.array([len(PROMPT) + i])
            state.extend(mx.zeros((1, 1)), features[:, i : i + 1], at, room=len(PROMPT) + i + 1, all_kept=True)
            if not together:
                state.settle(at + 1)
        held.append(state.layers())
        if together:
            assert fed == [256] * (waiting // 256) + ([few if replays else waiting % 256] if waiting % 256 else [])
        fed.clear()
    # The last ones of 507 begin so late that those beyond them need more room than was made before.
    end = len(PROMPT) + waiting
    for together, apart in zip(*held, strict=True):
        for name in ("keys", "values"):
            found, expected = (getattr(layer, name)[:, :, :end] for layer in (together, apart))
            assert mx.abs(found - expected).max().item() < 1e-5


@pytest.mark.parametrize(("rows", "rounds"), [(1, 256), (16, 256), (17, 241), (64, 64)])
def test_of_many_answers_fewer_rounds_wait(rows, rounds, monkeypatch):
    """4,096 tokens at most."""
    drafter, fed = tiny_drafter(), []
    state = drafter.blank(tiny_target("llama"), rows, 1)
    monkeypatch.setattr(state._passes, "absorb", lambda rows, features: fed.append(features.shape[:2]))
    features = mx.zeros((rows, 1, drafter.config.feature_size))
    for i in range(rounds):
        assert not fed
        state.extend(mx.zeros((rows, 1)), features, mx.full((rows,), i), room=i + 1, all_kept=True)
    assert fed == [(rows, rounds)]


def test_a_row_whose_lane_has_left_gets_no_more_room_than_there_is(monkeypatch):
    """Its features go on coming, and for it nobody makes room: they must not be written after the buffers' end."""
    drafter = tiny_drafter()
    state = drafter.blank(tiny_target("llama"), 2, 256)
    capacity, ends = state.rows.lengths.capacity, []
    absorb = state._passes.absorb

    def noting(rows, features):
        ends.append((rows.lengths.value + features.shape[1]).tolist())
        return absorb(rows, features)

    monkeypatch.setattr(state._passes, "absorb", noting)
    features = mx.random.normal((2, 1, drafter.config.feature_size), key=mx.random.key(0))
    for i in range(9):
        # The second lane leaves after the first round, and its row begins at 0 again.
        at = mx.array([20 + i, capacity - 2 if i == 0 else 0])
        state.extend(mx.zeros((2, 1)), features, at, room=capacity if i == 0 else 30 + i, all_kept=True)
    state.settle(mx.array([29, 0]))
    assert max(map(max, ends)) <= capacity
    assert ends[-1][0] == 29
