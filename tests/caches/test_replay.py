"""Passes that are replayed compute what they compute when they are written down anew, with whatever the rows hold."""

import mlx.core as mx
import numpy as np
import pytest
from best_first import HostTree
from tiny import VOCAB, join, tiny_drafter, tiny_target
from tiny_families import family_target, unavailable

from dflash_mlx.caches.replay import Replayed
from dflash_mlx.caches.rows import Rows
from dflash_mlx.caches.target_caches import BatchCaches
from dflash_mlx.decoding.session import Session
from dflash_mlx.drafters.contract import Nobody
from dflash_mlx.drafters.dflash_state import DFlashState
from dflash_mlx.rounding import TOLERANCE, relative_difference

FAMILIES = ("llama", "llama, sliding", "gemma3", "gemma4, shared keys", "gpt_oss", "qwen3_next")
LENGTHS = (7, 3)


def tokens_of(seed, *shape):
    return mx.array(np.random.default_rng(seed).integers(0, VOCAB, shape))


def rows_of(target, lengths=LENGTHS):
    """A row for each prompt of these lengths."""
    rows = []
    for i, length in enumerate(lengths):
        session = Session(target, None)
        session.feed(np.array(tokens_of(i, length)).tolist())
        rows.append(Rows.of(session.target_cache, length))
    if len(rows) > 1:
        join(*rows)
    return BatchCaches(rows[0], target.layers)


def close(found, expected):
    return relative_difference(found, expected) < TOLERANCE[mx.float32]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replayed_pass_is_the_same(family):
    """Blocks of two sizes in turn, at other positions each time, and over buffers that have grown."""
    if reason := unavailable(family):
        pytest.skip(reason)
    target, runs = family_target(family), []
    for on in (False, True):
        target.set_replays(on)
        caches, at, found = rows_of(target), np.array(LENGTHS), []
        for i, (count, kept) in enumerate([(3, [2, 3]), (1, [1, 1]), (3, [1, 2]), (3, [3, 1]), (1, [1, 1])]):
            room = 400 if i > 2 else 100
            block = tokens_of(10 + i, 2, count)
            logits, features = caches.feed(target.pass_for([0, 1]), block, at=mx.array(at), room=room)
            caches.commit(count, kept)
            found += [logits, features]
            at = at + kept
        runs.append(found)
    assert all(close(*pair) for pair in zip(*runs, strict=True))
    # What is compared depends on what the rows hold.
    assert not close(runs[0][0], runs[0][4])


@pytest.mark.parametrize("shape", [[0, 0, 1], [0, 1, 2, 2, 0]])
def test_a_replayed_tree_is_the_same(shape):
    target, runs = tiny_target("qwen3"), []
    for on in (False, True):
        target.set_replays(on)
        caches, found = rows_of(target, (9,)), []
        for i, turn in enumerate((shape, list(shape), [0] * len(shape))):
            tree = HostTree(tokens_of(i, len(turn)).tolist(), turn, [0.5] * len(turn)).on_device
            block = mx.concatenate([tokens_of(30 + i, 1, 1), tree.tokens[None]], axis=1)
            model = target.pass_for(())
            found.append(caches.feed(model, block, at=mx.array([9 + 2 * i]), room=40, tree=tree.shape)[0])
            caches.keep_path(mx.array([0, len(turn)]))
        runs.append(found)
    assert all(close(*pair) for pair in zip(*runs, strict=True))
    assert not close(runs[0][1], runs[0][2])


@pytest.mark.parametrize("changes", [{}, {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}])
def test_a_replayed_drafter_is_the_same(changes):
    target, drafter, runs = tiny_target("llama"), tiny_drafter(**changes), []
    for on in (False, True):
        target.set_replays(on)
        state, found, at = DFlashState.blank(drafter, target, 2, 20), [], mx.array([0, 0])
        for i, count in enumerate((5, 2, 5, 5)):
            features = mx.random.normal((2, count, drafter.config.feature_size), key=mx.random.key(i))
            state.extend(tokens_of(i, 2, count), features, at, room=20 if i < 3 else 300, all_kept=False)
            at = at + mx.array([count, 1])
            room = 30 if i < 3 else 300
            found.append(state.propose([Nobody(), Nobody()], tokens_of(i, 2), at, 4, room=room).logits)
        runs.append(found)
    assert all(close(*pair) for pair in zip(*runs, strict=True))
    assert not close(runs[0][0], runs[0][2])


def test_layers_that_compute_in_another_way_are_written_down_anew():
    target = tiny_target("llama")
    target.set_replays(True)
    block, at = tokens_of(0, 2, 3), mx.array(LENGTHS)
    before, _ = rows_of(target).feed(target.pass_for(()), block, at=at, room=20)
    target.model.model.layers[0].mlp.down_proj.weight = mx.zeros_like(target.model.model.layers[0].mlp.down_proj.weight)
    target.set_replays(True)
    after, _ = rows_of(target).feed(target.pass_for(()), block, at=at, room=20)
    target.set_replays(False)
    expected, _ = rows_of(target).feed(target.pass_for(()), block, at=at, room=20)
    assert close(after, expected)
    assert not close(before, expected)


def test_the_body_runs_once_for_a_shape():
    runs = []

    def body(rows, tokens):
        runs.append(tokens.shape)
        return [tokens + rows.lengths.value[:, None]]

    replayed, caches = Replayed(body), rows_of(tiny_target("llama"))
    for count in (1, 2, 1, 2):
        [found] = replayed(caches.rows, mx.zeros((2, count), dtype=mx.int32))
        assert found.tolist() == [[length] * count for length in LENGTHS]
    assert runs == [(2, 1), (2, 2)]
