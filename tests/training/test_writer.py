"""What the target writes in batches is what it would say by itself."""

import numpy as np
import pytest
from tiny import VOCAB, mostly_slow, plain_tokens, tiny_target
from tiny_families import family_target

from dflash_mlx.training.store import CUT, LOOPED
from dflash_mlx.training.template import ChatFrame
from dflash_mlx.training.writer import Limits, Plan, repeats, write_batch

EOS = 2
FRAME = ChatFrame(
    prefix=(1, 5, 9),
    answer_opening=(EOS, 1, 6, 9),
    user_opening=(1, 5, 9),
    eos_ids=frozenset({EOS}),
    special_ids=frozenset({0, 1, EOS, 3}),
    thinking=False,
)
LIMITS = Limits(max_length=60, max_user_tokens=6, turns=1)


def plan(rows, *, greedy=True, user_follows=True, scripts=None):
    scripts = scripts or [list(FRAME.prefix)] * rows
    return Plan(scripts, user_follows, np.zeros(rows) if greedy else np.full(rows, 0.9))


@pytest.fixture(scope="module", params=mostly_slow(["llama", "qwen2", "gemma3"], "llama"))
def target(request):
    """gemma3 has sliding windows of 8 tokens, which these conversations outgrow."""
    return family_target("gemma3") if request.param == "gemma3" else tiny_target(request.param)


def check_greedy(target, conversation):
    for start, end in conversation.spans:
        tokens = conversation.tokens.tolist()
        assert tokens[start:end] == plain_tokens(target, tokens[:start], end - start, {EOS})


def test_greedy_answers_equal_plain_decoding(target):
    found = write_batch(target, FRAME, plan(12), LIMITS, seed=7)
    assert len(found) >= 6
    for conversation in found:
        tokens = conversation.tokens.tolist()
        (start, end) = conversation.spans[0]
        assert tokens[:3] == list(FRAME.prefix)
        assert tokens[start - 4 : start] == list(FRAME.answer_opening)
        assert 1 <= start - 7 <= LIMITS.max_user_tokens
        assert conversation.greedy
        assert (tokens[end - 1] == EOS) != bool(conversation.flags & (CUT | LOOPED))
        check_greedy(target, conversation)


def test_several_turns_follow_the_template(target):
    limits = Limits(max_length=90, max_user_tokens=4, turns=3)
    mixed = Plan([list(FRAME.prefix)] * 40, True, np.where(np.arange(40) % 2, 0.0, 1.0))
    found = [c for c in write_batch(target, FRAME, mixed, limits, seed=2) if len(c.spans) > 1]
    assert found
    for conversation in found:
        tokens = conversation.tokens.tolist()
        for (_, end), (start, _) in zip(conversation.spans, conversation.spans[1:], strict=False):
            assert tokens[end - 1] == EOS
            assert tokens[end : end + 3] == list(FRAME.user_opening)
            assert tokens[start - 4 : start] == list(FRAME.answer_opening)
        if conversation.greedy:
            check_greedy(target, conversation)


def test_prompts_of_different_lengths_are_answered_in_one_batch(target):
    rng = np.random.default_rng(0)
    scripts = [rng.integers(4, VOCAB, length).tolist() for length in (1, 2, 9, 30)]
    found = write_batch(target, FRAME, plan(4, user_follows=False, scripts=scripts), LIMITS, seed=0)
    assert [c.tokens[: len(s)].tolist() for c, s in zip(found, scripts, strict=True)] == scripts
    for conversation, script in zip(found, scripts, strict=True):
        assert conversation.spans[0][0] == len(script)
        check_greedy(target, conversation)


def test_the_same_seed_writes_the_same_and_another_something_else(target):
    first, again, other = (write_batch(target, FRAME, plan(8, greedy=False), LIMITS, seed=s) for s in (1, 1, 2))
    assert [c.tokens.tolist() for c in first] == [c.tokens.tolist() for c in again]
    assert [c.tokens.tolist() for c in first] != [c.tokens.tolist() for c in other]


def test_a_model_without_template_just_goes_on(target):
    frame = ChatFrame((1,), (), None, frozenset({EOS}), frozenset({EOS}), False)
    for conversation in write_batch(target, frame, plan(6, scripts=[[1]] * 6), LIMITS, seed=3):
        assert conversation.spans[0][0] == 1 + LIMITS.max_user_tokens
        check_greedy(target, conversation)


def test_repeats_finds_short_periods_only():
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 50, 96)
    short = np.resize(np.arange(5), 96)
    long = np.resize(np.arange(40), 96)
    almost = short.copy()
    almost[50] = 9
    assert repeats(np.stack([noise, short, long, almost])).tolist() == [False, True, False, False]


def test_an_answer_that_repeats_itself_is_ended_early():
    target = tiny_target("llama")
    # A model whose head always prefers token 7: the answer is one token over and over.
    plain_head = target.model.model.norm.weight
    target.model.model.norm.weight = plain_head * 0
    limits = Limits(max_length=400, max_user_tokens=4, turns=1)
    found = write_batch(target, FRAME, plan(2, user_follows=False, scripts=[[4], [5]]), limits, seed=0)
    assert all(c.looped and 96 <= len(c.tokens) <= 96 + 64 for c in found)
    assert len(found) == 2
