"""Trees over recurrent layers: a row's numbers are those of its path by itself, and the kept path is what goes on."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk
from tiny import ScriptedDrafter, plain_tokens, tiny_drafter
from tiny_families import family_target, unavailable

from dflash_mlx.caches.recurrence import Recorder
from dflash_mlx.caches.rows import Rows
from dflash_mlx.caches.target_caches import BatchCaches
from dflash_mlx.caches.tree_recurrence import _TREE, _Ancestry, _branched_update, _inverse
from dflash_mlx.decoding.accept import Greedy
from dflash_mlx.decoding.decode import decode
from dflash_mlx.decoding.session import Session
from dflash_mlx.policy.width import FixedWidth

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2")
CONTEXT = [i % 40 for i in range(9)]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    if reason := unavailable(request.param):
        pytest.skip(reason)
    return family_target(request.param)


def random_tree(rng, rows):
    """Parents of all rows but the first, depths (L,), and which rows each continues, itself included, (L, L)."""
    parents = [int(rng.integers(max(0, row - 4), row)) for row in range(1, rows)]
    visible = np.eye(rows, dtype=bool)
    for row, parent in enumerate(parents, 1):
        visible[row] |= visible[parent]
    return visible.sum(axis=1) - 1, visible


def fed(target, tokens):
    caches = target.make_cache()
    logits = target.forward(mx.array([tokens]), caches)
    return caches, logits


@pytest.mark.parametrize("seed", range(3))
def test_each_row_is_computed_as_its_path_alone_and_a_kept_path_goes_on(target, seed):
    assert target.takes_trees()
    rng, rows = np.random.default_rng(seed), (5, 16, 32)[seed]
    depths, visible = random_tree(rng, rows)
    tokens = rng.integers(0, target.vocab_size, rows)
    caches, _ = fed(target, CONTEXT)
    batch, model = BatchCaches(Rows.of(caches, len(CONTEXT)), target.layers), target.pass_for(())
    at = mx.array([len(CONTEXT)], dtype=mx.int32)
    shape = mx.array(depths.astype(np.int32)), mx.array(visible)
    found, _ = batch.feed(model, mx.array(tokens[None]), at=at, room=100, tree=shape)
    for row in range(rows):
        _, alone = fed(target, [*CONTEXT, *tokens[visible[row]].tolist()])
        assert mx.allclose(found[0, row], alone[0, -1], atol=1e-4).item()
    # Of the deepest path all but the last row stay; the rest of the path is meaningless.
    path = np.flatnonzero(visible[depths.argmax()])
    batch.keep_path(mx.array(path))
    batch.commit(rows, [len(path) - 1])
    kept = tokens[path[:-1]].tolist()
    further, _ = batch.feed(model, mx.array([[3, 4]]), at=at + len(kept), room=100)
    _, alone = fed(target, [*CONTEXT, *kept, 3, 4])
    assert mx.allclose(further[0], alone[0, -2:], atol=1e-4).item()


def test_a_tree_of_a_single_path_may_be_kept_whole(target):
    caches, _ = fed(target, CONTEXT)
    batch, model = BatchCaches(Rows.of(caches, len(CONTEXT)), target.layers), target.pass_for(())
    at = mx.array([len(CONTEXT)], dtype=mx.int32)
    batch.feed(model, mx.array([[7, 8, 9]]), at=at, room=100, tree=(mx.arange(3), mx.tri(3, dtype=mx.bool_)))
    batch.keep_path(mx.arange(3))
    batch.commit(3, [3])
    further, _ = batch.feed(model, mx.array([[3, 4]]), at=at + 3, room=100)
    _, alone = fed(target, [*CONTEXT, 7, 8, 9, 3, 4])
    assert mx.allclose(further[0], alone[0, -2:], atol=1e-4).item()


@pytest.mark.parametrize("wrong", [False, True])
def test_answers_are_those_of_plain_decoding(target, wrong):
    """Trees of 31 drafts, of which rounds keep up to 15, or fewer where drafts are wrong."""
    truth = plain_tokens(target, CONTEXT, 60)
    script = {len(CONTEXT) + i: token for i, token in enumerate(truth)}
    missed = frozenset(range(len(CONTEXT), len(CONTEXT) + 60, 4)) if wrong else frozenset[int]()
    drafter = ScriptedDrafter(tiny_drafter(block_size=16).config, script, missed)
    policy, session = FixedWidth(31, places=15), Session(target, drafter)
    steps = list(decode(session, CONTEXT, strategy=Greedy(), policy=policy, max_tokens=50, eos_ids=set()))
    assert [token for step in steps for token in step.tokens] == truth[:50]
    gained = {step.num_accepted for step in steps[1:-1]}
    assert gained == {15} if not wrong else max(gained) > 2
    # What the session holds is what was committed: it goes on as if nothing had been drafted.
    held = list(session.tokens)
    more = list(decode(session, [*held, 7], strategy=Greedy(), policy=FixedWidth(0), max_tokens=5, eos_ids=set()))
    assert [token for step in more for token in step.tokens] == plain_tokens(target, [*held, 7], 5)


@pytest.mark.parametrize("decay", [0.1, 16.0])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_the_delta_rule_along_paths_is_mlx_lms(decay, key_heads):
    """With keys that are all alike, and with states of which a token leaves nothing."""
    rng, rows, size = np.random.default_rng(1), 24, 8
    depths, visible = random_tree(rng, rows)
    q, k = (mx.array(rng.standard_normal((1, rows, key_heads, size), dtype=np.float32)) for _ in range(2))
    k = mx.where(mx.arange(rows)[None, :, None, None] % 3 == 0, k, mx.ones_like(k))
    q, k = normalize_qk(q, k, inv_scale=size**-0.5, eps=1e-6)
    v = mx.array(rng.standard_normal((1, rows, 2, 4), dtype=np.float32))
    a, b = (mx.array(5 * rng.standard_normal((1, rows, 2), dtype=np.float32)) for _ in range(2))
    log, bias = mx.log(mx.array([decay, 2 * decay])), mx.ones((2,))
    state = mx.array(rng.standard_normal((1, 2, 4, size), dtype=np.float32))
    token = _TREE.set(_Ancestry(mx.array(depths), mx.array(visible)))
    try:
        found, after = _branched_update(q, k, v, a, b, log, bias, state)
    finally:
        _TREE.reset(token)
    assert after is state
    for row in range(rows):
        path = mx.array(np.flatnonzero(visible[row]))
        along = [x[:, path] for x in (q, k, v, a, b)]
        alone, _ = gated_delta_update(*along, log, bias, state, use_kernel=False)
        assert mx.allclose(found[0, row], alone[0, -1], atol=1e-5).item()


@pytest.mark.parametrize("rows", [1, 2, 7, 32])
def test_the_inverse_is_right_where_powers_would_be_too_large(rows):
    links = mx.tri(rows, rows, -1)
    product = (mx.eye(rows) + links) @ _inverse(links)
    assert mx.abs(product - mx.eye(rows)).max().item() < 1e-5


def test_nothing_stays_behind_even_after_an_error(target):
    kinds = [type(module) for module in target.model.modules()]
    caches, _ = fed(target, CONTEXT)
    rows = Rows.of(caches, len(CONTEXT))
    shape = mx.arange(3), mx.tri(3, dtype=mx.bool_)
    with pytest.raises(ValueError, match="broken"), Recorder(target.layers).recording(rows.states, shape):
        raise ValueError("broken")
    assert [type(module) for module in target.model.modules()] == kinds
    assert _TREE.get(None) is None
