"""Answers made together are the answers made alone: each lane's tokens equal mlx-lm's plain decoding of its prompt.

Random cases over the families that batch, drafters (random, hostile, perfect), widths that change from round to round,
lanes that join and leave in mid-answer, stops inside a round, and conversations that go on afterwards.
"""

import os
import random
from collections.abc import Sequence

import numpy as np
import pytest
import test_sampling
from json_tokens import SCHEMA, json_pair
from test_lossless import RandomWidth
from tiny import VOCAB, ScriptedDrafter, plain_tokens, tiny_drafter, tiny_target
from tiny_families import FAMILY_CONFIGS, family_target, unavailable

from dflash_mlx.decoding import batch
from dflash_mlx.decoding import decode as one_answer
from dflash_mlx.decoding.accept import Coupled, Greedy, Rejection
from dflash_mlx.decoding.constraint import json_constraint
from dflash_mlx.decoding.decode import decode, prefill
from dflash_mlx.decoding.engine import Engine
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.policies import Choice
from dflash_mlx.decoding.session import Session, common_prefix
from dflash_mlx.drafters import dflash_state
from dflash_mlx.drafters.denoising import DFlashConfig
from dflash_mlx.drafters.ngram import NgramDrafter
from dflash_mlx.drafters.with_ngram import WithNgram
from dflash_mlx.policy.group import FixedGroup
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams

CHUNK, WIDTH = 16, 5
CASES, FEW = int(os.environ.get("LOSSLESS_CASES", "8")), 4


class RandomGroup:
    """Another width each round, 0 included, sometimes by the drafts' chances."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.confident_share = rng.choice([0.0, 0.5, 1.0])

    def next_round(self, lanes: int) -> Choice:
        width = self.rng.choice([0, 1, WIDTH, self.rng.randint(0, WIDTH)])
        return Choice(width, width=None if self.rng.random() < self.confident_share else width)

    def choose(self, best, *, rows) -> int:
        assert 0 < len(best) <= rows
        assert ((best >= 0) & (best < 1.0001)).all()
        return self.rng.randint(0, best.shape[1])

    def observe(self, report) -> None:
        assert report.rows > 1
        assert all(0 <= kept <= report.width for _, kept in report.kept)


class Texts(ScriptedDrafter):
    """A drafter that knows several answers: after each anchor it drafts as the text does that it finds there."""

    def __init__(self, config, texts: Sequence[list[int]], rng: random.Random, share: float) -> None:
        super().__init__(config, {}, frozenset())
        self._texts, self._rng, self._share = [texts], rng, share

    def embed_block(self, tokens, embed):
        self._tokens = [tokens[:, 0].tolist()]
        return super().embed_block(tokens, embed)

    def _scripted(self, anchor, shape):
        row = len(self._seen[0])
        self._seen[0].append(anchor)
        token = self._tokens[0][row]
        text = next((t for t in self._texts[0] if anchor < len(t) and t[anchor] == token), [])
        self._script = [{at: text[at] if at < len(text) else 0 for at in range(anchor, anchor + shape[0] + 1)}]
        self._wrong = [frozenset(at for at in self._script[0] if self._rng.random() < self._share)]
        return super()._scripted(anchor, shape)

    def adjust_logits(self, logits):
        self._seen = [[]]
        return super().adjust_logits(logits)


@pytest.fixture(scope="module", params=sorted(FAMILY_CONFIGS))
def target(request):
    if reason := unavailable(request.param):
        pytest.skip(reason)
    target = family_target(request.param)
    if not target.takes_rows():
        pytest.skip("this family's answers are made one at a time")
    return target


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(one_answer, "PREFILL_STEP", CHUNK)


class Asked:
    """A prompt, what mlx-lm answers, and what came so far."""

    def __init__(self, target, rng, *, prompt=None, session=None):
        self.prompt = prompt or [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 9, 17, 30]))]
        self.max_tokens = rng.choice([1, 2, 7, 20])
        free = plain_tokens(target, self.prompt, self.max_tokens, prefill_step_size=CHUNK)
        self.eos_ids = {rng.choice(free)} if rng.random() < 0.4 else set()
        ends = [i for i, token in enumerate(free) if token in self.eos_ids]
        self.expected = free[: ends[0] + 1] if ends else free
        self.tokens: list[int] = []
        self.session, self.finish_reason = session, None

    def lane(self, target, drafter, rng):
        self.session = self.session or Session(target, drafter)
        self.session.rewind(min(common_prefix(self.session.tokens, self.prompt), len(self.prompt) - 1))
        prefill(self.session, self.prompt[:-1])
        return Lane(
            session=self.session,
            prompt=self.prompt,
            strategy=Greedy(),
            policy=RandomWidth(rng, WIDTH),
            max_tokens=self.max_tokens,
            eos_ids=self.eos_ids,
        )


def check_books(asked):
    session, history = asked.session, asked.prompt + asked.tokens
    assert session.away is None
    assert session.tokens == history[: len(session.tokens)]
    assert len(session.tokens) >= len(history) - 1 or not asked.tokens


@pytest.mark.parametrize(
    "seed",
    [
        *range(FEW),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FEW, max(CASES - 2, FEW))),
        *(pytest.param(seed, marks=pytest.mark.long) for seed in range(max(CASES - 2, FEW), CASES)),
    ],
)
def test_each_lane_answers_as_if_alone(target, seed, monkeypatch, request):
    rng = random.Random(seed)
    monkeypatch.setattr(batch, "_ROUNDS_UNUSED", [0, 2, 8][seed % 3])
    if seed % 8 == FEW:
        # As on a GPU, where passes are replayed. Drafters that read on the host cannot be.
        target.set_replays(True)
        request.addfinalizer(lambda: target.set_replays(False))
        monkeypatch.setattr(dflash_state, "replayed", lambda body, on: body)
    if rng.random() < 0.3:
        # As on CUDA, where rows without a lane stay for a while.
        monkeypatch.setattr(batch, "rows_for", lambda lanes: -(-lanes // 4) * 4 if lanes > 1 else lanes)
        monkeypatch.setattr(batch, "reading_shape", lambda prompts, tokens: (-(-prompts // 4) * 4, -(-tokens // 8) * 8))
    asked = [Asked(target, rng) for _ in range(rng.choice([2, 3, 4, 8] if seed < FEW else [2, 3, 5, 8, 16]))]
    share = rng.choice([0.0, 0.3, 1.0])
    texts = [a.prompt + a.expected for a in asked]
    config = tiny_drafter(block_size=WIDTH + 1, taps=rng.choice([(0, 2), (1,)])).config
    kind = rng.choice(["none", "random", "knows", "knows", "ngram", "both", "steps"])
    drafter = (
        None
        if kind == "none"
        else NgramDrafter(WIDTH, always=rng.random() < 0.5)
        if kind == "ngram"
        else WithNgram(tiny_drafter(block_size=WIDTH + 1, seed=seed))
        if kind == "both"
        else tiny_drafter(block_size=WIDTH + 1, seed=seed)
        if kind == "random"
        else tiny_drafter(block_size=WIDTH + 1, seed=seed).drafting_as(DFlashConfig(diffusion_steps=3))
        if kind == "steps"
        else Texts(config, texts, rng, share)
    )
    running = Engine(target, drafter, policy=RandomGroup(rng))
    waiting, lanes, done = list(asked), {}, []
    while waiting or running.lanes:
        while waiting and (not running.lanes or rng.random() < 0.5):
            one = waiting.pop()
            lane = one.lane(target, drafter, rng)
            lanes[lane] = one
            running.join(lane)
        if len(running.lanes) > 1 and rng.random() < 0.05:
            left = rng.choice(running.lanes)
            running.leave(left)
            check_books(lanes[left])
            assert lanes[left].tokens == lanes[left].expected[: len(lanes[left].tokens)]
        for lane, step in running.advance():
            one = lanes[lane]
            one.tokens += step.tokens
            one.finish_reason = step.finish_reason
            if step.finish_reason is not None:
                assert one.tokens == one.expected
                assert step.finish_reason == ("stop" if one.expected[-1] in one.eos_ids else "length")
                check_books(one)
                done.append(one)
                if rng.random() < 0.3:
                    # The conversation goes on, or is edited.
                    text = one.prompt + one.tokens
                    text = text if rng.random() < 0.5 else text[: rng.randint(1, len(text))]
                    waiting.append(Asked(target, rng, prompt=[*text, 5, 6], session=one.session))
    assert done


def test_perfect_drafts_are_all_kept(target):
    """20 tokens in rounds of 4 drafts and the target's own take 4 rounds; lanes with shorter answers leave earlier."""
    width, limits = 4, {20: 4, 10: 2, 5: 1}
    # Every beginning of it is continued by the rest, so that one script serves all lanes.
    text = [3, *plain_tokens(target, [3], 40, prefill_step_size=CHUNK)]
    drafter = ScriptedDrafter(tiny_drafter(block_size=width + 1).config, dict(enumerate(text)))
    running = Engine(target, drafter, policy=FixedGroup(width))
    steps = {}
    for length, limit in zip((3, 20, 1), limits, strict=True):
        session, prompt, policy = Session(target, drafter), text[:length], FixedWidth(width)
        prefill(session, prompt[:-1])
        lane = Lane(session=session, prompt=prompt, strategy=Greedy(), policy=policy, max_tokens=limit, eos_ids=set())
        running.join(lane)
        steps[lane] = []
    rounds = 0
    while running.lanes:
        rounds += 1
        for lane, step in running.advance():
            steps[lane].append(step)
    assert rounds == 4
    for lane, own in steps.items():
        assert [step.num_accepted for step in own] == [width] * limits[lane.max_tokens]
        assert [t for step in own for t in step.tokens] == text[len(lane.prompt) :][: lane.max_tokens]


@pytest.mark.parametrize("seed", range(4))
def test_sampled_lanes_draw_what_they_draw_alone(seed):
    """With a seed each, one with penalties, one that reports log-probabilities and one that writes JSON."""
    rng, pair = random.Random(seed), json_pair(block_size=WIDTH + 1)
    constraint = json_constraint(pair, SCHEMA)
    penalties = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, logit_bias={5: 2.0})
    wanted = [
        lambda: {"processors": penalties.logits_processors()},
        lambda: {"top_logprobs": 3},
        lambda: {"guide": constraint.start()},
        dict,
    ]
    rng.shuffle(wanted)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in (3, 12, 1, 7)]

    def options(i):
        params = SamplingParams(temperature=0.9, top_p=0.95, seed=10 * seed + i)
        return {"strategy": Coupled(params), "max_tokens": 30, "eos_ids": pair.eos_ids, **wanted[i]()}

    alone = []
    for i, prompt in enumerate(prompts):
        steps = list(decode(Session(pair.target, None), prompt, policy=FixedWidth(0), **options(i)))
        alone.append(([t for s in steps for t in s.tokens], [p for s in steps for p in s.logprobs]))
    texts = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, alone, strict=True)]
    drafter = Texts(pair.drafter.config, texts, rng, 0.3)
    running = Engine(pair.target, drafter, policy=RandomGroup(rng))
    found, kept = {}, 0
    for i, prompt in enumerate(prompts):
        session = Session(pair.target, drafter)
        prefill(session, prompt[:-1])
        lane = Lane(session=session, prompt=prompt, policy=RandomWidth(rng, WIDTH), **options(i))
        running.join(lane)
        found[lane] = [], []
    while running.lanes:
        for lane, step in running.advance():
            found[lane][0].extend(step.tokens)
            found[lane][1].extend(step.logprobs)
            kept += step.num_accepted
    assert kept > 20
    for (tokens, logprobs), (expected, expected_logprobs) in zip(found.values(), alone, strict=True):
        assert tokens == expected
        assert len(logprobs) == len(expected_logprobs)
        for one, other in zip(logprobs, expected_logprobs, strict=True):
            assert one.token_id == other.token_id
            scores = [[entry.logprob, *(score for _, score in entry.top)] for entry in (one, other)]
            assert np.allclose(*scores, atol=1e-3)


@pytest.mark.slow
def test_lanes_without_a_seed_keep_the_targets_distribution():
    """The first three tokens of two lanes out of three, the one between them at other positions."""
    params, prompt, runs = SamplingParams(temperature=0.8), test_sampling.PROMPT, 500
    target = tiny_target("llama", seed=3, vocab_size=test_sampling.VOCAB, num_hidden_layers=1)
    one_layer = {"num_hidden_layers": 1, "layer_types": ("full_attention",), "num_target_layers": 1}
    drafter = tiny_drafter(block_size=4, taps=(0,), vocab_size=test_sampling.VOCAB, **one_layer)
    prompts = [prompt, [*prompt, 0, 3, 3, 1], prompt]
    sessions = [Session(target, drafter) for _ in prompts]
    strategies = [Rejection(params, seed=20 + i) for i in range(3)]
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(runs):
        running = Engine(target, drafter, policy=FixedGroup(3))
        found = {}
        for session, own, strategy in zip(sessions, prompts, strategies, strict=True):
            session.rewind(len(own) - 1)
            prefill(session, own[:-1])
            lane = Lane(
                session=session, prompt=own, strategy=strategy, policy=FixedWidth(3), max_tokens=5, eos_ids=set()
            )
            running.join(lane)
            found[lane] = []
        while min(map(len, found.values())) < 3:
            for lane, step in running.advance():
                found[lane] += step.tokens
        for session in sessions:
            session.settle()
        for tokens in (tokens for lane, tokens in found.items() if lane.prompt is prompt):
            counts[tuple(tokens[:3])] = counts.get(tuple(tokens[:3]), 0) + 1
    assert sum(counts.values()) == 2 * runs
    expected = test_sampling.exact_joint(target, params)
    assert test_sampling.chi_square_p(counts, expected, 2 * runs) > 1e-3
