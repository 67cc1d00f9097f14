"""Rank 0 makes many answers with divided tiny models, and compares them with mlx-lm's own decoding on one machine.

Arguments: folders of targets (`tiny_folder.write_target`). Prints a line of JSON for each: how many answers there were,
how many tokens a conversation found in its caches, and what was wrong: (which, tokens, the right ones).
"""

import json
import random
import sys
from pathlib import Path

import mlx.core as mx
from tiny import VOCAB, ScriptedDrafter, plain_tokens, tiny_drafter
from tiny_pair import LetterTokenizer

from dflash_mlx.decoding.engine import can_branch
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.generation import generate, generate_many, stream_generate
from dflash_mlx.hub.registry import ModelSource
from dflash_mlx.pair import ModelPair
from dflash_mlx.ranks.group import leave_group
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.targets.loading import load_target
from dflash_mlx.targets.machines import other_machines
from dflash_mlx.targets.target import Target

LENGTH = 12
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.9, seed=3)


def pair_of(target: Target, drafter: DFlashDrafter) -> ModelPair:
    return ModelPair(
        name="tiny",
        target=target,
        drafter=drafter,
        tokenizer=LetterTokenizer(),  # type: ignore[arg-type]
        dtype=mx.float32,
        block_size=8,
    )


def divided_pair(folder: str, drafter: DFlashDrafter) -> ModelPair:
    """A pair whose target is divided among all ranks. Only rank 0 returns from here."""
    machines = other_machines()
    assert machines is not None
    return pair_of(machines.load_target(ModelSource(kind="folder", path=folder), dtype="float32")[0], drafter)


def check(folder: str) -> dict[str, object]:
    pair = divided_pair(folder, tiny_drafter())
    whole = load_target(Path(folder), dtype="float32")[0]
    rng = random.Random(Path(folder).name)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in (9, 3, 14, 1)]
    truths = [plain_tokens(whole, prompt, LENGTH) for prompt in prompts]
    found: list[tuple[str, object, object]] = []
    for number, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
        script = {len(prompt) + i: token for i, token in enumerate(truth)}
        drafter = ScriptedDrafter(tiny_drafter().config, script, frozenset(rng.sample(list(script), 3)))
        scripted = pair_of(pair.target, drafter)
        found.append((f"chains {number}", generate(scripted, prompt, GREEDY, width=5).token_ids, truth))
        # Left in the middle, with a round on its way.
        stream = stream_generate(scripted, prompt, GREEDY, width=5)
        next(stream)
        stream.close()
        found.append((f"plain {number}", generate(pair, prompt, GREEDY, draft=False).token_ids, truth))
        if number == 0 and can_branch(pair.target, drafter):
            found.append(("tree", generate(scripted, prompt, GREEDY, width=6, tree=True).token_ids, truth))
    found.append(("batch", [answer.token_ids for answer in generate_many(pair, prompts, GREEDY, width=3)], truths))
    seeded = generate_many(pair_of(whole, tiny_drafter()), prompts, SEEDED, draft=False)
    drafted = generate_many(pair, prompts, SEEDED, width=2)
    found += [("seeded", a.token_ids, b.token_ids) for a, b in zip(drafted, seeded, strict=True)]
    # A conversation goes on with its caches, and once more from the middle of an answer.
    session, cached = pair.new_session(), 0
    first = generate(pair, prompts[0], GREEDY, session=session, width=4).token_ids
    for more in ([*first, 7, 8], [*first[:5], 7, 8]):
        answer = generate(pair, [*prompts[0], *more], GREEDY, session=session, width=4)
        cached = cached or answer.cached_tokens
        found.append(("goes on", answer.token_ids, plain_tokens(whole, [*prompts[0], *more], LENGTH)))
    return {"answers": len(found), "cached": cached, "wrong": [case for case in found if case[1] != case[2]]}


if __name__ == "__main__":
    other_machines()
    for name in sys.argv[1:]:
        print(json.dumps(check(name)), flush=True)
    leave_group(0)
