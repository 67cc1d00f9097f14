"""Records the rounds that test_replay.py replays: `python tests/policy/record_traces.py` writes traces.npz beside it.

The demo pair answers the built-in prompts plainly, greedily and by sampling under a seed. At each token the drafter
drafts all its places, and nothing of it is used: so a replay can begin a round anywhere. Takes some ten minutes.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dflash_mlx import SamplingParams, load_pair
from dflash_mlx.bench.prompts import BenchPrompt, built_in
from dflash_mlx.decoding.accept import choose_strategy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.tree import BRANCHES, Candidates, DraftTree
from dflash_mlx.pair import ModelPair
from dflash_mlx.policy.width import FixedWidth

TRACES = Path(__file__).with_name("traces.npz")
TOKENS, TEMPERATURES = 128, (0.0, 0.8)
# Log-probabilities are kept in steps of a sixteenth, down to -16.
STEPS = 16
NONE = 255


@dataclass
class Recorder(FixedWidth):
    """Drafts for every round, notes the candidates and uses none."""

    reads_confidence: bool = True
    seen: list[Candidates] = field(default_factory=list)

    @property
    def branches(self) -> bool:
        return True

    def next_width(self) -> int:
        return self.width

    def choose(self, candidates: Candidates) -> DraftTree:
        self.seen.append(candidates)
        return DraftTree.of([], candidates)


def record(pair: ModelPair, prompt: BenchPrompt, temperature: float) -> dict[str, np.ndarray]:
    """The rounds that could begin after each token of an answer but the first and the last.

    tokens: prompt and answer; start: where the first round begins; log_probs: (rounds, places, BRANCHES) in steps;
    ranks: (rounds, places), which candidate the text's own token is.
    """
    ids = pair.encode_chat([{"role": "user", "content": prompt.text}])
    assert pair.drafter is not None
    recorder = Recorder(pair.drafter.places)
    strategy = choose_strategy(SamplingParams(temperature=temperature, seed=1))
    steps = decode(
        pair.new_session(), ids, strategy=strategy, policy=recorder, max_tokens=TOKENS + recorder.width, eos_ids=set()
    )
    answer = [token for step in steps for token in step.tokens]
    # The first token comes from a plain round, and drafts that reach beyond the end have fewer places.
    rounds = [found for found in recorder.seen if found.depth == recorder.width]
    log_probs = np.stack([found.log_probs for found in rounds])
    ranks = np.full(log_probs.shape[:2], NONE, dtype=np.uint8)
    for at, found in enumerate(rounds):
        for place, candidates in enumerate(found.token_ids):
            [same] = np.nonzero(candidates == answer[1 + at + place]) if 1 + at + place < len(answer) else ([],)
            if len(same):
                ranks[at, place] = same[0]
    return {
        "tokens": np.array([*ids, *answer], dtype=np.int32),
        "start": np.array(len(ids)),
        "log_probs": np.minimum(np.round(-log_probs * STEPS), 255).astype(np.uint8),
        "ranks": ranks,
    }


def main() -> None:
    pair = load_pair("demo", dtype="float32")
    arrays: dict[str, np.ndarray] = {}
    for temperature in TEMPERATURES:
        prompts = built_in() if temperature == 0 else built_in()[::2]
        for prompt in prompts:
            name = f"{prompt.category}/{prompt.name}/{temperature}"
            for key, array in record(pair, prompt, temperature).items():
                arrays[f"{name}/{key}"] = array
            print(name, len(arrays[f"{name}/ranks"]), flush=True)
    assert all(array.shape[-1] == BRANCHES for key, array in arrays.items() if key.endswith("log_probs"))
    np.savez_compressed(TRACES, **arrays)
    print(TRACES, TRACES.stat().st_size)


if __name__ == "__main__":
    main()
