"""Owners take turns; each owner's jobs keep their order."""

import random

from dflash_mlx.server.fair_queue import FairQueue


def drain(queue):
    order = []
    while (item := queue.peek()) is not None:
        assert queue.pop() == item
        order.append(item)
    return order


def test_owners_take_turns():
    queue = FairQueue()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.push(item[0], item)
    assert len(queue) == 6
    assert drain(queue) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert len(queue) == 0


def test_one_owner_is_first_in_first_out():
    queue = FairQueue()
    for i in range(50):
        queue.push("", i)
    assert drain(queue) == list(range(50))


def test_what_leaves_early_disturbs_nobody():
    """Random pushes, removals and pops: each owner's order holds, and nothing comes twice or is lost."""
    rng = random.Random(0)
    queue, waiting, served = FairQueue(), set(), []
    for i in range(500):
        kind = rng.random()
        if kind < 0.5:
            item = (rng.choice("abc"), i)
            queue.push(item[0], item)
            waiting.add(item)
        elif kind < 0.7 and waiting:
            item = rng.choice(sorted(waiting))
            assert queue.remove(item[0], item)
            assert not queue.remove(item[0], item)
            waiting.remove(item)
        elif len(queue):
            item = queue.pop()
            waiting.remove(item)
            served.append(item)
        assert len(queue) == len(waiting)
    for owner in "abc":
        mine = [i for o, i in served if o == owner]
        assert mine == sorted(mine)
    assert set(queue.clear()) == waiting
    assert queue.peek() is None
