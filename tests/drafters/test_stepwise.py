"""Drafters that draft one token after another: whatever happened to their caches, they draft what a drafter does that
reads the whole text anew; and no answer changes by them."""

import random

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from test_batches import RandomGroup
from test_lossless import RandomWidth
from tiny import HIDDEN, VOCAB, ends_of_writes, mostly_slow, plain_tokens, randomize, tiny_eagle3, tiny_target
from tiny_families import family_target, unavailable

from dflash_mlx.caches.replay import Replayed
from dflash_mlx.decoding import batch as batches
from dflash_mlx.decoding import decode as one_answer
from dflash_mlx.decoding.accept import Coupled, Greedy
from dflash_mlx.decoding.batch import Batch
from dflash_mlx.decoding.decode import decode, prefill
from dflash_mlx.decoding.engine import Engine
from dflash_mlx.decoding.fork import can_cut, fork
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters import stepwise
from dflash_mlx.drafters.contract import Drafted, Nobody
from dflash_mlx.drafters.draft_model import DraftModel
from dflash_mlx.drafters.mtp import MTPDrafter, MTPNetwork
from dflash_mlx.drafters.ranking import BRANCHES, rank
from dflash_mlx.drafters.stepwise import StepwiseState
from dflash_mlx.policy.group import FixedGroup
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams

PLACES, CHUNK = 5, 8


def draft_model():
    """A target, and the same with some noise, so that it keeps some of the drafts."""
    model = tiny_target("llama")
    noise = iter(mx.random.split(mx.random.key(3), 100))
    model.model.update(
        tree_map(lambda x: x * (1 + 0.1 * mx.random.normal(x.shape, key=next(noise))), model.model.parameters())
    )
    return tiny_target("llama"), DraftModel(model, places=PLACES)


def eagle3():
    return tiny_target("llama"), tiny_eagle3(6, places=PLACES, draft_token_ids=tuple(range(0, VOCAB, 2)))


def mtp():
    """Its target has recurrent layers."""
    target = family_target("qwen3_5")
    args = target.model.language_model.args
    network = MTPNetwork(HIDDEN, 1e-5, type(target.layers[0])(args, 1), norms_between=True)
    randomize(network, 6)
    return target, MTPDrafter(network, target, places=PLACES)


KINDS = {"draft_model": draft_model, "eagle3": eagle3, "mtp": mtp}


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    if request.param == "mtp" and (reason := unavailable("qwen3_5")):
        pytest.skip(reason)
    return KINDS[request.param]()


@pytest.fixture
def target(pair):
    return pair[0]


@pytest.fixture
def drafter(pair):
    return pair[1]


def anew(target, drafter, text, places, choose):
    """What is drafted after a text whose last token is the anchor, by reading all of it: tokens (W,), logits (W, n)."""
    caches, hidden = drafter.make_layer_caches(), mx.zeros((1, len(text), 1))
    if drafter.taps:
        features = target.forward_tapped(mx.array([text[:-1]]), target.make_cache(), drafter.taps)[1]
        text, hidden = text[1:], drafter.project(features)
    drafts, all_logits = [], []
    for place in range(places):
        hidden = drafter.feed(target, mx.array([text]), hidden, caches)[:, -1:]
        all_logits.append(drafter.logits(target, hidden)[0])
        text = choose(all_logits[-1], place).tolist()
        drafts += text
    return drafts, np.array(mx.concatenate(all_logits))


class Watched:
    """What a drafter drafts in the loop, to be compared with reading anew once the texts are known.

    Where a drafter's own drafts are not in its caches, some are replaced by the answer's tokens, so that all parts of
    drafts are kept. `texts` has the prompt and the plain answer of each strategy that is drafted for.
    """

    def __init__(self, target, drafter, rng, monkeypatch):
        self.target, self.drafter, self.rng, self.texts, self.seen, self.grown = target, drafter, rng, {}, [], []
        self.propose = StepwiseState.propose
        monkeypatch.setattr(StepwiseState, "propose", lambda state, *rest, **options: self(state, *rest, **options))

    def __call__(self, state, writers, anchors, at, places, *, room, tree=False):
        drafted = self.propose(state, writers, anchors, at, places, room=room, tree=tree)
        assert (drafted.grown is not None) == (tree and self.drafter.supports_trees)
        if drafted.grown is not None:
            [writer], begin = writers, int(at[0])
            self.grown.append((writer, begin, int(anchors[0]), drafted.grown))
            self.mend(
                drafted.grown, self.texts.get(id(writer.strategy), [])[begin + 1 :][: self.rng.randint(0, places)]
            )
            return drafted
        tokens = np.array(drafted.tokens)
        for row, writer in enumerate(writers):
            if isinstance(writer, Lane):
                begin = int(at[row])
                self.seen.append(
                    (writer, begin, int(anchors[row]), tokens[row].tolist(), np.array(drafted.logits[row]))
                )
                text = self.texts.get(id(writer.strategy), [])[begin + 1 :][: self.rng.randint(0, places)]
                tokens[row, : len(text)] = text if self.drafter.taps else tokens[row, : len(text)]
        return Drafted(mx.array(tokens), drafted.logits)

    def mend(self, grown, text):
        """Have the likeliest path of what was grown begin with a text. Drafts after the same ones stay different."""
        paths, tokens = np.array(grown.paths), np.array(grown.token_ids)
        self.grown[-1] += (paths, tokens.copy(), np.array(grown.log_probs))
        for place, (index, token) in enumerate(zip(paths[np.array(grown.best)[-1]].tolist(), text, strict=False)):
            siblings = (paths[:, :place] == paths[index, :place]).all(axis=1) & (paths[:, place] < len(tokens))
            siblings &= (paths[:, place + 1 :] == len(tokens)).all(axis=1)
            [same] = np.nonzero(siblings & (tokens == token))
            tokens[same], tokens[index] = tokens[index], token
        grown.token_ids = mx.array(tokens)

    def compare_trees(self, most):
        """The same with what was grown: some paths of it."""
        known = [(self.texts[id(lane.strategy)], lane, *rest) for lane, *rest in self.grown]
        known = [seen for seen in known if len(seen[0]) > seen[2] >= 1]
        for text, lane, at, anchor, _, paths, tokens, log_probs in self.rng.sample(known, min(most, len(known))):
            assert text[at] == anchor
            path = [index for index in paths[self.rng.randrange(len(paths))].tolist() if index < len(paths)]
            drafts = iter(tokens[path].tolist())

            def choose(logits, place, drafts=drafts):
                return np.array([next(drafts)])

            _, logits = anew(self.target, self.drafter, text[: at + 1], len(path), choose)
            vocabulary = self.drafter.vocabulary(self.target)
            scores = lane.strategy.preferences(mx.array(logits), at + 1, vocabulary)
            ranking = rank(scores, BRANCHES, vocabulary.token_ids)
            for place, index in enumerate(path):
                found = dict(zip(ranking.token_ids[place].tolist(), ranking.log_probs[place].tolist(), strict=True))
                assert found[tokens[index]] == pytest.approx(log_probs[index], abs=1e-3)
        return len(known)

    def compare(self, most):
        """With reading anew, some of what was drafted. Returns how many places were compared."""
        known = [(self.texts[id(lane.strategy)], lane, *rest) for lane, *rest in self.seen]
        # Without a token before the anchor there is no feature; what a finished answer would go on with is not known.
        known = [seen for seen in known if len(seen[0]) > seen[2] >= (1 if self.drafter.taps else 0)]
        for text, lane, at, anchor, tokens, logits in self.rng.sample(known, min(most, len(known))):
            assert text[at] == anchor

            def choose(logits, place, lane=lane, at=at):
                return lane.strategy.propose(logits, at + 1 + place, self.drafter.vocabulary(self.target)).tokens

            expected, expected_logits = anew(self.target, self.drafter, text[: at + 1], len(tokens), choose)
            assert np.abs(logits - expected_logits).max() < 1e-4
            assert tokens == expected
        return len(known)


def plain(target, prompt, strategy, max_tokens):
    """The answer without a drafter: mlx-lm's own at temperature 0."""
    if isinstance(strategy, Greedy):
        return plain_tokens(target, prompt, max_tokens, prefill_step_size=CHUNK)
    steps = decode(
        Session(target, None), prompt, strategy=strategy, policy=FixedWidth(0), max_tokens=max_tokens, eos_ids=set()
    )
    return [token for step in steps for token in step.tokens]


class Asked:
    """A prompt and the plain answer to it; the prompt may go on where an earlier one's session is."""

    def __init__(self, target, watched, rng, *, session=None, lengths=(1, 2, 9, 17)):
        before = session.tokens if session else []
        before = before[: rng.choice([len(before), rng.randint(0, len(before))])]
        self.session = session or Session(target, watched.drafter)
        self.prompt = before + [rng.randrange(VOCAB) for _ in range(rng.choice(lengths))]
        sampled = Coupled(SamplingParams(temperature=0.7), seed=rng.randrange(99))
        self.strategy = rng.choice([Greedy(), sampled])
        self.max_tokens = rng.choice([1, 20, 30])
        self.answer, self.tokens = plain(target, self.prompt, self.strategy, self.max_tokens), []
        watched.texts[id(self.strategy)] = self.prompt + self.answer
        self.policy = RandomWidth(rng, PLACES)

    def lane(self):
        options = {"max_tokens": self.max_tokens, "eos_ids": set(), "policy": self.policy}
        return Lane(session=self.session, prompt=self.prompt, strategy=self.strategy, **options)

    def read(self):
        self.session.rewind(min(len(self.session.tokens), len(self.prompt) - 1))
        if self.session.tokens != self.prompt[: len(self.session.tokens)]:
            self.session.reset()
        prefill(self.session, self.prompt[:-1])
        return self.lane()


@pytest.mark.parametrize(
    "seed", [*mostly_slow(range(3), 0), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 12))]
)
def test_drafts_are_those_of_a_drafter_that_reads_all_anew(target, drafter, seed, monkeypatch):
    """Over answers that come and go, alone and together, whose prompts are read in one pass and one by one, and whose
    sessions go on, are edited and copied."""
    rng = random.Random(seed)
    monkeypatch.setattr(one_answer, "PREFILL_STEP", CHUNK)
    monkeypatch.setattr(batches, "_ROUNDS_UNUSED", rng.choice([0, 2]))
    monkeypatch.setattr(stepwise, "_MOST_MISSING", rng.choice([3, 64]))
    watched = Watched(target, drafter, rng, monkeypatch)
    engine, lanes = Engine(target, drafter, policy=RandomGroup(rng)), {}
    together = [Asked(target, watched, rng, lengths=(2, 3, 9, 17)) for _ in range(rng.choice([1, 3]))]
    batch = Batch.reading(target, drafter, [asked.prompt for asked in together])
    for asked in together:
        asked.session.tokens = asked.prompt[:-1]
        lanes[asked.lane()] = asked
    batch.begin(list(lanes))
    engine.join_all(batch)
    waiting, further, kept = [Asked(target, watched, rng) for _ in range(3)], 3, 0
    while engine.lanes or waiting:
        if waiting and (not engine.lanes or rng.random() < 0.3):
            asked = waiting.pop()
            lane = asked.read()
            lanes[lane] = asked
            engine.join(lane)
        for lane, step in engine.advance():
            asked = lanes[lane]
            asked.tokens += step.tokens
            kept += step.num_accepted
            if step.finish_reason is None and rng.random() < 0.9:
                continue
            copied = can_cut(asked.session) and rng.random() < 0.5
            session = fork(asked.session, len(asked.session.tokens)) if copied else asked.session
            engine.leave(lane)
            assert asked.tokens == asked.answer[: len(asked.tokens)]
            assert asked.session.tokens == (asked.prompt + asked.tokens)[: len(asked.session.tokens)]
            assert {cache.offset for cache in asked.session.draft_cache} == {len(asked.session.tokens)}
            if further:
                further -= 1
                waiting.append(Asked(target, watched, rng, session=session))
    compared = watched.compare(25) + watched.compare_trees(25)
    assert compared > 3
    assert kept > 0


def run(target, drafter, prompts, max_tokens, width):
    """The steps of greedy answers made together at one width, by their lanes."""
    engine, steps = Engine(target, drafter, policy=FixedGroup(width)), {}
    for prompt in prompts:
        session = Session(target, drafter)
        prefill(session, prompt[:-1])
        options = {"strategy": Greedy(), "policy": FixedWidth(width), "max_tokens": max_tokens, "eos_ids": set()}
        lane = Lane(session=session, prompt=prompt, **options)
        steps[lane] = []
        engine.join(lane)
    while engine.lanes:
        for lane, step in engine.advance():
            steps[lane].append(step)
    return steps


def test_passes_are_replayed_where_the_targets_are(target, drafter, request):
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6]]
    request.addfinalizer(lambda: target.set_replays(False))
    found = []
    for replays in (False, True):
        target.set_replays(replays)
        found.append([[step.tokens for step in steps] for steps in run(target, drafter, prompts, 12, 2).values()])
        assert isinstance(target.recorded.drafting[id(drafter)].step, Replayed) == replays
    assert found[0] == found[1]


def test_targets_that_do_not_take_rows(target, drafter, monkeypatch):
    monkeypatch.setattr(target, "_rows", False)
    [steps] = run(target, drafter, [[3, 1, 4, 1]], 20, 3).values()
    assert [token for step in steps for token in step.tokens] == plain_tokens(target, [3, 1, 4, 1], 20)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("start", range(236, 258, 7))
def test_there_is_always_room(target, drafter, lanes, start, monkeypatch):
    """Whatever a round may keep, what it writes fits the buffers of both models: nothing checks that on the device."""
    ends = ends_of_writes(monkeypatch)
    prompts = [[i % 40 for i in range(length)] for length in (start, 2, 240)[:lanes]]
    for width in (PLACES, 1):
        run(target, drafter, prompts, 12, width)
    assert max(ends) >= start


@pytest.mark.parametrize("own", [True, False])
def test_rounds_that_wait_to_be_read_leave_room(target, drafter, own, monkeypatch):
    """Rounds of which only the anchor was kept: one with its own drafts among plain ones, or all with drafts of another
    kind. The drafter reads them all at once."""
    ends, rng = ends_of_writes(monkeypatch), random.Random(2)
    session, text = Session(target, drafter), [rng.randrange(VOCAB) for _ in range(240)]
    prefill(session, text[:-1])
    state, taps = drafter.open(target, session.draft_cache, len(text) - 1), drafter.taps
    for at in range(239, 256):
        drafts = PLACES if at == 248 or not own else 0
        if drafts and own:
            state.propose([Nobody()], mx.array([5]), mx.array([at]), drafts, room=at + 1 + drafts)
        fed = mx.zeros((1, drafts + 1), dtype=mx.uint32)
        features = mx.zeros((1, drafts + 1, len(taps) * target.hidden_size)) if taps else None
        state.extend(fed, features, mx.array([at]), room=at + 1, all_kept=not drafts)
    state.settle(mx.array([256]))
    assert max(ends) > 256
