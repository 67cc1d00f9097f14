"""How long prompts take to read, against times with a known fixed part."""

import random

import pytest

from dflash_mlx.policy.reading import ReadingTimes


def learnt(fixed, a_token, sizes, *, noise=0.0):
    times, rng = ReadingTimes(), random.Random(0)
    for tokens in sizes:
        times.observe(tokens, (fixed + a_token * tokens) * rng.uniform(1 - noise, 1 + noise), whole=True)
    return times


@pytest.mark.parametrize(("fixed", "a_token"), [(0.02, 0.0001), (0.0, 0.01), (0.1, 0.001)])
def test_both_parts_are_found(fixed, a_token):
    times = learnt(fixed, a_token, [2000, 60, 300, 80, 500, 60, 900, 60, 300, 80, 500, 60, 900])
    assert times.fixed == pytest.approx(fixed, abs=1e-9)
    assert times.a_token == pytest.approx(a_token, rel=0.1)


def test_noise_changes_little():
    rng = random.Random(1)
    times = learnt(0.02, 0.001, [rng.choice([20, 50, 100, 200]) for _ in range(200)], noise=0.1)
    assert times.seconds(100) == pytest.approx(0.12, rel=0.25)
    assert 0 <= times.fixed < 0.05


def test_while_all_passes_have_one_size_the_fixed_part_is_none():
    times = learnt(0.02, 0.001, [60, 62, 58, 60])
    assert times.fixed == 0.0
    assert times.a_token == pytest.approx(0.08 / 60, rel=0.02)


def test_no_part_is_ever_negative():
    times = ReadingTimes()
    for tokens, seconds in ((100, 0.1), (1000, 0.05), (10, 0.2)):
        times.observe(tokens, seconds, whole=True)
    assert times.a_token > 0.0
    assert times.fixed > 0.0
    steep = ReadingTimes()
    for tokens, seconds in ((100, 0.1), (200, 0.3)):
        steep.observe(tokens, seconds, whole=True)
    assert steep.fixed == 0.0


def test_a_single_long_pause_counts_little():
    times = learnt(0.02, 0.0001, [2000, 60, 300, 80, 2000])
    before = times.seconds(100)
    times.observe(100, 60.0, whole=True)
    assert times.seconds(100) < 3 * before


def test_chunks_of_a_long_prompt_do_not_tell_the_fixed_part():
    """Each chunk takes longer than the one before, since more stands before it, and so each is made smaller."""
    times = learnt(0.0, 0.01, [60, 200, 100])
    read, passes = 0, []
    while read < 8000:
        tokens = times.tokens_in(0.3, least=4, most=2048)
        passes.append(tokens * (0.01 + 0.000005 * read))
        times.observe(tokens, passes[-1], whole=False)
        read += tokens
    assert times.fixed == 0.0
    # What fits in 0.3 s, by what is known of the chunk before.
    assert min(passes[:-1]) > 0.2
    assert max(passes) < 0.35


@pytest.mark.parametrize(
    ("fixed", "a_token", "seconds", "tokens"),
    [
        (0.0, 0.01, 1.0, 100),  # as many as fit
        (0.2, 0.01, 1.0, 80),
        (1.0, 0.01, 0.5, 100),  # the fixed part alone takes longer: as many as double it
        (0.0, 0.01, 0.01, 16),
        (0.1, 0.00001, 0.01, 2048),
    ],
)
def test_tokens_in_a_time(fixed, a_token, seconds, tokens):
    times = ReadingTimes()
    times.fixed, times.a_token = fixed, a_token
    assert times.tokens_in(seconds, least=16, most=2048) == tokens
    times.observe(20, times.seconds(20), whole=False)
    assert times.tokens_in(seconds, least=16, most=2048) == min(tokens, 40)
