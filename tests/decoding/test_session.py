"""What a session holds for the drafter stays in step with what it holds for the target."""

import mlx.core as mx
import pytest
from tiny import plain_tokens, tiny_drafter, tiny_target

from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.session import Session
from dflash_mlx.policy.width import FixedWidth

PROMPT = [5, 9, 2, 7, 7, 1, 30, 12]


@pytest.mark.parametrize("keep", [3, len(PROMPT), len(PROMPT) + 4, len(PROMPT) + 11])
@pytest.mark.parametrize("width", [0, 3])
def test_drafts_after_a_rewind_are_those_of_a_fresh_session(width, keep):
    """After an answer without drafts (width 0) the drafter has not seen the answer yet; it must, up to the rewind."""
    target, drafter = tiny_target("llama"), tiny_drafter(block_size=6)
    adjust, seen = drafter.adjust_logits, []

    def watched(logits):
        adjusted = adjust(logits)
        seen.append(adjusted[0])
        return adjusted

    drafter.adjust_logits = watched

    def drafts_for(session, prompt, width):
        """The drafter's logits in each round of an answer; the answer is the target's."""
        seen.clear()
        run = {"strategy": Greedy(), "policy": FixedWidth(width), "max_tokens": 12, "eos_ids": set()}
        tokens = [token for step in decode(session, prompt, **run) for token in step.tokens]
        assert tokens == plain_tokens(target, prompt, 12)
        return mx.concatenate(seen) if seen else None

    session = Session(target, drafter)
    drafts_for(session, PROMPT, width)
    session.rewind(keep)
    edited = [*session.tokens, 40, 41, 42]
    assert len(edited) == keep + 3
    again, fresh = drafts_for(session, edited, 5), drafts_for(Session(target, drafter), edited, 5)
    assert again.shape == fresh.shape
    assert mx.allclose(again, fresh, rtol=1e-3, atol=1e-3).item()
