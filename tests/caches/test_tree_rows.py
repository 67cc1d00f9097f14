"""A tree in one forward: each row's numbers are those of its path by itself, and nothing stays behind."""

from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import Llama3RoPE, SuScaledRoPE, YarnRoPE
from tiny import FAMILIES, ScriptedDrafter, plain_tokens, tiny_drafter, tiny_target
from tiny_families import WINDOW, family_target, unavailable

from dflash_mlx.caches.rows import Rows
from dflash_mlx.caches.target_caches import trees_work_with
from dflash_mlx.caches.tree_rows import branched, find_ropes, keep_path
from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.session import Session
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.tree_steps import PLAIN

# Rows: the anchor; 1-2-3 and 4-5 after it; 6 after 1.
PARENTS = [0, 1, 2, 0, 4, 1]
DEPTHS = [0, 1, 2, 3, 1, 2, 2]
TOKENS = [5, 6, 7, 8, 9, 10, 11]
CONTEXT = [i % 40 for i in range(30)]


def path_to(row):
    return [row] if row == 0 else [*path_to(PARENTS[row - 1]), row]


VISIBLE = np.array([[column in path_to(row) for column in range(7)] for row in range(7)])


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def target(request):
    return tiny_target(request.param)


def zeros(length):
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, length, 4)), mx.zeros((1, 1, length, 4)))
    return cache


def filled(target):
    cache = target.make_cache()
    target.forward(mx.array([CONTEXT]), cache)
    return cache


def rows_of(cache, length):
    rows = Rows.of(cache, length)
    rows.reserve(length + len(TOKENS))
    return rows


@contextmanager
def over_tree(ropes, rows):
    """A pass over the rows of the tree, wherever there is a place."""
    rows.scatter()
    lengths = rows.lengths
    with branched(ropes, rows, mx.array(DEPTHS), mx.array(VISIBLE), PLAIN):
        lengths.places = lengths.tree.places
        yield


def forward_tree(target, rows):
    with over_tree(target.ropes, rows):
        return target.forward(mx.array([TOKENS]), rows.layers)


def test_each_row_is_computed_as_its_path_alone(target):
    found = forward_tree(target, rows_of(filled(target), len(CONTEXT)))
    for row in range(7):
        path = path_to(row)
        alone = target.forward(mx.array([[TOKENS[i] for i in path]]), filled(target))
        assert mx.allclose(found[:, row], alone[:, -1], atol=1e-4).item()


@pytest.mark.parametrize("path", [[0], [0, 1, 2], [0, 4, 5], [0, 1, 6], [0, 1, 2, 3]])
def test_a_kept_path_leaves_the_cache_as_if_fed_alone(target, path):
    cache = filled(target)
    rows = rows_of(cache, len(CONTEXT))
    forward_tree(target, rows)
    # Of a path that is shorter than the longest one, what comes after its end does not matter.
    keep_path(rows, mx.array([*path, *[6] * (4 - len(path))]), PLAIN)
    rows.give_back(0, len(CONTEXT) + len(path), cache)
    alone = filled(target)
    target.forward(mx.array([[TOKENS[i] for i in path]]), alone)
    for one, other in zip(cache, alone, strict=True):
        assert one.offset == other.offset
        for found, expected in ((one.keys, other.keys), (one.values, other.values)):
            length = one.offset
            assert mx.allclose(found[..., :length, :], expected[..., :length, :], atol=1e-4).item()


def test_keeping_a_path_does_not_copy_the_cache():
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 2, 20_000, 32)), mx.zeros((1, 2, 20_000, 32)))
    rows = rows_of([cache], 19_000)
    [layer] = rows.layers
    mx.eval(layer.keys, layer.values)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with over_tree([], rows):
        layer.update_and_fetch(mx.ones((1, 2, 7, 32)), mx.ones((1, 2, 7, 32)))
    keep_path(rows, mx.array([0, 2, 5]), PLAIN)
    mx.eval(layer.keys, layer.values)
    assert mx.get_peak_memory() - before < layer.keys.nbytes / 10


def test_nothing_stays_behind_even_after_an_error(target):
    kinds = [type(module) for module in target.model.modules()]
    names = target.parameter_names()
    rows = rows_of(filled(target), len(CONTEXT))
    with branched(target.ropes, rows, mx.array(DEPTHS), mx.array(VISIBLE)):
        assert target.parameter_names() == names
        assert rows.layers[0].offset.tolist() == [30 + depth for depth in DEPTHS]
    with pytest.raises(ValueError, match="broken"), branched(target.ropes, rows, mx.array(DEPTHS), mx.array(VISIBLE)):
        raise ValueError("broken")
    assert rows.layers[0].offset.tolist() == [30]
    assert [type(module) for module in target.model.modules()] == kinds
    assert target.parameter_names() == names


def test_a_window_counts_positions():
    """Of rows at depths 0, 1, 1 after 4 positions, with a window of 3: the two siblings see as far back."""
    visible = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=bool)
    rows = rows_of([zeros(4)], 4)
    with branched([], rows, mx.array([0, 1, 1]), mx.array(visible)):
        mask = rows.layers[0].make_mask(3, window_size=3)
    seen = [[i for i, sees in enumerate(row) if sees] for row in mask[0, 0].tolist()]
    assert seen == [[2, 3, 4], [3, 4, 5], [3, 4, 6]]


def test_a_window_counts_positions_within_a_tree_that_is_deeper():
    """Of rows at depths 0, 1, 1, 2, 3 after 4 positions, the last three a path: a window of 2 ends with its parent."""
    visible = np.eye(5, dtype=bool)
    visible[:, 0] = visible[3, 2] = visible[4, 2] = visible[4, 3] = True
    rows = rows_of([zeros(4)], 4)
    with branched([], rows, mx.array([0, 1, 1, 2, 3]), mx.array(visible)):
        mask = rows.layers[0].make_mask(5, window_size=2)
    seen = [[i for i, sees in enumerate(row) if sees] for row in mask[0, 0].tolist()]
    assert seen == [[3, 4], [4, 5], [4, 6], [6, 7], [7, 8]]


@pytest.mark.parametrize("length", [2, 3 * WINDOW - 1])
@pytest.mark.parametrize("family", ["llama, sliding", "gemma3", "gemma3n", "gemma4, shared keys", "gpt_oss"])
def test_trees_go_over_the_edges_of_windows(family, length):
    """Trees that are deeper than a window, of which rounds keep up to 15 drafts, and wrong ones in between."""
    if reason := unavailable(family):
        pytest.skip(reason)
    target = family_target(family)
    assert target.takes_trees()
    prompt = [i % 40 for i in range(length)]
    truth = plain_tokens(target, prompt, 60)
    script = {length + i: token for i, token in enumerate(truth)}
    for wrong in (frozenset[int](), frozenset(range(length, length + 60, 4))):
        drafter = ScriptedDrafter(tiny_drafter(block_size=16).config, script, wrong)
        policy, session = FixedWidth(31, places=15), Session(target, drafter)
        steps = list(decode(session, prompt, strategy=Greedy(), policy=policy, max_tokens=50, eos_ids=set()))
        assert [token for step in steps for token in step.tokens] == truth[:50]
        gained = {step.num_accepted for step in steps[1:-1]}
        assert gained == {15} if not wrong else max(gained) > 2


@pytest.mark.parametrize(
    "rope",
    [
        nn.RoPE(16),
        nn.RoPE(8, traditional=True),
        Llama3RoPE(
            16,
            scaling_config={
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        YarnRoPE(16, scaling_factor=4.0),
        SuScaledRoPE(16, original_max_position_embeddings=64, long_factor=[1.5] * 8),
    ],
    ids=lambda rope: type(rope).__name__,
)
def test_every_rotary_embedding_takes_a_position_for_each_row(rope):
    x = mx.random.normal((1, 3, 7, 16), key=mx.random.key(0))
    expected = [rope(x[:, :, i : i + 1], offset=30 + depth) for i, depth in enumerate(DEPTHS)]
    layer = nn.Module()
    layer.rope = rope
    rows = rows_of([zeros(30)], 30)
    with branched(find_ropes(layer), rows, mx.array(DEPTHS), mx.array(VISIBLE)):
        found = rope(x, offset=rows.layers[0].offset)
        assert mx.allclose(rope(x, offset=3), type(rope).__mro__[1].__call__(rope, x, offset=3)).item()
    assert mx.allclose(found, mx.concatenate(expected, axis=2), atol=1e-5).item()


class ForgetsPositions(nn.Module):
    """A model whose rotary embedding is written out, so that it does not see a row's position."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __call__(self, tokens, cache):
        lengths = getattr(cache[0], "lengths", None)
        if lengths is not None and lengths.tree is not None:
            positions, mask = lengths.tree
            lengths.tree = mx.broadcast_to(lengths.value, positions.shape), mask
        return self.model(tokens, cache=cache)


def test_which_models_take_trees_is_found_out_by_running(target):
    def works(model, make_cache=target.make_cache):
        return trees_work_with(model, target.layers, target.vocab_size, make_cache)

    assert target.takes_trees()
    assert not works(ForgetsPositions(target.model))
    assert not works(target.model, list)
    assert works(target.model, lambda: [RotatingKVCache(8) for _ in target.layers])
    assert not works(target.model, lambda: [RotatingKVCache(8, keep=4) for _ in target.layers])
    assert not works(target.model, lambda: [ArraysCache(2) for _ in target.layers])
    assert not works(nn.Linear(2, 2))


def trees(rng, count):
    """Trees of random forms and sizes: their parents, and a path from the anchor through each."""
    for _ in range(count):
        size = int(rng.integers(1, 14))
        parents = [0] + [int(rng.integers(0, row)) for row in range(1, size)]
        goal = int(rng.integers(0, size))
        path = [goal]
        while path[-1]:
            path.append(parents[path[-1]])
        yield parents, path[::-1]


def shape_of(parents):
    visible = np.eye(len(parents), dtype=bool)
    for row in range(1, len(parents)):
        visible[row] |= visible[parents[row]]
    return mx.array(visible.sum(axis=1) - 1), mx.array(visible)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_trees_follow_one_another(family):
    """Each tree's rows lie where there is room, between those that earlier trees have left; in the end all positions
    are put in order. The buffers grow meanwhile, and a copy can be had at any time."""
    target, rng = family_target(family), np.random.default_rng(1)
    text = [int(token) for token in rng.integers(0, 40, 190)]
    caches = target.make_cache()
    target.forward(mx.array([text]), caches)
    batch, model = target.as_row(caches, len(text)), target.pass_for(())
    turns: list[int] = []
    for turn, (parents, path) in enumerate(trees(rng, 30)):
        tokens = [int(token) for token in rng.integers(0, 40, len(parents))]
        at = mx.array([len(text)])
        found, _ = batch.feed(model, mx.array([tokens]), at=at, room=len(text) + len(tokens), tree=shape_of(parents))
        lengths = batch.rows.lengths
        assert max(lengths.places.tolist()) < len(text) + len(tokens) <= lengths.capacity
        # After its end come any other rows.
        batch.keep_path(mx.array([*path, *sorted({*range(len(tokens))} - {*path}, reverse=True)][: len(path) + 3]))
        batch.commit(len(tokens), [len(path)])
        text += [tokens[row] for row in path]
        if turn % 3 == 2:
            # A single token goes on out of order, and a chain does not.
            fed = [1] if turn % 2 else [1, 2, 3]
            batch.feed(model, mx.array([fed]), at=mx.array([len(text)]), room=len(text) + len(fed))
            batch.commit(len(fed), [len(fed)])
            text += fed
            assert (lengths.placed is None) == (len(fed) > 1)
        elif turn % 7 == 6:
            turns.append(turn)
            alone = target.forward(mx.array([text]), target.make_cache())
            assert mx.allclose(found[:, path], alone[:, -len(path) :], rtol=1e-3, atol=1e-4).item()
            if family == "llama":
                copy = target.copy_caches(batch, 0, len(text) - 1)
                alone = target.forward(mx.array([text[-1:]]), copy)
                assert mx.allclose(alone, found[:, path[-1:]], rtol=1e-3, atol=1e-4).item()
    assert len(turns) > 2
    assert batch.rows.lengths.capacity > 256
    further, _ = batch.feed(model, mx.array([[3, 4]]), at=mx.array([len(text)]), room=len(text) + 2)
    batch.commit(2, [2])
    alone = target.forward(mx.array([[*text, 3, 4]]), target.make_cache())
    assert mx.allclose(further, alone[:, -2:], rtol=1e-3, atol=1e-4).item()
    batch.give_back(0, len(text) + 2, caches)
    alone = target.forward(mx.array([[*text, 3, 4, 7]]), target.make_cache())
    assert mx.allclose(target.forward(mx.array([[7]]), caches), alone[:, -1:], rtol=1e-3, atol=1e-4).item()


def test_after_some_single_tokens_positions_are_put_in_order(target):
    text = [i % 30 for i in range(20)]
    caches = target.make_cache()
    target.forward(mx.array([text]), caches)
    batch, model = target.as_row(caches, len(text)), target.pass_for(())
    for parents in ([0, 0, 0], [0, 0, 0]):
        batch.feed(model, mx.array([[5, 6, 7]]), at=mx.array([len(text)]), room=len(text) + 3, tree=shape_of(parents))
        batch.keep_path(mx.array([0, 2]))
        batch.commit(3, [2])
        text += [5, 7]
        for count in range(6):
            found, _ = batch.feed(model, mx.array([[count]]), at=mx.array([len(text)]), room=len(text) + 1)
            batch.commit(1, [1])
            text.append(count)
        assert batch.rows.lengths.placed is not None
    in_order = []
    for token in range(4):
        found, _ = batch.feed(model, mx.array([[token]]), at=mx.array([len(text)]), room=len(text) + 1)
        batch.commit(1, [1])
        text.append(token)
        in_order.append(batch.rows.lengths.placed is None)
    assert in_order == [False, False, True, True]
    alone = target.forward(mx.array([text]), target.make_cache())
    assert mx.allclose(found, alone[:, -1:], rtol=1e-3, atol=1e-4).item()


def test_a_row_with_trees_takes_others_in(target):
    """Its positions are put in order first."""
    texts = [[i % 30 for i in range(length)] for length in (20, 9)]
    batches = []
    for text in texts:
        caches = target.make_cache()
        target.forward(mx.array([text]), caches)
        batches.append(target.as_row(caches, len(text)))
        at = mx.array([len(text)])
        batches[-1].feed(
            target.pass_for(()), mx.array([TOKENS]), at=at, room=40, tree=(mx.array(DEPTHS), mx.array(VISIBLE))
        )
        batches[-1].keep_path(mx.array([0, 4, 5, 1]))
        text += [TOKENS[row] for row in (0, 4, 5)]
    batch, other = batches
    batch.add(1)
    batch.take_over(other, [1])
    found, _ = batch.feed(target.pass_for(()), mx.array([[1, 2]] * 2), at=mx.array([len(t) for t in texts]), room=40)
    for row, text in enumerate(texts):
        alone = target.forward(mx.array([[*text, 1, 2]]), target.make_cache())
        assert mx.allclose(found[row : row + 1], alone[:, -2:], rtol=1e-3, atol=1e-4).item()
