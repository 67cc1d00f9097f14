"""Drafting never changes the answer, for each family of targets: float32, tiny models, real mlx-lm classes.

Windows and attention chunks hold 8 positions and prefill takes 16 at a time, so prompts and answers go over every edge.
Expert layers may round differently for a block than for a single token (mlx-lm sorts tokens by expert where there are
many), and one token more or less in float32's last place can choose another expert: the random weights are drawn so
that this does not happen, because these tests are about logic. The cases of each are listed in docs/families.md.
"""

import random

import mlx.core as mx
import pytest
from test_lossless import RandomWidth
from tiny import LAYERS, VOCAB, ScriptedDrafter, mostly_slow, plain_tokens, tiny_drafter
from tiny_families import FAMILY_CONFIGS, OWN_EMBEDDINGS, WINDOW, family_target, unavailable

from dflash_mlx.checks import check_pair
from dflash_mlx.decoding import decode as one_answer
from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.session import Session, common_prefix
from dflash_mlx.policy.width import FixedWidth

CHUNK, WIDTH = 16, 5
RUN = {"strategy": Greedy(), "eos_ids": set()}


# One of each kind of cache: windows, keys that layers share, recurrences of several sorts.
QUICK = ("gemma3", "gemma4, shared keys", "kimi_linear", "lfm2", "llama", "mamba2", "qwen3_5")


@pytest.fixture(scope="module", params=mostly_slow(sorted(FAMILY_CONFIGS), *QUICK))
def target(request):
    if reason := unavailable(request.param):
        pytest.skip(reason)
    return family_target(request.param)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(one_answer, "PREFILL_STEP", CHUNK)


def draw(rng, length):
    return [rng.randrange(VOCAB) for _ in range(length)]


def truth_of(target, prompt, max_tokens):
    """mlx-lm's own answer, prefilled in the same chunks."""
    return plain_tokens(target, prompt, max_tokens, prefill_step_size=CHUNK)


def scripted(prompt, truth, wrong=(), *, taps=(0, 2)):
    script = {len(prompt) + i: token for i, token in enumerate(truth)}
    return ScriptedDrafter(tiny_drafter(block_size=WIDTH + 1, taps=taps).config, script, frozenset(wrong))


def tokens_of(steps):
    return [token for step in steps for token in step.tokens]


def check_drafters_context(session):
    """The drafter's cache holds what it would hold had only the kept tokens ever been fed."""
    fresh = Session(session.target, session.drafter)
    one_answer.prefill(fresh, session.tokens)
    for found, expected in zip(session.draft_cache, fresh.draft_cache, strict=True):
        assert found.offset == expected.offset == len(session.tokens)
        for name in ("keys", "values"):
            a, b = (getattr(cache, name)[..., : cache.offset, :] for cache in (found, expected))
            assert mx.allclose(a, b, rtol=1e-3, atol=1e-3)


class NotedDrafts(Greedy):
    """Greedy decoding that notes what was drafted in each round."""

    def __init__(self):
        self.drafts = []

    def propose(self, logits, position, vocabulary=None):
        proposal = super().propose(logits, position, vocabulary)
        self.drafts.append(proposal.tokens.tolist())
        return proposal


@pytest.mark.parametrize("length", [3, 2 * CHUNK + WINDOW + 1], ids=["short-prompt", "long-prompt"])
def test_rejection_at_every_offset(target, length):
    """Each round keeps exactly j drafts, for every j, while the answer goes over the edges of window and chunk."""
    prompt = draw(random.Random(length), length)
    truth = truth_of(target, prompt, 30)
    assert len(set(truth)) > 4, "the random model repeats itself; the test would prove little"
    for keep in range(WIDTH + 1):
        # The first token comes from a plain round; after it, each round keeps `keep` drafts and adds a token.
        wrong = range(length + 1 + keep, length + 40, keep + 1) if keep < WIDTH else ()
        session = Session(target, scripted(prompt, truth, wrong))
        steps = list(decode(session, prompt, policy=FixedWidth(WIDTH), max_tokens=24, **RUN))
        assert tokens_of(steps) == truth[:24]
        assert {step.num_accepted for step in steps[1:-1]} == {keep}
        assert session.tokens == (prompt + truth)[: length + 23]
        check_drafters_context(session)


def test_widths_that_change(target):
    """Plain rounds, which run ahead, mixed with drafted ones of every width, good and bad drafts."""
    rng = random.Random(1)
    for length in (1, 40):
        prompt = draw(rng, length)
        truth = truth_of(target, prompt, 28)
        for share in (0.3, 1.0):
            wrong = [at for at in range(length, length + 40) if rng.random() < share]
            drafter = scripted(prompt, truth, wrong, taps=rng.choice([(1,), (0, 3)]))
            session = Session(target, drafter)
            steps = decode(session, prompt, policy=RandomWidth(rng, WIDTH), max_tokens=28, **RUN)
            assert tokens_of(steps) == truth


def test_sessions_are_reused(target):
    """A longer prompt continues from the caches; an edited one goes back; both answer like mlx-lm from the start."""
    rng = random.Random(2)
    drafter = tiny_drafter(block_size=WIDTH + 1)
    prompt = draw(rng, CHUNK + 3)
    session = Session(target, drafter)
    answer = tokens_of(decode(session, prompt, policy=FixedWidth(WIDTH), max_tokens=12, **RUN))

    longer = prompt + answer + draw(rng, CHUNK + 1)
    prefilled = []
    steps = decode(
        session, longer, policy=FixedWidth(WIDTH), max_tokens=12, on_prefill=lambda *at: prefilled.append(at), **RUN
    )
    assert tokens_of(steps) == truth_of(target, longer, 12)
    assert prefilled[-1][1] == CHUNK + 1, "only what is new is prefilled"

    for kept in (len(longer) + 5, CHUNK + 1, 2):
        session.rewind(kept)
        edited = session.tokens + draw(rng, 4)
        again = list(decode(session, edited, policy=FixedWidth(WIDTH), max_tokens=10, **RUN))
        fresh = list(decode(Session(target, drafter), edited, policy=FixedWidth(WIDTH), max_tokens=10, **RUN))
        assert tokens_of(again) == tokens_of(fresh)
        assert tokens_of(again) == truth_of(target, edited, 10)


@pytest.mark.parametrize(
    "drafting", [pytest.param(True, id="drafted"), pytest.param(False, marks=pytest.mark.long, id="plain")]
)
def test_interrupted_answers(target, drafting):
    """A consumer leaves after some step; the caches hold what was committed, and the next answer is right."""
    rng = random.Random(3)
    prompt = draw(rng, 2 * WINDOW + 3)
    truth = truth_of(target, prompt, 30)
    for rounds in (1, 2, 5):
        wrong = [at for at in range(len(prompt), len(prompt) + 40) if rng.random() < 0.3]
        session = Session(target, scripted(prompt, truth, wrong) if drafting else None)
        steps = decode(session, prompt, policy=RandomWidth(rng, WIDTH), max_tokens=30, **RUN)
        first = tokens_of(next(steps) for _ in range(rounds))
        steps.close()
        assert session.tokens == (prompt + first)[:-1], "what was committed stays"

        follow_up = prompt + first + draw(rng, 2)
        session.rewind(common_prefix(session.tokens, follow_up[:-1]))
        assert len(session.tokens) == len(prompt + first) - 1
        second = decode(session, follow_up, policy=FixedWidth(WIDTH), max_tokens=10, **RUN)
        assert tokens_of(second) == truth_of(target, follow_up, 10)


def test_a_failing_forward_leaves_no_half_fed_cache(target):
    """An exception between two layers: what the session still claims to hold is right, and so is the next answer."""
    prompt = draw(random.Random(4), 9)
    session = Session(target, tiny_drafter(block_size=WIDTH + 1))
    steps = decode(session, prompt, policy=FixedWidth(WIDTH), max_tokens=30, **RUN)
    next(steps)
    layer = target.layers[LAYERS // 2]

    def interrupted(self, *_args, **_kwargs):
        raise KeyboardInterrupt

    kind = type(layer)
    layer.__class__ = type("Interrupted", (kind,), {"__call__": interrupted})
    with pytest.raises(KeyboardInterrupt):
        list(steps)
    layer.__class__ = kind
    session.rewind(len(prompt) - 1)
    again = decode(session, prompt, policy=FixedWidth(WIDTH), max_tokens=10, **RUN)
    assert tokens_of(again) == truth_of(target, prompt, 10)


def test_two_drafters_in_turn(target):
    """Different taps on one loaded model: each drafter drafts and is accepted exactly as when it is alone."""
    prompt = draw(random.Random(5), 2 * WINDOW)

    def rounds(drafter):
        noted = NotedDrafts()
        session = Session(target, drafter)
        steps = decode(session, prompt, strategy=noted, policy=FixedWidth(WIDTH), max_tokens=12, eos_ids=set())
        return [(step.tokens, step.num_accepted) for step in steps], noted.drafts

    first = tiny_drafter(block_size=WIDTH + 1, seed=11, taps=(0, 3))
    second = tiny_drafter(block_size=WIDTH + 1, seed=12, taps=(1, 2, 3))
    classes = [type(module) for module in target.model.modules()]
    alone = rounds(first), rounds(second)
    assert alone[0][1] != alone[1][1], "the two draft differently"
    assert (rounds(second), rounds(first), rounds(second)) == (alone[1], alone[0], alone[1])
    assert [type(module) for module in target.model.modules()] == classes


def test_features_are_the_residual_stream(target):
    """What is tapped after the last layer, normed and given to the head, is the model's own best token."""
    drafter = tiny_drafter(block_size=4, taps=(0, LAYERS - 1))
    assert len(check_pair(target, drafter, dtype=mx.float32)) == 4


def test_embeddings_are_those_of_the_first_layer(target):
    """The drafter gets embeddings as the target scales them."""
    if type(target.model).__module__.endswith(OWN_EMBEDDINGS):
        pytest.skip("this family does more to its embeddings than to scale them")
    seen = []
    first = target.layers[0]
    kind = type(first)

    def watched(self, x, *args, **kwargs):
        seen.append(x)
        return kind.__call__(self, x, *args, **kwargs)

    first.__class__ = type("Watched", (kind,), {"__call__": watched})
    target.forward(mx.array([[5, 6, 7]]), target.make_cache())
    first.__class__ = kind
    # gemma3 rounds its scale to bfloat16's 8 bits.
    assert mx.allclose(target.embed(mx.array([[5, 6, 7]])), seen[0], rtol=1 / 128)
