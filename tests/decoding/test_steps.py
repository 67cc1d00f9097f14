"""The parts of a round on small arrays, worked out by hand: which drafts are judged, by which rules, after what."""

from itertools import islice

import mlx.core as mx
import numpy as np
import pytest
from best_first import HostTree, best_first
from tiny import tiny_target

from dflash_mlx.decoding.accept import Coupled, Greedy
from dflash_mlx.decoding.lane import Lane
from dflash_mlx.decoding.policies import Choice
from dflash_mlx.decoding.session import Session
from dflash_mlx.decoding.steps import Chances, Drafts, accept, block_of, consider, process_rows, propose
from dflash_mlx.drafters.contract import Drafted, DraftVocabulary, Nobody, Proposal
from dflash_mlx.drafters.ranking import BRANCHES
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.sampling import SamplingParams

LANES, WIDTH, VOCAB = 3, 4, 6


def make_drafts(**changes):
    """Tokens 0 to 11."""
    return Drafts(mx.arange(LANES * WIDTH).reshape(LANES, WIDTH), **changes)


def own_proposals():
    """As drawn, other tokens than the best ones: 100 more."""
    drafts = make_drafts()
    return [Proposal(drafts.tokens[row] + 100) for row in range(LANES)]


@pytest.mark.parametrize("drawn", [False, True])
def test_a_lanes_drafts_are_those_that_are_to_be_judged(drawn):
    drafts = make_drafts(proposals=own_proposals() if drawn else None, limits={0: 2, 2: 0})
    more = 100 if drawn else 0
    first, second = drafts.of(0), drafts.of(1)
    assert first.tokens.tolist() == [0 + more, 1 + more]
    assert second.tokens.tolist() == [token + more for token in (4, 5, 6, 7)]
    assert drafts.of(2) is None


@pytest.mark.parametrize("drawn", [False, True])
def test_drafts_are_cut_to_a_width(drawn):
    drafts = make_drafts(proposals=own_proposals() if drawn else None)
    assert drafts.shortened(WIDTH) is drafts
    assert drafts.shortened(0) is None
    short = drafts.shortened(1)
    assert short.tokens.tolist() == [[0], [4], [8]]
    assert (short.proposals is not None) == drawn
    assert short.of(1).tokens.tolist() == [104 if drawn else 4]


def test_places_that_no_lane_is_to_be_judged_at_are_left_out():
    narrow = make_drafts(limits={0: 2, 1: 3, 2: 0}).narrowed()
    assert narrow.width == 3
    assert [narrow.of(row) and narrow.of(row).width for row in range(LANES)] == [2, 3, None]
    assert make_drafts(limits={0: 2, 1: 3}).narrowed().width == WIDTH  # the third lane has no limit
    assert make_drafts(limits={0: 0, 1: 0, 2: 0}).narrowed() is None


@pytest.mark.parametrize("drawn", [False, True])
def test_some_lanes_drafts_can_be_taken(drawn):
    chances = Chances(mx.arange(LANES * WIDTH).reshape(LANES, WIDTH) / 16)
    drafts = make_drafts(proposals=own_proposals() if drawn else None, chances=chances)
    assert drafts.take([0, 1, 2]) is drafts
    taken = drafts.take([2, 0])
    assert taken.tokens.tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert taken.of(0).tokens.tolist() == [token + (100 if drawn else 0) for token in (8, 9, 10, 11)]
    assert (16 * taken.chances.read()).tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert make_drafts().take([1]).chances is None
    assert len(drafts.arrays) == 2
    assert len(make_drafts().arrays) == 1


def test_a_chain_is_kept_as_far_as_all_of_it_is():
    """Chances of 0.5, 0.8 and 0.9, of each of which 1.1 times as much is expected, but never certainty."""
    forecast = Chances(mx.array([[0.5, 0.8, 0.9, 1.0]]), scale=1.1).forecast(3)
    assert forecast.best.tolist() == pytest.approx([0.5, 0.8, 0.9])
    assert forecast.chances.tolist() == pytest.approx([0.55, 0.55 * 0.88, 0.55 * 0.88 * 0.99])
    assert forecast.kept_of_firsts([1, 2, 3]) == 0  # nobody asks for a chain's


def test_a_block_is_each_anchor_and_its_drafts():
    anchors = mx.array([7, 8, 9])
    assert block_of(anchors, None).tolist() == [[7], [8], [9]]
    assert block_of(anchors, make_drafts()).tolist() == [[7, 0, 1, 2, 3], [8, 4, 5, 6, 7], [9, 8, 9, 10, 11]]
    assert block_of(anchors[:1], HostTree([1, 3, 2], [0, 1, 0], [0.6, 0.9, 0.4]).on_device).tolist() == [[7, 1, 3, 2]]
    assert block_of(anchors, make_drafts()).dtype == mx.uint32


def test_each_row_is_processed_with_what_comes_before_it():
    seen = []

    def note(before, row):
        seen.append(before.tolist())
        return row + len(before)

    history, rows = mx.array([5, 6]), mx.zeros((3, VOCAB))
    proposal = Proposal(mx.array([1, 2]))
    found = process_rows(rows, proposal, history, [note, lambda before, row: 10 * row])
    assert seen == [[5, 6], [5, 6, 1], [5, 6, 1, 2]]
    assert found[:, 0].tolist() == [20, 30, 40]
    assert process_rows(rows[:1], None, history, [note])[:, 0].tolist() == [2]


def make_lane(**changes):
    session = Session(tiny_target("llama"), None)
    session.tokens = [0]
    options = {"strategy": Greedy(), "policy": FixedWidth(2), "max_tokens": 6, "eos_ids": set(), **changes}
    return Lane(session=session, prompt=[0, 3], **options)


def words(*rows):
    """Bits that let these tokens through, by row."""
    return np.array([[sum(1 << token for token in row)] for row in rows], dtype=np.uint32)


def test_each_lane_is_judged_by_its_own_rules():
    """The target's best tokens after each of the rows are 1, 2 and 3, and 1 and 2 are drafted in all lanes."""
    bias = SamplingParams(logit_bias={4: 100.0}).logits_processors()
    lanes = [
        make_lane(),
        make_lane(processors=bias),
        None,
        make_lane(guide=object()),
        make_lane(top_logprobs=2),
        make_lane(guide=object(), processors=bias, top_logprobs=0),
    ]
    logits = mx.broadcast_to(10.0 * mx.eye(VOCAB)[mx.array([1, 2, 3])], (len(lanes), 3, VOCAB))
    tokens = mx.broadcast_to(mx.array([1, 2]), (len(lanes), 2))
    drafts = Drafts(tokens, limits={4: 1})
    verdict = accept(
        lanes,
        drafts,
        block_of(mx.zeros((len(lanes),)), drafts),
        logits,
        None,
        at=mx.array([1] * len(lanes)),
        histories={1: mx.array([0, 3]), 5: mx.array([0, 3])},
        bits={3: words([1], [0, 5], [3]), 5: words([1], [2], [0, 4])},
    )
    found = [(reading.num_accepted, reading.tokens) for reading in verdict.outcome.read()]
    assert found[0] == (2, [1, 2, 3])
    assert found[1] == (0, [4])
    assert found[2] == (2, [1, 2, 3])
    assert found[3][0] == 1
    assert found[3][1][-1] in (0, 5)
    assert found[4] == (1, [1, 2])
    assert found[5] == (2, [1, 2, 4])  # the constraint comes last
    assert set(verdict.logprobs) == {4, 5}
    assert verdict.read_logprobs(0) == []
    told = verdict.read_logprobs(4)
    assert [(one.token_id, len(one.top), one.top[0][0]) for one in told] == [(1, 2, 1), (2, 2, 2)]
    assert [one.top for one in verdict.read_logprobs(5)] == [()] * 3
    assert len(verdict.arrays) == 3


def test_lanes_that_are_plain_are_judged_together():
    logits = mx.broadcast_to(10.0 * mx.eye(VOCAB)[mx.array([1, 2, 3])], (2, 3, VOCAB))
    options = {"at": mx.array([1, 1]), "histories": {}, "bits": {}}
    features = mx.zeros((2, 3, 8))
    fed = mx.array([[0, 1, 2], [0, 1, 5]])
    verdict = accept([make_lane(), None], Drafts(fed[:, 1:]), fed, logits, features, **options)
    assert [(r.num_accepted, r.tokens) for r in verdict.outcome.read()] == [(2, [1, 2, 3]), (1, [1, 2])]
    assert verdict.fed is fed
    assert verdict.features is features
    left = accept([None, make_lane()], None, fed[:, :1], logits[:, :1], None, **options)
    assert [(r.num_accepted, r.tokens) for r in left.outcome.read()] == [(0, [1]), (0, [1])]
    alone = accept([make_lane(), make_lane()], None, fed[:, :1], logits[:, :1], None, **options)
    assert [(r.num_accepted, r.tokens) for r in alone.outcome.read()] == [(0, [1]), (0, [1])]
    mixed = accept([make_lane(), make_lane(top_logprobs=0)], None, fed[:, :1], logits[:, :1], None, **options)
    assert [(r.num_accepted, r.tokens) for r in mixed.outcome.read()] == [(0, [1]), (0, [1])]
    assert len(mixed.read_logprobs(1)) == 1


def test_a_trees_kept_path_brings_its_features_and_logprobs():
    """Rows 0 (the anchor), 1 and 2 (its children), 3 (the child of 2): the target goes to 2 and then to 3."""
    tree = HostTree([1, 2, 3], [0, 0, 2], [0.6, 0.4, 0.9]).on_device
    logits = 10.0 * mx.eye(VOCAB)[mx.array([2, 5, 3, 4])][None]
    features = mx.arange(4, dtype=mx.float32)[None, :, None]
    options = {"at": mx.array([1]), "histories": {}, "bits": {}}
    fed = block_of(mx.array([0]), tree)
    verdict = accept([make_lane(top_logprobs=1)], tree, fed, logits, features, **options)
    [reading] = verdict.outcome.read()
    assert (reading.num_accepted, reading.tokens) == (2, [2, 3, 4])
    assert verdict.path.tolist() == [0, 2, 3]
    # At the anchor 0.6 and 0.4, then 0.9, and nothing after it.
    assert reading.promised == pytest.approx(1.9)
    assert verdict.features.flatten().tolist() == [0.0, 2.0, 3.0]
    assert verdict.fed.tolist() == [[0, 2, 3]]
    assert len(verdict.read_logprobs(0)) == 3
    plain = accept([make_lane()], tree, fed, logits, None, **options)
    assert (plain.features, plain.logprobs) == (None, {})


# A drafter's own vocabulary, out of order, and its logits for two lanes and three places.
OWN = DraftVocabulary(mx.array([40, 10, 30, 20]), 50)
LOGITS = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
vocabularies = pytest.mark.parametrize("vocabulary", [None, OWN], ids=["whole vocabulary", "own vocabulary"])


def ids_of(columns, vocabulary):
    return columns if vocabulary is None else np.array(OWN.token_ids)[columns]


class FakeState:
    """Notes what it is asked to draft, and for whom."""

    def propose(self, writers, anchors, at, places, *, room, tree):
        self.asked = [type(writer.strategy) for writer in writers], anchors.tolist(), at.tolist(), places, room
        return Drafted(mx.zeros((len(writers), places)))


def test_drafts_are_proposed_for_each_lane_and_for_the_rows_of_those_that_have_left():
    state, lane = FakeState(), make_lane(strategy=Coupled(SamplingParams(temperature=1.0), seed=1))
    propose([lane, None], state, Choice(3), anchors=mx.array([5, 6]), at=mx.array([11, 22]), room=99)
    assert state.asked == ([Coupled, Nobody], [5, 6], [11, 22], 3, 99)


@pytest.mark.parametrize("vocabulary", [None, OWN], ids=["whole vocabulary", "own vocabulary"])
def test_nobody_gets_the_best_tokens(vocabulary):
    drafted = Nobody().propose(mx.array(LOGITS[0]), 3, vocabulary)
    assert drafted.tokens.tolist() == ids_of(LOGITS[0].argmax(axis=-1), vocabulary).tolist()
    assert Nobody().text_from(0) == []


def test_what_a_drafter_only_holds_likely_is_its_chance():
    drafted = Drafted(mx.array([[4, 5], [6, 7]]), log_probs=mx.array([[-0.5, -1.0], [0.0, -2.0]]))
    found = consider([None, None], drafted, None, mx.array([1, 1]), Choice(2))
    np.testing.assert_allclose(found.read(), np.exp([[-0.5, -1.0], [0.0, -2.0]]), rtol=1e-5)


def test_a_tree_of_one_token_a_place_is_a_chain():
    drafted = Drafted(mx.array([[4, 5, 6]]), log_probs=mx.array([[-0.5, -1.0, -mx.inf]]))
    found = consider([make_lane()], drafted, None, mx.array([1]), Choice(3, tree=31))
    tree = found.likeliest.tree(31)
    assert tree.tokens.tolist() == [4, 5, 6]
    assert tree.depths.tolist() == [0, 1, 2, 3]
    assert found.forecast().chances.tolist() == pytest.approx([np.exp(-0.5), np.exp(-1.5), 0.0], abs=1e-6)


@vocabularies
def test_a_chains_chances_are_those_of_its_best_tokens(vocabulary):
    drafted = Drafted(mx.zeros((2, 3)), mx.array(LOGITS))
    found = consider([None, None], drafted, vocabulary, mx.array([1, 1]), Choice(3))
    chances = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(found.read(), chances.max(axis=-1), rtol=1e-5)
    assert consider([None, None], drafted, vocabulary, mx.array([1, 1]), Choice(3, width=3)) is None


@vocabularies
@pytest.mark.parametrize("strategy", [Greedy(), Coupled(SamplingParams(temperature=1.0), seed=1)])
def test_a_tree_is_made_of_what_the_target_would_prefer(strategy, vocabulary):
    """With the noise of the positions after the anchor's, where tokens are drawn."""
    drafted = Drafted(mx.zeros((1, 3)), mx.array(LOGITS[:1]))
    found = consider([make_lane(strategy=strategy)], drafted, vocabulary, mx.array([11]), Choice(3, tree=9, scale=0.7))
    scores = np.array(strategy.preferences(mx.array(LOGITS[0]), 12, vocabulary))
    order = np.argsort(-scores, axis=1)[:, :BRANCHES]
    log_probs = np.take_along_axis(scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)), order, axis=1)
    nodes = list(islice(best_first(log_probs, scale=0.7), 9))
    truth = HostTree.of(nodes, ids_of(order, vocabulary), log_probs)
    assert found.likeliest.tree(9).tokens.tolist() == truth.tokens
    forecast = found.forecast()
    assert forecast.best.tolist() == pytest.approx(np.exp(log_probs[:, 0]).tolist(), rel=1e-4)
    assert forecast.chances.tolist() == pytest.approx([node.chance for node in nodes], rel=1e-4)
    assert forecast.firsts == (firsts := ids_of(order[:, 0], vocabulary).tolist())
    assert forecast.kept_of_firsts([*firsts[:2], 99, 0]) == 2
    assert forecast.kept_of_firsts([99, *firsts]) == 0
    assert forecast.kept_of_firsts([*firsts, 5]) == 3
