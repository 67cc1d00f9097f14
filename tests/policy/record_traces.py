"""Records the rounds that test_replay.py replays: `python tests/policy/record_traces.py` writes traces.npz beside it.

The demo pair answers the built-in prompts plainly, greedily and by sampling under a seed. At each token the drafter
drafts all its places, and nothing of it is used: so a replay can begin a round anywhere. Takes some ten minutes.
"""

from pathlib import Path

import dflash_mlx  # noqa: F401  # before mlx, which it sets up

# isort: split

import mlx.core as mx
import numpy as np

from dflash_mlx import SamplingParams, load_pair
from dflash_mlx.bench.prompts import BenchPrompt, built_in
from dflash_mlx.decoding.accept import choose_strategy, for_trees
from dflash_mlx.decoding.decode import decode
from dflash_mlx.drafters.contract import Nobody
from dflash_mlx.drafters.ranking import BRANCHES, rank
from dflash_mlx.pair import ModelPair
from dflash_mlx.policy.width import FixedWidth

TRACES = Path(__file__).with_name("traces.npz")
TOKENS, TEMPERATURES = 128, (0.0, 0.8)
# Log-probabilities are kept in steps of a sixteenth, down to -16.
STEPS = 16
NONE = 255


def record(pair: ModelPair, prompt: BenchPrompt, temperature: float) -> dict[str, np.ndarray]:
    """The rounds that could begin after each token of an answer but the first and the last.

    tokens: prompt and answer; start: where the first round begins; log_probs: (rounds, places, BRANCHES) in steps;
    ranks: (rounds, places), which candidate the text's own token is.
    """
    ids = pair.encode_chat([{"role": "user", "content": prompt.text}])
    assert pair.drafter is not None
    target, drafter, places = pair.target, pair.drafter, pair.drafter.places
    strategy = for_trees(choose_strategy(SamplingParams(temperature=temperature, seed=1)))
    session, policy = pair.new_session(draft=False), FixedWidth(0)
    steps = decode(session, ids, strategy=strategy, policy=policy, max_tokens=TOKENS + places, eos_ids=set())
    answer = [token for step in steps for token in step.tokens]
    text = mx.array([[*ids, *answer]])
    _, features = target.forward_tapped(text, target.make_cache(), drafter.taps)
    room = text.size + places + 1
    state = drafter.blank(target, 1, room)
    known, rounds = 0, TOKENS - 1
    log_probs = np.zeros((rounds, places, BRANCHES), dtype=np.float32)
    ranks = np.full((rounds, places), NONE, dtype=np.uint8)
    for at in range(rounds):
        here = len(ids) + at
        state.extend(text[:, known:here], features[:, known:here], mx.array([known]), room=room, all_kept=True)
        known, position = here, mx.array([here])
        drafted = state.propose([Nobody()], text[:, here], position, places, room=room)
        assert drafted.logits is not None
        vocabulary = state.vocabulary
        preferences = strategy.preferences(drafted.logits[0], position[0] + 1, vocabulary)
        found = rank(preferences, BRANCHES, vocabulary.token_ids if vocabulary else None)
        log_probs[at] = np.array(found.log_probs)
        for place, candidates in enumerate(np.array(found.token_ids)):
            [same] = np.nonzero(candidates == answer[1 + at + place])
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
