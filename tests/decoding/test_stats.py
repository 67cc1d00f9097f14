from dflash_mlx.decoding.stats import Acceptance


def test_totals_by_hand():
    acceptance = Acceptance()
    acceptance.record(width=0, depth=0, num_accepted=0, tokens=1)
    acceptance.record(width=3, depth=3, num_accepted=3, tokens=4)
    acceptance.record(width=3, depth=3, num_accepted=1, tokens=2)
    acceptance.record(width=1, depth=1, num_accepted=0, tokens=1)
    assert acceptance.to_json() == {
        "rounds": 3,
        "drafted": 7,
        "accepted": 4,
        "mean_acceptance_length": 2.3333,
        "acceptance_rate": 0.5714,
        "per_position": [0.6667, 0.5, 0.5],
        "histogram": [1, 1, 0, 1],
        "single_steps": 1,
    }
    assert list(acceptance.recent) == [(3, 3), (3, 1), (1, 0)]


def test_a_tree_counts_places_by_its_depth():
    """Seven drafts, at most two of which can be kept: position 3 was never tried."""
    acceptance = Acceptance()
    acceptance.record(width=7, depth=2, num_accepted=1, tokens=2)
    assert acceptance.per_position == [1.0, 0.0]
    assert acceptance.acceptance_rate == 1 / 7
    assert list(acceptance.recent) == [(2, 1)]


def test_rounds_that_end_alike_add_up():
    acceptance = Acceptance()
    for _ in range(3):
        acceptance.record(width=0, depth=0, num_accepted=0, tokens=2)
        acceptance.record(width=2, depth=2, num_accepted=1, tokens=2)
    assert acceptance.single_steps == 6
    assert acceptance.histogram == [0, 3]
    assert acceptance.per_position == [1.0, 0.0]


def test_nothing_recorded():
    assert Acceptance().mean_acceptance_length == 0.0
    assert Acceptance().acceptance_rate == 0.0
    assert Acceptance().per_position == []
