"""Drafting never changes the answer: greedy output equals mlx-lm's plain decoding, token for token.

Random cases over families, drafters (random, hostile, perfect), block sizes, widths, trees, prompts, limits and stops.
"""

import random
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache
from tiny import (
    FAMILIES,
    LAYERS,
    SECOND,
    VOCAB,
    ScriptedDrafter,
    mostly_slow,
    plain_tokens,
    tiny_drafter,
    tiny_target,
)

from dflash_mlx.decoding import decode as one_answer
from dflash_mlx.decoding.accept import Coupled, Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.lane import clip
from dflash_mlx.decoding.policies import Choice
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.denoising import DFlashConfig
from dflash_mlx.drafters.ngram import NgramDrafter
from dflash_mlx.drafters.with_ngram import WithNgram
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams

CASES_PER_FAMILY = 70


class RandomWidth:
    """A different width each round, 0 included, sometimes cut short by confidence, sometimes a tree of any shape: every
    order of rounds comes up."""

    def __init__(self, rng: random.Random, widest: int) -> None:
        self.rng, self.widest = rng, widest
        self.confident_share = rng.choice([0.0, 0.5, 1.0])
        self.branches = rng.random() < 0.6
        self.listens_after = rng.choice([0, 1, 5])

    def next_round(self, *, may_branch, told=0.0) -> Choice:
        assert self.branches or not may_branch
        places = self.rng.choice([0, 0, 1, self.widest, self.rng.randint(0, self.widest)])
        waits = self.rng.random() < self.confident_share
        tree = self.rng.choice([0, 1, 7, 31]) if may_branch else 0
        width = None if waits else self.rng.randint(1, tree or max(places, 1))
        # Probabilities that change from round to round make trees of every form, from broad ones to a single path.
        rests = not places and self.rng.random() < 0.5
        return Choice(places, tree=tree, scale=self.rng.choice([0.01, 0.5, 1.0, 100.0]), width=width, rests=rests)

    def choose(self, forecast):
        assert ((forecast.best >= 0) & (forecast.best < 1.0001)).all()
        assert (np.diff(forecast.chances) <= 0).all()
        return self.rng.choice([0, 1, 7, len(forecast.chances)])

    def observe(self, round):
        assert 0 <= round.num_accepted <= min(round.width, round.drafted) <= self.widest
        assert 0 <= round.promised <= min(round.width, round.drafted) + 1e-3

    def take_notice(self) -> None:
        return None


@pytest.fixture(scope="module", params=mostly_slow(sorted(FAMILIES), "llama"))
def target(request):
    return tiny_target(request.param)


def make_drafter(kind, target, prompt, rng, block_size, truth=None):
    """`truth`: the plain answer, as far as drafts may look; by default, as for 30 tokens in blocks of 6."""
    if kind == "ngram":
        return NgramDrafter(block_size - 1, always=rng.random() < 0.5)
    taps, parts = rng.choice([(0, 2), (1,), (0, 1, 3)]), SECOND if kind == "second" else {}
    base = tiny_drafter(block_size=block_size, seed=rng.randrange(1000), taps=taps, **parts)
    if kind == "steps":
        base = base.drafting_as(DFlashConfig(None, rng.randint(2, 5), rng.choice(["cosine", "linear"])))
    if kind in ("random", "second", "steps", "both"):
        return WithNgram(base) if kind == "both" else base
    script = {len(prompt) + i: token for i, token in enumerate(truth or plain_tokens(target, prompt, 30 + 6))}
    if kind == "perfect":
        return ScriptedDrafter(base.config, script)
    wrong = frozenset(at for at in script if rng.random() < rng.choice([0.1, 0.4, 1.0]))
    return ScriptedDrafter(base.config, script, wrong)


def cut(tokens, eos_ids):
    """A plain answer up to and with its first end-of-sequence token."""
    ends = [i for i, token in enumerate(tokens) if token in eos_ids]
    return tokens[: ends[0] + 1] if ends else tokens


def check_session(session, prompt, tokens):
    """The session's books: its tokens are a prefix of prompt and answer, and both caches agree with them."""
    history = prompt + tokens
    assert session.tokens == history[: len(session.tokens)]
    assert len(session.tokens) >= len(history) - 1 or not tokens
    assert session.away is None
    # Recurrent caches know no positions.
    caches = [c for c in (*session.target_cache, *session.draft_cache) if not isinstance(c, ArraysCache)]
    assert all(c.offset == len(session.tokens) for c in caches)


@pytest.mark.parametrize("part", mostly_slow(range(5), 0))
def test_equals_plain_decoding(target, part, monkeypatch):
    monkeypatch.setattr(one_answer, "PREFILL_STEP", 16)
    rng = random.Random(part)
    for _ in range(CASES_PER_FAMILY // 5):
        block_size = rng.randint(2, 16)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 5, 15, 16, 17, 18, 40]))]
        max_tokens = rng.choice([1, 2, 3, block_size, block_size + 1, rng.randint(1, 40)])
        # A block may reach beyond the answer's end.
        truth = plain_tokens(target, prompt, max_tokens + block_size)
        kind = rng.choice(["random", "hostile", "perfect", "ngram", "both", "steps", "second"])
        drafter = make_drafter(kind, target, prompt, rng, block_size, truth)
        free = truth[:max_tokens]
        # Half of the cases stop at a token of the answer, so that stops fall on every offset of a block.
        eos_ids = {rng.choice(free)} if rng.random() < 0.5 else set()
        expected = cut(free, eos_ids)
        policy = rng.choice([FixedWidth(block_size - 1), RandomWidth(rng, block_size - 1)])

        session = Session(target, drafter)
        steps = list(decode(session, prompt, strategy=Greedy(), policy=policy, max_tokens=max_tokens, eos_ids=eos_ids))

        tokens = [token for step in steps for token in step.tokens]
        assert tokens == expected
        assert steps[-1].finish_reason == ("stop" if expected[-1] in eos_ids else "length")
        assert all(step.finish_reason is None for step in steps[:-1])
        assert all(len(s.tokens) in (s.num_accepted, s.num_accepted + 1) for s in steps if s.width)
        check_session(session, prompt, tokens)


@pytest.mark.parametrize("limit", range(1, 12))
def test_every_offset_of_a_block(target, limit):
    """With a perfect drafter of width 7, limits and stops at each offset end the answer exactly there."""
    prompt = [5, 6, 7]
    truth = plain_tokens(target, prompt, 32)
    config = tiny_drafter(block_size=8).config
    for eos_ids, max_tokens in ((set(), limit), ({truth[limit - 1]}, 32)):
        drafter = ScriptedDrafter(config, {3 + i: token for i, token in enumerate(truth)})
        session = Session(target, drafter)
        steps = decode(session, prompt, strategy=Greedy(), policy=FixedWidth(7), max_tokens=max_tokens, eos_ids=eos_ids)
        tokens = [token for step in steps for token in step.tokens]
        assert tokens == plain_tokens(target, prompt, max_tokens, eos_ids)
        check_session(session, prompt, tokens)


def test_a_token_beyond_the_limit_ends_nothing(target):
    """The limit may cut a round whose next token would have ended the sequence: the answer ends at the limit."""
    prompt = [5, 6, 7]
    truth = plain_tokens(target, prompt, 32)
    drafter = ScriptedDrafter(tiny_drafter(block_size=8).config, {3 + i: token for i, token in enumerate(truth)})
    for limit in range(1, 21):
        # All tokens but those of the answer: whatever a round brings beyond the limit would end the sequence.
        eos_ids = set(range(VOCAB)) - set(truth[:limit])
        run = {"strategy": Greedy(), "policy": FixedWidth(7), "max_tokens": limit, "eos_ids": eos_ids}
        steps = list(decode(Session(target, drafter), prompt, **run))
        assert [token for step in steps for token in step.tokens] == truth[:limit]
        assert steps[-1].finish_reason == "length"


def test_a_round_is_cut_at_the_limit_before_an_end_of_sequence():
    assert clip([1, 2, 9], 2, {9}) == ([1, 2], "length")
    assert clip([1, 2, 9], 3, {9}) == ([1, 2, 9], "stop")
    assert clip([1, 9, 2], 3, {9}) == ([1, 9], "stop")
    assert clip([1, 2], 3, {9}) == ([1, 2], None)


def test_perfect_drafts_are_all_kept(target):
    prompt = [9, 1]
    truth = plain_tokens(target, prompt, 33)
    drafter = ScriptedDrafter(tiny_drafter().config, {2 + i: token for i, token in enumerate(truth)})
    steps = list(
        decode(
            Session(target, drafter),
            prompt,
            strategy=Greedy(),
            policy=FixedWidth(7),
            max_tokens=33,
            eos_ids=set(),
        )
    )
    assert [step.num_accepted for step in steps[1:]] == [7, 7, 7, 7]


class KnowingDrafter(ScriptedDrafter):
    """Drafts from the target's own logits: the script is {position: logits (V,)}."""

    def _scripted(self, anchor, shape):
        return mx.stack([self._script[0].get(anchor + 1 + i, mx.zeros(VOCAB)) for i in range(shape[0])])


@pytest.mark.parametrize(
    "policy",
    [FixedWidth(5), FixedWidth(5, waits=True), FixedWidth(9, places=5)],
    ids=["queued", "waits", "trees"],
)
def test_drafts_that_know_the_targets_logits_are_all_kept_under_a_seed(target, policy):
    """Draft and target choose with the same noise at the same position, wherever in the answer a round begins."""
    prompt = [9, 1]
    run = {"strategy": Coupled(SamplingParams(temperature=1.0, seed=8)), "max_tokens": 25, "eos_ids": set()}
    plain = decode(Session(target, None), prompt, policy=FixedWidth(0), **run)
    text = prompt + [token for step in plain for token in step.tokens]
    logits = target.forward(mx.array([text]), target.make_cache())[0]
    drafter = KnowingDrafter(tiny_drafter().config, {i + 1: row for i, row in enumerate(logits)})
    steps = list(decode(Session(target, drafter), prompt, policy=policy, **run))
    assert prompt + [token for step in steps for token in step.tokens] == text
    # The limit may cut the last round.
    depths = [step.depth for step in steps[1:-1]]
    assert [step.num_accepted for step in steps[1:-1]] == depths
    assert policy.branches or depths == [5, 5, 5]
    assert min(depths) > 1


def test_fixed_trees_find_what_a_chain_misses(target):
    """A drafter whose every draft is wrong, but for its second choice: a chain keeps nothing, a tree much."""
    prompt = [9, 1]
    truth = plain_tokens(target, prompt, 33)
    script = {2 + i: token for i, token in enumerate(truth)}
    gained = {}
    for places in (0, 3):
        drafter = ScriptedDrafter(tiny_drafter().config, script, frozenset(script))
        policy = FixedWidth(14 if places else 7, places=places)
        session = Session(target, drafter)
        steps = list(decode(session, prompt, strategy=Greedy(), policy=policy, max_tokens=33, eos_ids=set()))
        tokens = [token for step in steps for token in step.tokens]
        assert tokens == truth
        check_session(session, prompt, tokens)
        gained[places] = [step.num_accepted for step in steps[1:-2]]
        assert all(step.depth == (places or step.width) for step in steps[1:-2])
    assert set(gained[0]) == {0}
    assert set(gained[3]) == {3}


def test_stopping_early_and_continuing(target):
    """A consumer may leave after any step; the session then continues as if nothing had happened."""
    rng = random.Random(3)
    for _ in range(20):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        drafter = make_drafter(rng.choice(["random", "hostile", "perfect"]), target, prompt, rng, 6)
        session = Session(target, drafter)
        policy = RandomWidth(rng, 5)
        steps = decode(session, prompt, strategy=Greedy(), policy=policy, max_tokens=30, eos_ids=set())
        first = []
        for _ in range(rng.randint(1, 6)):
            first += next(steps).tokens
        steps.close()
        check_session(session, prompt, first)

        follow_up = prompt + first + [rng.randrange(VOCAB), rng.randrange(VOCAB)]
        second = [
            token
            for step in decode(session, follow_up, strategy=Greedy(), policy=policy, max_tokens=10, eos_ids=set())
            for token in step.tokens
        ]
        assert second == plain_tokens(target, follow_up, 10)


def test_rewinding_a_session(target):
    """An edited conversation reuses the common prefix and answers like a fresh session, drafts included."""
    rng = random.Random(4)
    drafter = tiny_drafter(block_size=6)
    for _ in range(15):
        session = Session(target, drafter)
        prompt = [rng.randrange(VOCAB) for _ in range(20)]
        run = {"strategy": Greedy(), "max_tokens": 12, "eos_ids": set()}
        list(decode(session, prompt, policy=RandomWidth(rng, 5), **run))
        keep = rng.randint(0, 24)
        session.rewind(keep)
        edited = session.tokens + [rng.randrange(VOCAB) for _ in range(3)]

        again = list(decode(session, edited, policy=FixedWidth(5), **run))
        fresh = list(decode(Session(target, drafter), edited, policy=FixedWidth(5), **run))

        assert [s.tokens for s in again] == [s.tokens for s in fresh]
        assert [t for s in again for t in s.tokens] == plain_tokens(target, edited, 12)


def test_two_drafters_take_turns_on_one_model(target):
    """Different taps on one loaded model: each drafter drafts exactly as it does alone."""
    prompt = [1, 2, 3, 4]

    def accepted(drafter):
        steps = decode(
            Session(target, drafter),
            prompt,
            strategy=Greedy(),
            policy=FixedWidth(5),
            max_tokens=40,
            eos_ids=set(),
        )
        return [(step.tokens, step.num_accepted) for step in steps]

    first = tiny_drafter(block_size=6, seed=11, taps=(0, 3))
    second = tiny_drafter(block_size=6, seed=12, taps=(1, 2, 3))
    alone = accepted(first), accepted(second)
    interleaved = accepted(first), accepted(second), accepted(first)
    assert interleaved == (alone[0], alone[1], alone[0])


def test_sliding_and_causal_drafters(target):
    """Other attention patterns in the drafter change acceptance only."""
    base = tiny_drafter(block_size=6)
    for changes in (
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 7},
        {"is_causal": True},
        {"draft_token_ids": tuple(range(0, VOCAB, 2))},
        {"final_logit_softcapping": 5.0, "output_multiplier": 0.5, "input_embedding_scale": 2.0},
    ):
        drafter = tiny_drafter(block_size=6, **changes)
        assert replace(base.config, **changes) == drafter.config
        steps = decode(
            Session(target, drafter),
            [7] * 30,
            strategy=Greedy(),
            policy=FixedWidth(5),
            max_tokens=30,
            eos_ids=set(),
        )
        assert [t for s in steps for t in s.tokens] == plain_tokens(target, [7] * 30, 30)


def test_parameters_are_untouched(target):
    before = mx.concatenate([p.reshape(-1) for p in _leaves(target)])
    classes = [type(layer) for layer in target.layers]
    session = Session(target, tiny_drafter(taps=(0, LAYERS - 1)))
    list(decode(session, [1, 2], strategy=Greedy(), policy=FixedWidth(3), max_tokens=9, eos_ids=set()))
    assert mx.array_equal(before, mx.concatenate([p.reshape(-1) for p in _leaves(target)])).item()
    assert [type(layer) for layer in target.layers] == classes
    assert all("_dflash_tap_sink" not in layer.__dict__ for layer in target.layers)


def _leaves(target):
    from mlx.utils import tree_flatten

    return [array for _, array in tree_flatten(target.model.parameters())]
