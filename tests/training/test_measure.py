"""The measurement of an exported drafter: the decode loop's own counts, kept after each answer."""

import numpy as np
import pytest
from test_generation import perfect_pair

from dflash_mlx.training.measure import MeasureLog, measure_pair, summarize
from dflash_mlx.training.progress import Progress
from dflash_mlx.training.store import Conversation

PROMPT = [3, 4, 5, 6]


def test_a_drafter_that_is_always_right_gains_whole_blocks(tmp_path):
    pair = perfect_pair(PROMPT)
    held_out = [Conversation(np.array([*PROMPT, 1, 2]), ((len(PROMPT), len(PROMPT) + 2),))]
    log = MeasureLog(tmp_path / "measured.json", "key")
    assert measure_pair(pair, held_out, log, max_tokens=33, deadline=None, progress=Progress("x", quiet=True))
    # The first token comes with the prompt; then four rounds keep seven drafts each and add the target's own token.
    [answer] = log.answers
    assert (answer["rounds"], answer["tokens"], answer["histogram"]) == (4, 32, [0] * 7 + [4])
    assert answer["seconds"] > 0
    found = summarize(log.answers, width=7, max_tokens=33)
    assert found["mean_acceptance_length"] == pytest.approx(8.0)
    assert found["per_position"] == [1.0] * 7


def test_a_deadline_keeps_what_is_there(tmp_path):
    log = MeasureLog(tmp_path / "measured.json", "key")
    held_out = [Conversation(np.array([*PROMPT, 1]), ((4, 5),))]
    assert not measure_pair(perfect_pair(PROMPT), held_out, log, max_tokens=4, deadline=0.0, progress=Progress("x"))
    assert log.answers == []
