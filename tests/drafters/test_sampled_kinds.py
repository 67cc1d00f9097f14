"""Whatever the way of drafting, answers without a seed are drawn from the target's own distribution."""

import pytest
import test_sampling
from mlx.utils import tree_map
from test_sampling import PROMPT, VOCAB
from tiny import HIDDEN, SECOND, randomize, tiny_drafter, tiny_eagle3, tiny_target

from dflash_mlx.decoding.accept import Rejection
from dflash_mlx.drafters.draft_model import DraftModel
from dflash_mlx.drafters.medusa import MedusaDrafter, MedusaNetwork
from dflash_mlx.drafters.mtp import MTPDrafter, MTPNetwork
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams

PLACES, RUNS = 3, 500


def small_target():
    return tiny_target("llama", seed=3, vocab_size=VOCAB, num_hidden_layers=1)


def draft_model(target):
    model = small_target()
    model.model.update(tree_map(lambda x: 0.7 * x, model.model.parameters()))
    return DraftModel(model, places=PLACES)


def eagle3(target):
    return tiny_eagle3(6, places=PLACES, vocab_size=VOCAB, target_layer_ids=(0, 0, 0))


def medusa(target):
    network = MedusaNetwork(PLACES, HIDDEN, VOCAB, 1)
    randomize(network, 6)
    return MedusaDrafter(network, target_layers=1)


def dflash2(target):
    one_layer = {"num_hidden_layers": 1, "layer_types": ("full_attention",), "num_target_layers": 1}
    return tiny_drafter(block_size=PLACES + 1, taps=(0,), vocab_size=VOCAB, **one_layer, **SECOND)


def mtp(target):
    network = MTPNetwork(HIDDEN, 1e-5, type(target.layers[0])(target.model.args), norms_between=True)
    randomize(network, 6)
    return MTPDrafter(network, target, places=PLACES)


FOR_CI = [(eagle3, 7), (medusa, 0), (dflash2, 7)]


@pytest.mark.parametrize(
    ("make", "tree"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in FOR_CI),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(draft_model, 0), (eagle3, 0), (medusa, 7), (mtp, 0)]
        ),
    ],
)
def test_sampling_keeps_the_targets_distribution(make, tree, monkeypatch):
    params, target = SamplingParams(temperature=0.8), small_target()
    drafter, policy = make(target), FixedWidth(tree or PLACES, places=PLACES if tree else 0)
    kept = []
    monkeypatch.setattr(FixedWidth, "listens_after", 1)
    monkeypatch.setattr(FixedWidth, "observe", lambda self, round: kept.append(round.num_accepted))
    counts = test_sampling.sample(target, drafter, params, RUNS, lambda run: Rejection(params, seed=run), policy)
    assert test_sampling.chi_square_p(counts, test_sampling.exact_joint(target, params), RUNS) > 1e-3
    assert len(counts) > len(PROMPT)
    # Some drafts are kept, and some are not.
    assert 0 < sum(kept) < 2 * len(kept)
