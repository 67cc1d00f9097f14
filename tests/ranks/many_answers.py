"""Rank 0 makes many answers in a row with divided models, and compares them with those of one machine.

Arguments: how many answers each model is to make at least, and the models: "demo", or folders of tiny targets
(`tiny_folder.write_target`). Prints a line of JSON for each: how many answers there were, how many more were left in
the middle, how many tokens a conversation found in its caches, and what was wrong: (which, tokens, the right ones).
"""

import json
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import dflash_mlx  # noqa: F401  # before mlx, which it gives OpenBLAS

# isort: split
import mlx.core as mx
from tiny import LAYERS, VOCAB, ScriptedDrafter, plain_tokens, tiny_drafter
from tiny_pair import LetterTokenizer

from dflash_mlx.bench.prompts import short_prompts
from dflash_mlx.decoding.choosing import can_branch
from dflash_mlx.drafters.dflash import DFlashDrafter
from dflash_mlx.generation import generate, generate_many, stream_generate, stream_many
from dflash_mlx.hub.registry import ModelSource
from dflash_mlx.loading import load_pair
from dflash_mlx.pair import ModelPair
from dflash_mlx.ranks.group import leave_group
from dflash_mlx.rounding import TOLERANCE, relative_difference
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.targets.loading import load_target
from dflash_mlx.targets.machines import other_machines
from dflash_mlx.targets.target import Target

LENGTH = 12
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.9)


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


class TinyModels:
    """A random target, divided (`pair`) and on one machine (`whole`)."""

    def __init__(self, folder: str) -> None:
        self.pair = divided_pair(folder, tiny_drafter())
        self.whole = pair_of(load_target(Path(folder), dtype="float32")[0], tiny_drafter())

    def prompts(self, rng: random.Random) -> list[list[int]]:
        return [[rng.randrange(1, VOCAB) for _ in range(length)] for length in (9, 3, 14, 1)]

    def good_pair(self, prompt: list[int], truth: list[int], rng: random.Random) -> ModelPair:
        """A pair whose drafter knows the answer, but for three tokens."""
        script = {len(prompt) + i: token for i, token in enumerate(truth)}
        wrong = frozenset(rng.sample(list(script), 3))
        return pair_of(self.pair.target, ScriptedDrafter(tiny_drafter().config, script, wrong))


def same_features(models: "TinyModels", prompt: list[int]) -> bool:
    """Whether rank 0 gets the outputs of all layers, whichever machine has them."""
    found, expected = (
        pair.target.forward_tapped(mx.array([prompt]), pair.target.make_cache(), [*range(LAYERS), LAYERS])[1]
        for pair in (models.pair, models.whole)
    )
    return relative_difference(found, expected) <= TOLERANCE[expected.dtype]


class DemoModels:
    """The demo pair, divided (`pair`), and with its target on one machine (`whole`)."""

    def __init__(self) -> None:
        self.pair = load_pair("demo", dtype="float32")
        self.whole = replace(self.pair, target=load_target(self.pair.folders[0], dtype="float32")[0])

    def prompts(self, rng: random.Random) -> list[list[int]]:
        return [self.pair.encode_prompt(prompt.text) for prompt in rng.sample(short_prompts(), 4)]

    def good_pair(self, prompt: list[int], truth: list[int], rng: random.Random) -> ModelPair:
        return self.pair


@dataclass
class Found:
    """What a model has answered: (which, tokens, the right ones), and how many answers were left in the middle.

    further: what was compared beside that, in the same form.
    """

    answers: list[tuple[str, object, object]] = field(default_factory=list)
    further: list[tuple[str, object, object]] = field(default_factory=list)
    left: int = 0
    cached: int = 0


def answer(models: TinyModels | DemoModels, rng: random.Random, found: Found) -> None:
    """Some answers of each kind: chains, trees, plain ones, batches, seeded ones and conversations."""
    pair, whole = models.pair, models.whole
    prompts = models.prompts(rng)
    truths = [plain_tokens(whole.target, prompt, LENGTH) for prompt in prompts]
    for prompt, truth in zip(prompts, truths, strict=True):
        good = models.good_pair(prompt, truth, rng)
        found.answers.append(("chains", generate(good, prompt, GREEDY, width=5).token_ids, truth))
        # Left in the middle, with a round on its way.
        stream = stream_generate(good, prompt, GREEDY, width=5)
        next(stream)
        stream.close()
        found.left += 1
        found.answers.append(("plain", generate(pair, prompt, GREEDY, draft=False).token_ids, truth))
    assert pair.drafter is not None
    if can_branch(pair.target, pair.drafter):
        good = models.good_pair(prompts[0], truths[0], rng)
        tree = generate(good, prompts[0], GREEDY, width=6, tree=True)
        found.answers.append(("tree", tree.token_ids, truths[0]))
    batch = stream_many(pair, prompts, GREEDY, width=3)
    for _ in range(rng.randrange(1, 8)):
        next(batch)
    batch.close()
    found.left += len(prompts)
    if isinstance(models, TinyModels):
        found.further.append(("features", same_features(models, prompts[0]), True))
    together = generate_many(pair, prompts, GREEDY, width=3)
    found.answers += [("batch", a.token_ids, truth) for a, truth in zip(together, truths, strict=True)]
    if pair.target.whole_layers is not None:
        # Here nothing is added in another order, so that the same drafts are made and kept.
        undivided = generate_many(whole, prompts, GREEDY, width=3)
        kept = [[a.acceptance.to_json() for a in answers if a.acceptance] for answers in (together, undivided)]
        found.further.append(("drafts", *kept))
    seeded = replace(SEEDED, seed=rng.randrange(1000))
    drafted, alone = generate_many(pair, prompts, seeded, width=2), generate_many(whole, prompts, seeded, draft=False)
    found.answers += [("seeded", a.token_ids, b.token_ids) for a, b in zip(drafted, alone, strict=True)]
    # A conversation goes on with its caches, and once more from the middle of an answer.
    session = pair.new_session()
    first = generate(pair, prompts[0], GREEDY, session=session, width=4).token_ids
    for more in ([*first, 7, 8], [*first[:5], 7, 8]):
        turn = generate(pair, [*prompts[0], *more], GREEDY, session=session, width=4)
        found.cached += turn.cached_tokens
        truth = plain_tokens(whole.target, [*prompts[0], *more], LENGTH)
        found.answers.append(("goes on", turn.token_ids, truth))


def check(model: str, wanted: int) -> dict[str, object]:
    """Make at least `wanted` answers of a model."""
    models, found = DemoModels() if model == "demo" else TinyModels(model), Found()
    rng = random.Random(Path(model).name)
    while len(found.answers) < wanted:
        answer(models, rng, found)
    wrong = [case for case in found.answers + found.further if case[1] != case[2]]
    return {"answers": len(found.answers), "left": found.left, "cached": found.cached, "wrong": wrong}


if __name__ == "__main__":
    other_machines()
    for model in sys.argv[2:]:
        print(json.dumps(check(model, int(sys.argv[1]))), flush=True)
    leave_group(0)
