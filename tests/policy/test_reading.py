"""How long prompts take to read, against times with a known fixed part."""

import random

import pytest

from dflash_mlx.policy.reading import ReadingTimes, Turns


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
    # But it pays to find out.
    assert times.shared == pytest.approx(0.04, rel=0.02)
    times.observe(600, 0.62, whole=True)
    assert times.shared == times.fixed == pytest.approx(0.02, rel=0.05)


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


def read_in_chunks(times, seconds_of, *, allowed, total=8000):
    """The chunks (tokens, seconds) in which a prompt is read, each of which may take `allowed` seconds."""
    read, passes = 0, []
    while read < total:
        tokens = min(times.tokens_in(allowed, least=8, most=2048), total - read)
        seconds = seconds_of(tokens, read)
        times.observe(tokens, seconds, whole=False)
        passes.append((tokens, seconds))
        read += tokens
    return passes


def test_each_chunk_of_a_long_prompt_is_made_to_fit():
    """Each token takes longer than those before it, since more stands before it."""
    times = learnt(0.0, 0.01, [60, 200, 100])
    passes = read_in_chunks(times, lambda tokens, read: tokens * (0.01 + 0.000005 * read), allowed=0.3, total=4000)
    seconds = sorted(seconds for _, seconds in passes[3:-1])
    # A larger one is tried now and then.
    assert seconds[len(seconds) // 10] > 0.2
    assert seconds[len(seconds) * 8 // 10] < 0.35
    assert seconds[-1] < 0.5
    assert times.fixed == 0.0


@pytest.mark.parametrize(("fixed", "a_token"), [(0.011, 0.000015), (0.06, 0.003)])
def test_small_chunks_are_not_read_where_large_ones_take_hardly_longer(fixed, a_token):
    """Even when nothing is known but prompts of one size."""
    times = learnt(fixed, a_token, [60, 60, 60])
    passes = read_in_chunks(times, lambda tokens, read: fixed + a_token * tokens, allowed=0.003)
    fits = fixed / 2 / a_token
    assert sum(tokens >= 0.8 * min(fits, 1024) for tokens, _ in passes) >= 0.4 * len(passes)
    assert all(tokens <= 4 * fits for tokens, _ in passes)


@pytest.mark.parametrize(
    ("fixed", "a_token", "seconds", "tokens"),
    [
        (0.0, 0.01, 1.0, 100),  # as many as fit
        (0.2, 0.01, 1.0, 80),
        (1.0, 0.01, 0.5, 50),  # the fixed part alone takes longer: half as long again
        (0.0, 0.01, 0.01, 16),
        (0.1, 0.00001, 0.01, 2048),
    ],
)
def test_tokens_in_a_time(fixed, a_token, seconds, tokens):
    times = ReadingTimes()
    times.fixed, times.a_token = fixed, a_token
    assert times.tokens_in(seconds, least=16, most=2048) == tokens
    # The second chunk is larger, so that they can be compared.
    times.observe(20, times.seconds(20), whole=False)
    assert times.tokens_in(seconds, least=16, most=2048) == 30


def test_prompts_that_wait_are_read_in_pieces_that_are_worth_a_pass():
    """Where a pass over one token takes nearly as long as prompts may be read in a turn, and times are noisy."""
    fixed, a_token, allowed, rng = 0.075, 0.0016, 0.09, random.Random(0)
    times = learnt(fixed, a_token, [150])
    tokens = seconds = 0.0
    for _ in range(60):
        passes = read_in_chunks(
            times,
            lambda tokens, read: (fixed + a_token * tokens) * rng.lognormvariate(0, 0.08),
            allowed=allowed,
            total=rng.randrange(60, 260),
        )
        tokens += sum(tokens for tokens, _ in passes)
        # A round follows each pass.
        seconds += sum(seconds + allowed for _, seconds in passes)
    best = fixed / 2 / a_token
    assert tokens / seconds > 0.8 * best / (fixed + a_token * best + allowed)


def test_passes_that_compile_change_little():
    """As they do on a GPU for the first prompts, which are many, and for some of the first numbers of prompts."""
    times, rng = ReadingTimes(), random.Random(0)
    times.observe(2048, 2.0, whole=True)
    for turn in range(12):
        tokens = 64 * rng.randrange(1, 7)
        times.observe(tokens, 0.015 + 0.000002 * tokens + (0.15 if turn in (0, 3, 7) else 0.0), whole=True)
    assert times.shared == pytest.approx(0.015, rel=0.2)


def take_turns(turns, arrivals, *, fixed=0.015, a_round=0.01, noise=0.1):
    """Turns in which so many passes over 64 tokens are made, half of whose cost comes one turn later."""
    rng, later = random.Random(0), 0.0
    for passes in arrivals:
        for _ in range(passes):
            turns.arrived(64)
        reading = passes * fixed / 2
        turns.observe(reading, (a_round + later) * rng.uniform(1 - noise, 1 + noise), running=True)
        later = reading


@pytest.mark.parametrize("arrivals", [[0, 0, 0, 1] * 8, [0, 0, 0, *[1] * 30], [0, 0, 0, 2, 1, 1, 0] * 8, [1, 0, 0] * 9])
def test_what_arrivals_add_is_found_even_where_they_follow_closely(arrivals):
    turns = Turns(ReadingTimes())
    take_turns(turns, arrivals)
    assert turns.round_seconds == pytest.approx(0.01, rel=0.1)
    assert turns.times.seconds(64) == pytest.approx(0.015, rel=0.2)


def test_nothing_is_learnt_of_arrivals_when_all_answers_have_ended():
    turns = Turns(ReadingTimes())
    turns.arrived(64)
    turns.observe(0.01, 0.01, running=False)
    take_turns(turns, [0, 0, 0])
    assert not turns.times.known
    assert turns.round_seconds == pytest.approx(0.01, rel=0.1)


def test_a_round_that_compiles_counts_little():
    turns = Turns(ReadingTimes())
    turns.arrived(64)
    turns.observe(0.5, 3.0, running=True)
    assert turns.round_seconds == 3.0
    take_turns(turns, [0, 0, 0, 0, 0])
    assert turns.round_seconds == pytest.approx(0.01, rel=0.1)
