"""Rank 0 does one thing until it is stopped: it is idle, drafts, or reads prompts. It says when it has begun.

Arguments: what to do, and a target's folder (`tiny_folder.write_target`).
"""

import os
import sys
import time

from many_answers import GREEDY, divided_pair
from tiny import tiny_drafter

from dflash_mlx.generation import generate
from dflash_mlx.sampling import SamplingParams

what, folder = sys.argv[1:]
pair = divided_pair(folder, tiny_drafter())
generate(pair, [5, 6, 7], GREEDY, width=3)
print(os.getpid(), flush=True)
while True:
    if what == "idle":
        time.sleep(1)
    elif what == "reading":
        generate(pair, [5, 6, 7] * 600, SamplingParams(max_tokens=1), width=3)
    else:
        generate(pair, [5, 6, 7], SamplingParams(max_tokens=500, ignore_eos=True), width=3)
