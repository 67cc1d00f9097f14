"""Copies of a session in mid-answer hold what was committed, wherever its caches are just then."""

import pytest
from tiny import plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.decode import decode, prefill
from dflash_mlx.decoding.engine import Engine
from dflash_mlx.decoding.fork import fork
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.session import Session
from dflash_mlx.policy.group import FixedGroup
from dflash_mlx.policy.width import FixedWidth


def continued(twin, tokens):
    steps = decode(twin, tokens, strategy=Greedy(), policy=FixedWidth(3), max_tokens=15, eos_ids=set())
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("drafts", ["none", "chains", "trees"])
@pytest.mark.parametrize("in_rows", [True, False])
def test_a_copy_of_an_answer_goes_its_own_way(drafts, in_rows):
    """Also where the target's caches stay mlx-lm's own, as of models that do not compute in rows, and where trees have
    left positions out of order."""
    target, drafter = tiny_target("llama"), tiny_drafter() if drafts != "none" else None
    target._rows = target._trees = in_rows
    session = Session(target, drafter)
    prompt, policy = [3, 1, 4, 1, 5, 9], FixedWidth(9, places=7) if drafts == "trees" else FixedWidth(3)
    steps = decode(session, prompt, strategy=Greedy(), policy=policy, max_tokens=30, eos_ids=set())
    found = [token for _, step in zip(range(4), steps, strict=False) for token in step.tokens]
    for length in (2, len(session.tokens)):
        twin = fork(session, length)
        other = [*session.tokens[:length], 7, 8]
        assert all(cache.offset == length for cache in [*twin.target_cache, *twin.draft_cache])
        assert continued(twin, other) == plain_tokens(target, other, 15)
    found += [token for step in steps for token in step.tokens]
    assert found == plain_tokens(target, prompt, 30)


def test_a_copy_of_one_row_among_others():
    target, drafter = tiny_target("llama"), tiny_drafter()
    engine = Engine(target, drafter, policy=FixedGroup(3))
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8]]
    lanes = []
    for prompt in prompts:
        session = Session(target, drafter)
        prefill(session, prompt[:-1])
        lanes.append(
            Lane(
                session=session,
                prompt=prompt,
                strategy=Greedy(),
                policy=FixedWidth(3),
                max_tokens=30,
                eos_ids=set(),
            )
        )
        engine.join(lanes[-1])
    found = {lane: [] for lane in lanes}
    twins = {}
    for rounds in range(40):
        if rounds == 4:
            twins = {lane: fork(lane.session, len(lane.session.tokens)) for lane in lanes}
        for lane, step in engine.advance():
            found[lane] += step.tokens
    for lane, prompt in zip(lanes, prompts, strict=True):
        assert found[lane] == plain_tokens(target, prompt, 30)
        other = [*twins[lane].tokens, 7, 8]
        assert len(twins[lane].tokens) > len(prompt)
        assert continued(twins[lane], other) == plain_tokens(target, other, 15)
