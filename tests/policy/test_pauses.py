"""When drafting pauses, for how long, and what it says; with figures worked out by hand.

Rounds are given in plain steps. How long a plain step takes must not matter; it takes a power of two here, so that a
loss can meet its limit exactly.
"""

import pytest

from dflash_mlx.policy.pauses import Patience, Pauses

PLAIN = pytest.mark.parametrize("plain", [1 / 64, 64.0])


def play(pauses: Pauses, rounds: list[tuple[float, float]], plain: float) -> int | None:
    """Observe rounds of (tokens, plain steps) up to a pause; the number of rounds it came after."""
    for i, (tokens, steps) in enumerate(rounds):
        pauses.observe(tokens, steps * plain, plain)
        if pauses.resting:
            return i + 1
    return None


@PLAIN
def test_nothing_is_known_at_first(plain):
    pauses = Pauses()
    assert (pauses.speed, pauses.notice, pauses.resting, pauses.take_rest()) == (0.0, None, 0, False)
    pauses.observe(3, 2 * plain, plain)
    assert pauses.speed * plain == pytest.approx(1.5)


@PLAIN
@pytest.mark.parametrize("gains", [0, 1])
def test_five_plain_steps_may_be_lost_and_no_more(gains, plain):
    """Each round loses 2.5 steps: two may, the third may not. A gain before them is not saved up."""
    assert play(Pauses(), [(3, 1)] * gains + [(1, 3.5)] * 9, plain) == gains + 3


@PLAIN
def test_the_next_try_may_lose_half_as_much(plain):
    """Each round loses 1.25 steps."""
    pauses = Pauses()
    play(pauses, [(1, 50)], plain)
    while pauses.take_rest():
        pass
    assert play(pauses, [(1, 2.25)] * 9, plain) == 3


@PLAIN
@pytest.mark.parametrize(("pause", "longest", "rounds"), [(0, 0, 9), (32, 32, 5), (128, 511, 5), (128, 512, 2)])
def test_after_the_longest_pause_an_eighth_may_be_lost(pause, longest, rounds, plain):
    """Each round loses 0.625 steps; so chance may not explain it from the second on."""
    assert play(Pauses(Patience(pause=pause, longest=longest)), [(1, 1.625)] * 20, plain) == rounds


@PLAIN
def test_the_longest_pause_counts_until_drafting_pays(plain):
    """Also after the shorter pauses of later answers."""
    patience = Patience()
    for _ in range(2):
        pauses, found = Pauses(patience), []
        for _ in range(3):
            found.append(play(pauses, [(1, 1.625)] * 20, plain))
            while pauses.take_rest():
                pass
    assert (found, patience.pause) == ([2, 2, 2], 512)
    play(pauses, [(2, 1)] * 6, plain)
    assert (patience.pause, patience.longest) == (0, 0)


@PLAIN
def test_rounds_may_be_told_of_together_while_drafting_pays_and_in_a_rest(plain):
    """Four once six rounds have gained a fifth, sixteen once they have gained more; in a rest sixteen, but none after
    its end, and of the inside of a long one nothing; else each at once."""
    for tokens, together in ((1.5, 4), (2, 16)):
        pauses, found = Pauses(), []
        for _ in range(7):
            found.append(pauses.listens_after)
            play(pauses, [(tokens, 1)], plain)
        assert found == [1] * 6 + [together]
    for inside in ([], [0] * 64):
        play(pauses, [(1, 100)], plain)
        found = [pauses.listens_after]
        while pauses.take_rest():
            found.append(pauses.listens_after)
        ends = [*[16] * 17, *range(15, 0, -1), 1]
        assert found == ([*[16] * 32, *inside, *ends] if inside else ends)


@PLAIN
def test_they_may_be_at_once_in_an_answer_after_one_where_drafting_paid(plain):
    """Only four, until six rounds show how it is in this one, or it pauses."""
    patience = Patience()
    play(Pauses(patience), [(2, 1)] * 6, plain)
    for rounds, expected in (([(1, 1)] * 6, [4] * 6 + [1]), ([(2, 1)] * 6, [1] * 6 + [16]), ([(1, 50)], [4, 16])):
        pauses, found = Pauses(patience), []
        for one in rounds:
            found.append(pauses.listens_after)
            play(pauses, [one], plain)
        assert [*found, pauses.listens_after] == expected
    assert Pauses(patience).listens_after == 1


@PLAIN
def test_a_pause_says_how_long_and_why(plain):
    pauses = Pauses()
    play(pauses, [(1, 3.5)] * 9, plain)
    assert pauses.notice == (
        "drafting paused for 32 tokens: lately it was 0.29 times as fast as plain decoding"  # 1 / 3.5
    )


@PLAIN
@pytest.mark.parametrize(
    ("good", "next_pause"), [([(1.3, 1)] * 6, 32), ([(1.3, 1)] * 5, 128), ([(1.1, 1)] * 6, 128), ([], 128)]
)
def test_six_rounds_that_gain_a_fifth_make_the_next_pause_a_first_one(good, next_pause, plain):
    pauses = Pauses()
    play(pauses, [(1, 50)], plain)
    assert pauses.resting == 32
    while pauses.take_rest():
        pass
    assert play(pauses, [*good, (1, 50)], plain) == len(good) + 1
    assert pauses.resting == next_pause


@PLAIN
@pytest.mark.parametrize(("lanes", "rounds"), [(1, 17), (4, 9), (16, 5)])
def test_the_mean_of_many_lanes_may_lose_less(lanes, rounds, plain):
    """Each round loses 0.3 steps. Of 5 steps that one lane may lose, four may lose a half, and sixteen a quarter."""
    pauses = Pauses()
    for i in range(rounds):
        assert not pauses.resting, i
        pauses.observe(2, 2.3 * plain, plain, lanes=lanes)
    assert pauses.resting


@PLAIN
def test_after_a_good_stretch_as_much_may_be_lost_as_at_first(plain):
    pauses = Pauses()
    play(pauses, [(1, 50)], plain)
    while pauses.take_rest():
        pass
    assert play(pauses, [(1.3, 1)] * 6 + [(0, 5)] * 2, plain) == 8
    pauses = Pauses()
    assert play(pauses, [(1.3, 1)] * 6 + [(0, 5)] * 2, plain) == 8


@PLAIN
@pytest.mark.parametrize(
    ("rounds", "stops"),
    [
        # 1 and 5 in turn, a variance of 4 about 3. Of the 20 rounds or so that are remembered, and 4 assumed ones of
        # variance 1, the doubt is 1.5 * sqrt(20 * (20 * 4 + 4) / 24) / 20 = 0.63 tokens a round. The loss of 0.75 is
        # more when the rounds before, without a loss, are forgotten but for 0.95 ** 36.
        ([(1, 3.75), (5, 3.75)], range(25, 40)),
        # Of all n rounds since the loss began it is 4.5 * sqrt(n * (4 * n + 4) / (n + 4)), about 9 * sqrt(n). They lose
        # 0.5 * n, or 0.4 * n, so that it takes 18 ** 2 = 324 or 22.5 ** 2 = 506 rounds.
        ([(1, 3.5), (5, 3.5)], range(310, 330)),
        ([(1, 3.4), (5, 3.4)], range(490, 510)),
        # Always the same: 1.5 * sqrt(20 * 4 / 24) / 20 = 0.137 tokens of doubt, or 0.145 but for 0.95 ** 57.
        ([(2, 2.145)], range(55, 60)),
        # 4.5 * sqrt(n * 4 / (n + 4)), about 9 tokens: 0.12 * n after 73 rounds, and 0.03 * n after 298.
        ([(2, 2.12)], range(70, 80)),
        ([(2, 2.03)], range(290, 305)),
    ],
)
def test_a_loss_that_could_be_chance_is_no_reason_to_pause(rounds, stops, plain):
    # First as fast as plain decoding, for the memory to fill without a loss.
    mean = sum(tokens for tokens, _ in rounds) / len(rounds)
    pauses = Pauses()
    assert play(pauses, [(tokens, mean) for tokens, _ in rounds] * 100, plain) is None
    assert play(pauses, rounds * 300, plain) in stops


@PLAIN
@pytest.mark.parametrize(
    ("pause", "rounds", "stops"),
    [
        # Each loses a hundredth of a plain step: as many rounds of other drafts would not be enough to pause.
        (0, [(1, 1.01)] * 30, 16),
        (32, [(1, 1.01)] * 30, 8),
        (0, [(2, 2.01)] * 30, None),
        # One draft was kept, which did not make up for the loss.
        (0, [(1, 1.12)] * 15 + [(2, 1.12)] + [(1, 1.12)] * 10, None),
        # It did, and all begins anew.
        (0, [(1, 1.01)] * 15 + [(2, 1.01)] + [(1, 1.01)] * 30, 32),
    ],
)
def test_rounds_of_which_no_draft_is_kept_are_soon_enough(pause, rounds, stops, plain):
    assert play(Pauses(Patience(pause=pause)), rounds, plain) == stops


@PLAIN
def test_of_a_drafter_that_failed_up_to_the_longest_pause_another_way_has_as_little_patience(plain):
    trees, chains = Patience(pause=128, longest=128), Patience()
    trees.warn(chains)
    assert chains == Patience()
    trees.longest = 512
    trees.warn(chains)
    assert play(Pauses(chains), [(1, 1.625)] * 20, plain) == 2


@PLAIN
def test_the_next_answer_has_less_patience_until_drafting_pays(plain):
    """Each round loses 0.6 steps: five may be lost at first, and half as much in the answers after a pause."""
    patience = Patience()
    assert play(Pauses(patience), [(1, 1.6)] * 20, plain) == 9
    for _ in range(2):
        assert play(Pauses(patience), [(1, 1.6)] * 20, plain) == 5
    play(Pauses(patience), [(1.3, 1)] * 6, plain)
    assert play(Pauses(patience), [(1, 1.6)] * 20, plain) == 9


@PLAIN
def test_an_answer_begins_with_a_quarter_of_the_last_pause(plain):
    patience = Patience()

    def pauses_of_an_answer(count):
        pauses, found = Pauses(patience), []
        for _ in range(count):
            play(pauses, [(1, 50)], plain)
            found.append(pauses.resting)
            while pauses.take_rest():
                pass
        return found

    assert [pauses_of_an_answer(count) for count in (1, 2, 4)] == [[32], [32, 128], [32, 128, 512, 512]]
    assert [pauses_of_an_answer(count) for count in (1, 3)] == [[128], [32, 128, 512]]
    play(Pauses(patience), [(1.3, 1)] * 6, plain)
    assert pauses_of_an_answer(1) == [32]


def test_a_pause_is_interrupted_by_drafts_that_are_known_to_pay():
    pauses = Pauses()
    play(pauses, [(1, 50)], 1.0)
    assert pauses.take_rest(lambda: 1.19)
    assert not pauses.take_rest(lambda: 1.2)
    assert [pauses.take_rest() for _ in range(32)] == [True] * 31 + [False]


def test_what_interrupts_a_long_pause_is_told_of():
    pauses = Pauses(Patience(pause=512))
    for _ in range(2):
        play(pauses, [(1, 50)], 1.0)
        while pauses.resting > 64:
            pauses.take_rest()
        assert pauses.listens_after == 0
        assert not pauses.take_rest(lambda: 1.2)
        assert pauses.listens_after == 16
        while pauses.take_rest():
            pass


def test_drafts_that_are_never_used_rest_longer_each_time():
    """A draft takes 0.4 plain steps, and four of them are more than may be lost. After a rest, one is enough."""
    pauses, before = Pauses(), []
    for rest in (16, 32, 64, 128, 256, 256):
        tries = 0
        while not pauses.resting:
            tries += 1
            pauses.note_use(False, cost=0.4)
        before.append((tries, pauses.notice))
        pauses.notice = None
        assert [pauses.take_rest() for _ in range(rest + 1)] == [True] * rest + [False]
    assert [tries for tries, _ in before] == [4, 1, 1, 1, 1, 1]
    # Once an answer is enough to know.
    assert [notice is not None for _, notice in before] == [False, False, True, False, False, False]
    assert before[2][1] == "drafting paused for 64 tokens: lately no draft was likely to be worth its time"
    # The next answer goes on with that, until a draft is used.
    later = Pauses(pauses.patience)
    later.note_use(False, cost=0.4)
    assert later.resting == 256
    later.note_use(True, cost=0.4)
    assert Pauses(pauses.patience).patience.rest == 16


def test_drafts_that_cost_nothing_never_rest():
    pauses = Pauses()
    for _ in range(1000):
        pauses.note_use(False, cost=0.0)
    assert not pauses.resting
