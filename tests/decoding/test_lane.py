"""A lane's books: what a round's tokens do to an answer, by hand."""

import pytest
from tiny import tiny_target

from dflash_mlx.decoding.accept import Coupled, Greedy
from dflash_mlx.decoding.lane import Lane, clip
from dflash_mlx.decoding.session import Session
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams

END = 9


@pytest.mark.parametrize(
    ("tokens", "remaining", "kept", "reason"),
    [
        ([1, 2, 3], 5, [1, 2, 3], None),
        ([1, 2, 3], 4, [1, 2, 3], None),
        ([1, 2, 3], 3, [1, 2, 3], "length"),
        ([1, 2, 3], 2, [1, 2], "length"),
        ([1], 1, [1], "length"),
        ([1, END, 3], 5, [1, END], "stop"),
        ([END], 5, [END], "stop"),
        ([1, 2, END], 3, [1, 2, END], "stop"),
        ([1, 2, END], 2, [1, 2], "length"),
        ([END, END], 1, [END], "stop"),
    ],
)
def test_clip(tokens, remaining, kept, reason):
    assert clip(tokens, remaining, {END}) == (kept, reason)


def make_lane(prompt, **changes):
    session = Session(tiny_target("llama"), None)
    session.tokens = prompt[:-1]
    options = {"strategy": Greedy(), "policy": FixedWidth(0), "max_tokens": 6, "eos_ids": {END}, **changes}
    return Lane(session=session, prompt=prompt, **options)


def test_what_is_taken_is_committed_but_for_the_newest_token():
    lane = make_lane([1, 2, 3])
    assert (lane.anchor, lane.remaining, lane.history) == (3, 6, None)
    assert lane.take([4, 5]) == ([4, 5], None)
    assert (lane.session.tokens, lane.anchor, lane.remaining) == ([1, 2, 3, 4], 5, 4)
    assert lane.take([6]) == ([6], None)
    assert (lane.session.tokens, lane.anchor, lane.remaining) == ([1, 2, 3, 4, 5], 6, 3)
    assert lane.take([7, END, 8]) == ([7, END], "stop")
    assert (lane.session.tokens, lane.anchor) == ([1, 2, 3, 4, 5, 6, 7], END)


def test_the_history_that_penalties_see_ends_with_the_newest_token():
    processor = SamplingParams(repetition_penalty=1.3).logits_processors()
    lane = make_lane(list(range(10, 40)) * 3, processors=processor)
    assert lane.history.tolist() == (list(range(10, 40)) * 3)[-64:]
    before = lane.history.tolist()
    lane.take([1, 2, 3])
    assert lane.history.tolist() == [*before, 1, 2, 3][-64:]


def test_lanes_that_want_the_best_token_and_nothing_else_are_plain():
    assert make_lane([1, 2]).is_plain_greedy
    assert not make_lane([1, 2], strategy=Coupled(SamplingParams(temperature=1.0, seed=0))).is_plain_greedy
    assert not make_lane([1, 2], processors=SamplingParams(logit_bias={1: 2.0}).logits_processors()).is_plain_greedy
    assert not make_lane([1, 2], top_logprobs=0).is_plain_greedy
    assert not make_lane([1, 2], guide=object()).is_plain_greedy


def test_a_lane_starts_when_its_prompt_has_been_read():
    session = Session(tiny_target("llama"), None)
    with pytest.raises(AssertionError, match="has been read"):
        Lane(session=session, prompt=[1, 2], strategy=Greedy(), policy=FixedWidth(0), max_tokens=1, eos_ids=set())
