"""What drafting from the text gains and loses: recorded answers, replayed with rounds that cost what was measured.

`pytest -s tests/policy/test_replay_ngram.py` prints the table. An *oracle* knows the answer: in each round it drafts
what follows the newest two tokens at the best of all places where they stood before, and exactly as far as it is right.
"""

import copy
import statistics
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from policy.record_traces import TRACES
from policy.simulated import plain

from dflash_mlx.decoding.policies import Forecast, Observation
from dflash_mlx.drafters.contract import Nobody, Outlook
from dflash_mlx.drafters.ngram import DEFAULT_PLACES, NgramState
from dflash_mlx.policy.trees_or_chains import Experience, PairCosts, choose_policy
from dflash_mlx.policy.width import RoundCosts

NO_TIME = {1: 0.0, DEFAULT_PLACES: 0.0}  # what drafting takes


@dataclass(frozen=True)
class Machine:
    """rounds: milliseconds by width. waits: what a round without drafts takes where the host had to be waited for."""

    rounds: dict[int, float]
    waits: float
    steep: bool

    def costs(self) -> RoundCosts:
        return RoundCosts(dict(self.rounds), dict(NO_TIME), steep=self.steep)


MACHINES = {
    "2 CPU cores": Machine({0: 66.4, 1: 69.3, 7: 81.6, 15: 102.7}, waits=67.0, steep=True),
    # docs/benchmarks.md, "Long contexts", after 1,000 tokens.
    "H200": Machine({0: 4.6, 1: 7.5, 15: 7.5}, waits=5.0, steep=False),
}


class Text(Nobody):
    """An answer that has been written up to here."""

    def __init__(self, tokens):
        self.tokens = tokens

    def text_from(self, position):
        return self.tokens[position:]


@cache
def texts():
    """The recorded answers by name: their tokens, and how many of them are the prompt's."""
    with np.load(TRACES) as stored:
        names = [name.removesuffix("/ranks") for name in stored.files if name.endswith("/ranks")]
        return {name: (stored[f"{name}/tokens"].tolist(), int(stored[f"{name}/start"])) for name in names}


def agreement(drafts, tokens):
    """How many of the first tokens are the same."""
    return next(
        (n for n, (a, b) in enumerate(zip(drafts, tokens, strict=False)) if a != b), min(len(drafts), len(tokens))
    )


def replay(tokens, start, machine, experience):
    """Times the speed of plain decoding, as the automatic choice drafts."""
    costs, state, at, spent = machine.costs(), NgramState(always=False), start + 1, 0.0
    policy = choose_policy(PairCosts(costs), DEFAULT_PLACES, experience, by_confidence=True)
    writer = Text(tokens[:at])
    while at < len(tokens):
        choice = policy.next_round(may_branch=False)
        waits = state.outlook([writer]) is Outlook.HOST
        if choice.places and waits:
            drafted = state.propose([writer], mx.array([0]), mx.array([at]), choice.places, room=0)
            best = np.exp(np.array(drafted.confidence)[0].astype(np.float64))
            forecast = Forecast.of_chain(best, choice.scale) if choice.waits else None
            width = choice.width
            if width is None:
                assert forecast is not None
                width = policy.choose(forecast)
            kept = agreement(drafted.tokens[0].tolist()[:width], tokens[at:])
            seconds = costs.round(width, drafted=choice.places) if width else machine.waits
            promised = forecast.promised(min(kept + 1, width)) if forecast is not None else 0.0
            seen = Observation(choice.places, width, kept, forecast=forecast, promised=promised, seconds=seconds)
        else:
            kept, seconds = 0, machine.waits if waits else costs.round(0)
            seen = plain(seconds)
        policy.observe(seen)
        at, spent = at + kept + 1, spent + seconds
        writer.tokens = tokens[:at]
    return (len(tokens) - start - 1) * machine.rounds[0] / spent


def oracle(tokens, start, machine):
    """The same with the right drafts, as far as the text has them."""
    costs = machine.costs()
    places = range(DEFAULT_PLACES + 1)
    least = [0.0] * (len(tokens) + 1)
    for at in range(len(tokens) - 1, start, -1):
        found = [p for p in range(2, at) if tokens[p - 2 : p] == tokens[at - 2 : at]]
        most = max((agreement(tokens[p : p + DEFAULT_PLACES], tokens[at:]) for p in found), default=0)
        least[at] = min(costs.round(n) + least[min(at + n + 1, len(tokens))] for n in places[: most + 1])
    return (len(tokens) - start - 1) * machine.rounds[0] / least[start + 1]


@pytest.mark.parametrize(("machine", "worst", "of_oracle"), [("2 CPU cores", 0.98, 0.9), ("H200", 0.95, 0.88)])
def test_it_loses_little_and_gains_most_of_what_the_text_has(machine, worst, of_oracle):
    experience, speeds, shares = Experience(), [], []
    for name, (tokens, start) in texts().items():
        mine = copy.deepcopy(experience)
        speeds.append(replay(tokens, start, MACHINES[machine], mine))
        shares.append(speeds[-1] / oracle(tokens, start, MACHINES[machine]))
        experience = experience.merged(mine)
        print(f"{name:34} {speeds[-1]:.2f} times plain decoding, {shares[-1]:.2f} of the oracle")
    mean = statistics.geometric_mean
    print(
        f"{machine}: {mean(speeds):.3f} times plain decoding, {mean(shares):.3f} of the oracle, worst {min(speeds):.3f}"
    )
    assert min(speeds) > worst
    assert mean(shares) > of_oracle
