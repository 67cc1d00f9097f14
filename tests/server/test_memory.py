"""What is said to be needed is what is used."""

import random

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache
from serving import job, random_tokens
from test_generation import make_pair

from dflash_mlx.caches.own import arrays_of
from dflash_mlx.decoding.decode import PREFILL_STEP
from dflash_mlx.decoding.fork import session_bytes
from dflash_mlx.generation import generate
from dflash_mlx.server.memory import MemoryBudget, Need, measure_session, session_size, total_need
from dflash_mlx.server.ticket import TooLargeError


@pytest.mark.parametrize("draft", [True, False])
def test_sessions_are_no_larger_than_foreseen(draft):
    """Sessions of all lengths after real answers, against the size foreseen for their tokens."""
    rng = random.Random(1)
    pair = make_pair()
    size = measure_session(pair, draft=draft)
    for count in (3, 250, 700):
        session = pair.new_session(draft=draft)
        prompt = random_tokens(rng, count)
        generate(pair, prompt, job(prompt, 20).params, session=session, draft=draft, width=5)
        foreseen = size.bytes(count + 20 + pair.block_size)
        used = session_bytes(session)
        # A cache grows in steps after what it held; features of a few tokens may wait beside it.
        assert used <= 1.1 * foreseen
        assert used >= foreseen / 2.1


def test_windows_and_states_do_not_grow():
    filled = KVCache(), RotatingKVCache(max_size=64), ArraysCache(size=2)
    for cache in filled[:2]:
        cache.update_and_fetch(mx.zeros((1, 2, 8, 4)), mx.zeros((1, 2, 8, 4)))
    filled[2][0], filled[2][1] = mx.zeros((1, 3, 10)), mx.zeros((1, 7))
    size = session_size([filled[0], CacheList(filled[1]), filled[2]], in_rows=False)
    row = 2 * 2 * 4 * 4
    assert size.bytes(10_000) == 10_240 * row + (64 + PREFILL_STEP) * row + (30 + 7) * 4
    assert size.bytes(10) == 256 * row + 256 * row + (30 + 7) * 4
    assert sum(a.nbytes for a in arrays_of(filled[2])) == (30 + 7) * 4


def test_answers_share_the_room_for_work():
    """Rows of one batch are all as long as the longest."""
    assert total_need([Need(10, 5), Need(20, 7), Need(1, 1)]) == 3 * 20 + 7
    assert total_need([]) == 0


def test_a_budget_says_what_would_not_fit():
    pair = make_pair()
    budget = MemoryBudget(pair, limit=mx.get_active_memory() + 40_000_000)
    budget.measure(draft=True)
    assert 0 < budget.room <= 40_000_000
    budget.require_room(job([1] * 20, 10), draft=True)
    with pytest.raises(TooLargeError, match=r"prompt of 8000 tokens and up to 10 tokens .* 0\.0[34] GB"):
        budget.require_room(job([1] * 8000, 10), draft=True)
    with pytest.raises(TooLargeError):
        _measured(pair, 0).require_room(job([1], 1), draft=False)


def _measured(pair, limit):
    budget = MemoryBudget(pair, limit)
    budget.measure(draft=False)
    return budget
