"""Which way to compute attention is raced, and layers use the one that won."""

from dataclasses import replace

import mlx.core as mx
import pytest
from metal import emulator
from metal.emulator import Emulator, needs_compiler
from tiny import drafted_tokens, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx import runtime
from dflash_mlx.kernels.attention import attention_layers
from dflash_mlx.kernels.race import Verdict
from dflash_mlx.kernels.rows_attention import layers, passes
from dflash_mlx.kernels.rows_attention.layers import LENGTHS, ROWS, Heads, Rival, chosen, heads_used, in_calls, works
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.rounding import relative_difference

HEADS = Heads(4, 2, 64, mx.float32)
WON, LOST = Verdict(dict.fromkeys(ROWS, (1.0, 0.5))), Verdict(dict.fromkeys(ROWS, (1.0, 1.0)))
FAST = Verdict(dict.fromkeys(ROWS, (1.0, 0.4)))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path))


def arrays(rows, length, *, batch=1, heads=4, groups=2, size=64, dtype=mx.float32):
    mx.random.seed(rows)
    shapes = (heads, rows), (groups, length), (groups, length)
    return [mx.random.normal((batch, *shape, size)).astype(dtype) for shape in shapes]


def mlx(queries, keys, values, scale, mask):
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


@pytest.mark.parametrize("heads", [2, 12, 80])
@pytest.mark.parametrize("mask", ["causal", "tree", None])
def test_calls_of_a_few_rows_are_attention(heads, mask, monkeypatch):
    given = arrays(19, 40, heads=heads, batch=2)
    tree = mx.random.uniform(shape=(2, 1, 19, 40)) < 0.5
    tree[..., 0] = True
    mask, calls = tree if mask == "tree" else mask, []
    expected = mlx(*given, 0.1, mask)

    def noted(queries, *others, **options):
        calls.append(queries.shape[2])
        return attend(queries, *others, **options)

    attend = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
    assert relative_difference(in_calls(*given, 0.1, mask), expected) < 1e-5
    # MLX's kernel for a few rows takes 8, and 32 of all heads that share one of keys.
    assert max(calls) == {2: 8, 12: 5, 80: 1}[heads]
    assert sum(calls) == 19


def test_heads_are_noted_while_something_runs():
    target, drafter = tiny_target("qwen3", head_dim=64), tiny_drafter()
    kinds = [type(layer) for layer in attention_layers(target.model)]
    found = heads_used(attention_layers(target.model), lambda: plain_tokens(target, [5, 6, 7], 2))
    assert found == [Heads(4, 2, 64, mx.float32)]
    assert [type(layer) for layer in attention_layers(target.model)] == kinds
    assert heads_used(attention_layers(drafter), lambda: None) == []


def verdicts(**ways):
    """By the names of ways, a verdict for each of `LENGTHS`."""
    return {
        layers._shape(HEADS, length, name.replace("_", " ")): verdict
        for name, found in ways.items()
        for length, verdict in zip(LENGTHS, found, strict=False)
    }


def test_what_lies_between_two_lengths_follows_both():
    """And beyond the longest, that one; of two ways that won, the faster one is used."""
    by_calls, by_passes = [WON, FAST, WON, LOST, LOST], [LOST, WON, WON, WON, WON]
    found = chosen(HEADS, verdicts(in_two_passes=by_passes, in_calls_of_a_few_rows=by_calls))
    spans = {name: sorted({span for _, span in places}) for name, places in found.items()}
    assert spans == {"in calls of a few rows": [1, 2], "in two passes": [3, 4, 5]}
    rows = {rows for places in found.values() for rows, _ in places}
    assert rows == set(range(1, 65))
    assert chosen(HEADS, verdicts(in_two_passes=[LOST, WON, LOST, LOST, WON])) == {
        "in two passes": [(rows, 5) for rows in range(1, 65)]
    }


def test_numbers_of_rows_that_lost_are_left_out():
    some = Verdict({2: (1.0, 2.0), 4: (1.0, 0.5), 8: (1.0, 0.5), 16: (1.0, 2.0)}, "32 rows differ")
    found = chosen(HEADS, verdicts(in_two_passes=[some] * 5))
    assert {rows for rows, _ in found["in two passes"]} == {4, 5, 6, 7, 8}


def test_each_number_of_answers_has_its_own_races(monkeypatch):
    """What one answer's race says holds up to the next number that was raced."""
    machine = replace(runtime.backend(), kind="cuda")
    monkeypatch.setattr(layers, "backend", lambda: machine)
    names = [layers._shape(HEADS, length, "in one launch", lanes) for lanes in (1, 64) for length in LENGTHS]
    won = dict.fromkeys(names, WON)
    assert [len(chosen(HEADS, won, lanes)) for lanes in layers.LANES] == [1, 0, 1]
    noted = []

    def way(queries, keys, values, scale, mask):
        noted.append(queries.shape[0])
        return mlx(queries, keys, values, scale, mask)

    attend = layers._by_table({(HEADS, lanes, 4, 0): way for lanes in (1, 64)})
    for batch in (1, 15, 16, 63, 64, 80):
        attend(*arrays(4, 9, batch=batch), cache=None, scale=0.1, mask=mx.ones((batch, 1, 4, 9), dtype=mx.bool_))
    assert noted == [1, 15, 64, 80]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("metal", ["in calls of a few rows", "in two passes"]),
        ("cuda", ["on matrix units", "on matrix units in parts", "in one launch"]),
    ],
)
def test_ways_of_a_machine(kind, expected, monkeypatch):
    machine = replace(runtime.backend(), kind=kind)
    monkeypatch.setattr(layers, "backend", lambda: machine)
    assert list(layers.ways()) == expected
    # On CUDA with several answers at once, too, but not over the longest caches.
    each = 3 * len(LENGTHS) - 2 if kind == "cuda" else len(LENGTHS)
    # In parts with one answer only, over 1,024 positions and more.
    more = len(LENGTHS) - 1 if kind == "cuda" else 0
    assert len(layers.races(HEADS._replace(dtype=mx.float16))) == 2 * each + more
    # float32 goes through the matrix units of Apple's GPUs only.
    assert len(layers.races(HEADS)) == (each if kind == "cuda" else 2 * each)


def test_the_race_itself_runs():
    verdict = layers.race_rival(in_calls, HEADS, 40)
    assert verdict.note == ""
    assert set(verdict.seconds) == set(ROWS)


def test_a_way_that_computes_something_else_loses():
    def wrong(queries, keys, values, scale, mask):
        return mlx(queries, keys, values, scale, mask) + (queries.shape[2] > 4)

    verdict = layers.race_rival(wrong, HEADS, 40)
    assert set(verdict.seconds) == {1, 2, 4}
    assert "8 rows differ" in verdict.note


def refusing(*_):
    raise RuntimeError("no compiler")


@pytest.mark.parametrize(
    ("attention", "fits", "expected"),
    [
        (mlx, True, True),
        (lambda q, k, v, scale, mask: mlx(q, k, v, scale, None), True, False),
        (refusing, True, False),
        (refusing, False, True),
    ],
)
def test_a_way_is_tried_before_it_is_trusted(attention, fits, expected):
    assert works(Rival(attention, lambda *_: fits, 256), HEADS) is expected


@pytest.fixture
def winner(monkeypatch, tmp_path_factory):
    """As if the two passes had won all races from the first position on; the emulator, and the launches of a pass."""
    used, launched = Emulator(emulator.shared_folder(tmp_path_factory)), []
    first, second = (used.metal_kernel(**make()) for make in (passes._first, passes._second))

    def noted(**call):
        launched.append(call["inputs"][0].shape)
        return first(**call)

    machine = replace(runtime.backend(), kind="metal")
    monkeypatch.setattr(layers, "backend", lambda: machine)
    monkeypatch.setattr(passes, "_kernels", lambda: (noted, second))
    monkeypatch.setattr(layers, "LENGTHS", (1,))
    monkeypatch.setattr(
        layers, "race_rival", lambda attention, heads, length, lanes: WON if attention is passes.attention else LOST
    )
    return launched


@needs_compiler
@pytest.mark.parametrize("places", [0, 4], ids=["chain", "tree"])
def test_answers_stay_the_same(places, winner):
    """Of a tiny model that attends by the kernel; the truth is mlx-lm's plain decoding. And a drafter's heads are 8."""
    target, drafter, prompt = tiny_target("qwen3", head_dim=64), tiny_drafter(), [5, 6, 7]
    expected, names = plain_tokens(target, prompt, 6), target.parameter_names()
    found, notes = layers.use_where_faster([target.model, drafter], lambda: plain_tokens(target, prompt, 1))
    assert found.startswith("attention, 4 heads on 2 of size 64, float32 in two passes: 1/1,2/1,")
    assert notes == []
    assert drafted_tokens(target, drafter, prompt, 6, FixedWidth(4, places=places)) == expected
    assert (1, 4, 5, 64) in winner
    assert target.parameter_names() == names


@needs_compiler
def test_what_was_not_raced_goes_the_ordinary_way(winner):
    target = tiny_target("qwen3", head_dim=64)
    layers.use_where_faster([target.model], lambda: plain_tokens(target, [5, 6, 7], 1))
    attend = type(target.layers[0].self_attn).__call__.__globals__["scaled_dot_product_attention"]
    winner.clear()
    whole = mx.ones((1, 1, 4, 9), dtype=mx.bool_)
    ordinary = [
        (arrays(4, 9), None),
        (arrays(4, 9), mx.zeros((4, 9))),
        (arrays(4, 9), mx.ones((4, 9), dtype=mx.bool_)),
        (arrays(4, 9, batch=2), whole),
        (arrays(65, 40), "causal"),
        (arrays(4, 9, heads=2), whole),
        (arrays(4, 9, dtype=mx.float16), whole),
        ([*arrays(4, 9)[:2], mx.ones((1, 2, 9, 32))], whole),
    ]
    for given, mask in ordinary:
        assert mx.array_equal(attend(*given, cache=None, scale=0.1, mask=mask), mlx(*given, 0.1, mask))
    assert winner == []
    for given, mask in ((arrays(4, 9), whole), (arrays(64, 70), "causal")):
        found = attend(*given, cache=None, scale=0.1, mask=mask)
        assert relative_difference(found, mlx(*given, 0.1, mask)) < 1e-5
    assert len(winner) == 2
