"""What drafting is worth where drafts are right with a given chance, worked out by hand."""

import pytest

from dflash_mlx.policy.prospects import prospect
from dflash_mlx.policy.trees_or_chains import PairCosts
from dflash_mlx.policy.width import RoundCosts

DRAFTS = {1: 0.1, 3: 0.1}


def chains(costs, *, steep=True):
    return RoundCosts(dict(enumerate(costs)), DRAFTS, steep=steep)


def test_the_width_with_the_most_tokens_a_second():
    """Rounds take 2, 2 and 2.1 plain steps; of one, two and three places."""
    costs = PairCosts(chains([1.0, 2.0, 2.0, 2.1]))
    best = prospect(costs, 3, 0.9)
    assert (best.drafts, best.tree) == (3, False)
    assert best.tokens == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    assert best.speedup == pytest.approx(best.tokens / 2.1)
    # 1.75 tokens of two drafts, and 1.875 of three: neither is two.
    assert prospect(costs, 3, 0.5).drafts == 0
    # One more draft has to bring a twentieth of what the others do.
    assert prospect(costs, 2, 0.9).drafts == 2
    assert prospect(PairCosts(chains([1.0, 1.1, 1.4, 1.9])), 3, 0.5).drafts == 1


@pytest.mark.parametrize(("cost", "tree"), [(2.2, True), (2.6, False)])
def test_trees_where_they_gain_more(cost, tree):
    """A tree of three has both first places' candidates: 1 + 0.6 + 0.36 + 0.24; the chain of two 1.96, in 2.1 steps."""
    costs = PairCosts(
        chains([1.0, 2.0, 2.1], steep=False), RoundCosts({0: 1.0, 3: cost}, DRAFTS, steep=False, places=2)
    )
    best = prospect(costs, 2, 0.6)
    assert best.tree == tree
    assert best.tokens == pytest.approx(2.2 if tree else 1.96 if best.drafts else 1.0)
    assert best.speedup == pytest.approx(1.0 if not best.drafts else best.tokens / (cost if tree else 2.1))


def test_where_trees_wait_they_have_any_size():
    costs = RoundCosts({0: 1.0, 1: 1.2, 7: 1.8}, DRAFTS, steep=True, places=3)
    assert prospect(PairCosts(chains([1.0, 1.0, 1.0, 1.0]), costs), 3, 0.8).tree
    sizes = {prospect(PairCosts(chains([1.0] * 4), costs), 3, chance).drafts for chance in (0.3, 0.5, 0.7, 0.9)}
    assert sizes - {1, 7}
