"""Rank 1 takes part in a sum some seconds after rank 0 has launched it.

Rank 0 prints how many seconds that took, for how many of them no other thread of its could run, and its processor's
seconds.
"""

import itertools
import json
import threading
import time

import mlx.core as mx

from dflash_mlx.ranks.group import join_group, leave_group
from dflash_mlx.runtime import free_unused_memory

LATE = 6.0
ran_at = list[float]()


def tick() -> None:
    while True:
        ran_at.append(time.perf_counter())
        time.sleep(0.01)


group = join_group()
assert group is not None
threading.Thread(target=tick, daemon=True).start()
if group.rank == 1:
    time.sleep(LATE)
started, processor = time.perf_counter(), time.process_time()
total = mx.distributed.all_sum(mx.ones(100), group=group.ranks)
mx.async_eval(total)
free_unused_memory()
mx.eval(total)
ended = time.perf_counter()
if group.rank == 1:
    group.channels[0].receive()
times = [started, *(at for at in ran_at if started < at < ended), ended]
still = max(later - earlier for earlier, later in itertools.pairwise(times))
print(json.dumps({"waited": ended - started, "still": still, "processor": time.process_time() - processor}), flush=True)
leave_group(0)
