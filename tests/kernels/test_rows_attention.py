"""Attention of a few rows in two passes: the kernels compute what their twin does, in an emulator of Metal."""

import re

import mlx.core as mx
import numpy as np
import pytest
from metal import emulator, lint
from metal.emulator import Emulator, KernelError, needs_compiler
from mlx_lm.models.base import scaled_dot_product_attention

from dflash_mlx.kernels.rows_attention import passes, twin
from dflash_mlx.kernels.rows_attention.passes import HEAD_DIMS, MOST_ROWS, POSITIONS, attention, made_for
from dflash_mlx.kernels.sources import source
from dflash_mlx.rounding import relative_difference
from dflash_mlx.runtime import backend

DTYPES = (mx.float16, mx.bfloat16, mx.float32)
KINDS = [(dtype, head_dim) for dtype in DTYPES for head_dim in HEAD_DIMS]
# Each kind takes a compiler seconds; the others are left to the nightly run.
SOME_KINDS = [
    (mx.float16, 64),
    (mx.bfloat16, 80),
    pytest.param(mx.bfloat16, 256, marks=pytest.mark.slow),
]
MASKS = ("tree", "lengths", "causal", "none")
CLOSE = {mx.float32: 1e-5, mx.float16: 5e-4, mx.bfloat16: 4e-3}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return emulator.shared_folder(tmp_path_factory)


@pytest.fixture
def metal(folder, monkeypatch):
    """Has the Metal kernels run in an emulator, which is given back; `first` are the counts of the first pass."""
    used = Emulator(folder)
    use_source(used, source("rows_attention/first_pass.metal"), monkeypatch)
    return used


def use_source(emulator, text, monkeypatch, second=None):
    kernel = emulator.metal_kernel(**passes._first() | {"source": text})
    parts = passes._second()
    together = emulator.metal_kernel(**parts | {"source": second or parts["source"]})

    def first(**call):
        found = kernel(**call)
        emulator.first = emulator.counts
        return found

    monkeypatch.setattr(passes, "_kernels", lambda: (first, together))


def problem(rows, length, *, head_dim=64, dtype=mx.float16, heads=4, groups=2, batch=1, mask="tree"):
    """Queries, keys, values, a scale and a mask, as `attention` takes them; numbers that repeat."""
    rng = np.random.default_rng(rows * length)
    arrays = [
        mx.array(rng.standard_normal((batch, count, n, head_dim), dtype=np.float32)).astype(dtype)
        for count, n in ((heads, rows), (groups, length), (groups, length))
    ]
    seen = {"none": None, "causal": "causal"}.get(mask)
    if mask == "tree":
        seen = rng.random((batch, 1, rows, length)) < 0.5
        seen[..., 0] = True
        seen = mx.array(seen)
    elif mask == "lengths":
        ends = mx.array(rng.integers(1, max(2, length - rows), batch))[:, None, None, None]
        seen = mx.arange(length) < ends + mx.arange(rows)[:, None]
    return *arrays, 2 / head_dim**0.5, seen


def difference(*given, **options):
    arguments = problem(*given, **options)
    found, expected = attention(*arguments), twin.attention(*arguments)
    assert found.dtype == arguments[0].dtype
    assert found.shape == expected.shape
    return relative_difference(found, expected)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_twin_is_mlxs_attention(mask, dtype):
    queries, keys, values, scale, seen = problem(5, 70, dtype=dtype, batch=2, mask=mask)
    wide = [array.astype(mx.float32) for array in (queries, keys, values)]
    expected = scaled_dot_product_attention(*wide, cache=None, scale=scale, mask=seen)
    assert relative_difference(twin.attention(queries, keys, values, scale, seen), expected) < CLOSE[dtype]


@needs_compiler
@pytest.mark.parametrize(("dtype", "head_dim"), SOME_KINDS)
def test_kinds_of_heads(dtype, head_dim, metal):
    """Parts that are full and one that is not, of one head of keys and more; a row that sees nothing of a part."""
    metal.order = "random"
    for metal.seed, mask in enumerate(MASKS):
        metal.checked = mask == "tree"
        options = {"heads": 3, "groups": 1} if metal.seed % 2 else {"heads": 4, "groups": 2, "batch": 2}
        assert difference(7, 70, head_dim=head_dim, dtype=dtype, mask=mask, **options) < CLOSE[dtype]
    metal.checked = False
    assert difference(3, 2 * POSITIONS + 9, head_dim=head_dim, dtype=dtype, mask="lengths") < CLOSE[dtype]


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(("dtype", "head_dim"), KINDS)
def test_every_kind_of_heads_in_many_schedules(dtype, head_dim, metal):
    metal.checked, metal.order = True, "random"
    for metal.seed, mask in enumerate(MASKS):
        for rows, length, heads in ((2, 300, 8), (16, 33, 6), (33, 65, 2), (64, 100, 4)):
            assert difference(rows, length, head_dim=head_dim, dtype=dtype, heads=heads, mask=mask) < CLOSE[dtype]


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16, 17, 32, 33, 63, 64, 65, 130])
def test_numbers_of_rows(rows, metal):
    """Of one threadgroup, of several, and more than are computed at once."""
    assert difference(rows, 140, heads=3, groups=1, mask="causal") < CLOSE[mx.float16]


@needs_compiler
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_nothing_is_left_to_chance(order, metal):
    """Whatever thread goes first: no race, no access out of bounds, and the same numbers."""
    given = problem(9, POSITIONS + 70, heads=6)
    first = attention(*given)
    for seed in range(2):
        metal.checked, metal.order, metal.seed = True, order, seed
        assert mx.array_equal(attention(*given), first)


@needs_compiler
@pytest.mark.parametrize(("rows", "heads", "times"), [(2, 4, 1), (16, 6, 1), (17, 6, 1), (21, 6, 1), (22, 6, 2)])
def test_keys_and_values_are_read_once(rows, heads, times, metal):
    """For all rows and all heads that share them, up to 64 together; and each matrix operation has new work."""
    length, head_dim, groups = POSITIONS + 64, 64, 2
    queries, keys, values, scale, mask = problem(rows, length, heads=heads, groups=groups)
    metal.checked = True
    attention(queries, keys, values, scale, mask)
    counts, splits = metal.first, 2
    for name, array in (("k", keys), ("v", values)):
        assert counts.read[name] == times * array.nbytes
        assert counts.fetched[name] == times * array.nbytes
    assert counts.fetched["q"] == splits * queries.nbytes
    assert counts.written["sums"] == splits * rows * heads * head_dim * 4
    eights = -(-rows * heads // groups // 8)
    assert counts.matrix_operations == groups * times * -(-eights // times) * 2 * (length // 8) * (head_dim // 8)
    assert counts.threadgroup_bytes <= 32768 // 3 * 2


@needs_compiler
@pytest.mark.parametrize(("dtype", "head_dim"), [(mx.float32, 256), (mx.bfloat16, 128)])
def test_threadgroup_memory_is_enough(dtype, head_dim, metal):
    attention(*problem(2, 9, dtype=dtype, head_dim=head_dim))
    assert metal.first.threadgroup_bytes <= 20480


def parts_of_rows(given, rows):
    queries, keys, values, scale, mask = given
    return queries[:, :, rows], keys, values, scale, mask[:, :, rows]


def alone(given):
    """Each row by itself."""
    count = given[0].shape[2]
    return mx.concatenate([attention(*parts_of_rows(given, slice(i, i + 1))) for i in range(count)], axis=2)


def rows_do_not_depend_on_others(dtype):
    """Bit for bit: alone or with others, in any place, in a batch, with more room, whatever the others hold."""
    given = problem(34, POSITIONS + 20, dtype=dtype, heads=6, mask="lengths")
    _, keys, values, scale, mask = given
    expected = alone(given)
    for rows in (2, 8, 9, 17, 34):
        assert mx.array_equal(attention(*parts_of_rows(given, slice(rows))), expected[:, :, :rows])
    few = parts_of_rows(given, slice(7))
    hostile = mx.concatenate([mx.full((1, 6, 3, 64), mx.inf), few[0], mx.full((1, 6, 2, 64), mx.nan)], axis=2)
    masks = mx.concatenate([mask[:, :, :3], few[4], mask[:, :, :2]], axis=2)
    beside = attention(hostile.astype(dtype), keys, values, scale, masks)
    assert mx.array_equal(beside[:, :, 3:10], expected[:, :, :7])
    # In a batch with another answer, and in caches of twice the room: what nobody sees is 5 there.
    more, room = 300, [(0, 0), (0, 0), (0, 300), (0, 0)]
    wide = [mx.concatenate([mx.full(a.shape, -2.0, dtype), a]) for a in few[:3]]
    wide[1:] = [mx.pad(array, room, constant_values=5) for array in wide[1:]]
    seen = mx.pad(mx.concatenate([mx.ones_like(few[4]), few[4]]), [(0, 0), (0, 0), (0, 0), (0, more)])
    assert mx.array_equal(attention(*wide, scale, seen)[1:], expected[:, :, :7])


@needs_compiler
@pytest.mark.parametrize("dtype", [mx.float16, pytest.param(mx.float32, marks=pytest.mark.slow)])
def test_a_row_does_not_depend_on_the_others(dtype, metal):
    rows_do_not_depend_on_others(dtype)


@needs_compiler
def test_what_is_infinite_elsewhere_stays_there(metal):
    """Infinite scores of a row are its own affair; one that sees nothing is 0."""
    queries, keys, values, scale, mask = problem(4, 40, dtype=mx.float32, mask="lengths")
    mask[:, :, 2] = False
    found = attention(queries, keys, values, scale, mask)
    assert mx.array_equal(found[:, :, 2], mx.zeros_like(found[:, :, 2]))
    assert relative_difference(found, twin.attention(queries, keys, values, scale, mask)) < 1e-5


@needs_compiler
@pytest.mark.parametrize("aligned", [True, False])
def test_the_kernels_read_their_inputs_where_they_lie(aligned, metal):
    """Parts of larger arrays, with the axes in another order, and also where the last one is not contiguous."""
    rng, (batch, heads, groups, rows, length, size) = np.random.default_rng(1), (2, 4, 2, 3, 20, 64)

    def numbers(*shape):
        return rng.standard_normal(shape).astype(np.float16)

    if aligned:
        queries = numbers(batch, rows, heads, size).swapaxes(1, 2)
        keys, values = (numbers(batch, groups, 32, size)[:, :, :length] for _ in range(2))
    else:
        queries = numbers(batch, heads, size, rows).swapaxes(2, 3)
        keys = numbers(batch, groups, size, 32).swapaxes(2, 3)[:, :, :length]
        values = numbers(batch, groups, 32, size + 1)[:, :, :length, 1:]
    mask = (rng.random((batch, 1, length, rows)) > 0.3).swapaxes(2, 3)
    first, second = passes._kernels()
    found = []

    def strided(*, inputs, **call):
        found.append(first(inputs=[queries, keys, values, inputs[3], mask], **call))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "_kernels", lambda: (strided, second))
        whole = [mx.array(np.ascontiguousarray(array)) for array in (queries, keys, values)]
        result = attention(*whole, 0.25, mx.array(mask.copy()))
    assert len(found) == 1
    assert relative_difference(result, twin.attention(*whole, 0.25, mx.array(mask.copy()))) < CLOSE[mx.float16]


# ---- mistakes

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# Each place where the first pass reads or writes memory, and each limit, one further on.
WIDER = [
    ("start + POSITIONS, length)", "start + POSITIONS, length + 1)"),
    ("start + POSITIONS, length)", "start + POSITIONS + KEYS, length)"),
    ("place < rows * share", "place <= rows * share"),
    ("length - rows + query :", "length - rows + query + 1 :"),
    ("answer * q_strides[0]", "(answer + 1) * q_strides[0]"),
    ("head * q_strides[1]", "(head + 1) * q_strides[1]"),
    ("query * q_strides[2]", "(query + 1) * q_strides[2]"),
    ("(16 * j + 2 * column) * q_strides[3]", "(16 * j + 2 * column + 1) * q_strides[3]"),
    ("j < D / 16; j++)\n  queries", "j < D / 16 + 1; j++)\n  queries"),
    ("first < end;", "first <= end;"),
    ("if (i >= FOURS)", "if (i >= FOURS + 1)"),
    ("n < end) {", "n <= end) {"),
    ("begin + a * threads, n = first", "begin + a * threads + 1, n = first"),
    ("begin + a * threads, n = i", "begin + a * threads + 1, n = i"),
    ("answer * k_strides[0]", "(answer + 1) * k_strides[0]"),
    ("group * k_strides[1]", "(group + 1) * k_strides[1]"),
    ("n * k_strides[2]", "(n + 1) * k_strides[2]"),
    ("d * k_strides[3]", "(d + 1) * k_strides[3]"),
    ("answer * v_strides[0]", "(answer + 1) * v_strides[0]"),
    ("group * v_strides[1]", "(group + 1) * v_strides[1]"),
    ("n * v_strides[2]", "(n + 1) * v_strides[2]"),
    ("d * v_strides[3]", "(d + 1) * v_strides[3]"),
    ("keys[n][d + two]", "keys[n + 1][d + two]"),
    ("keys[n][d + two]", "keys[n][d + two + 1]"),
    ("values[n][d + two]", "values[n + 1][d + two]"),
    ("values[n][d + two]", "values[n][d + two + 1]"),
    ("two < 2", "two < 3"),
    ("keys[8 * t + column][", "keys[8 * t + column + 1]["),
    ("keys[8 * t + column + 1][8 * j + row]", "keys[8 * t + column + 2][8 * j + row]"),
    ("keys[8 * t + column + 1][8 * j + row]", "keys[8 * t + column + 1][8 * j + row + 1]"),
    ("queries[j][i + 2]", "queries[j][i + 1]"),
    ("n <= last", "n < last"),
    ("n <= last", "n <= last + 1"),
    ("answer * mask_strides[0]", "(answer + 1) * mask_strides[0]"),
    ("query * mask_strides[2]", "(query + 1) * mask_strides[2]"),
    ("n * mask_strides[3]", "(n + 1) * mask_strides[3]"),
    ("top = max(top, simd_shuffle_xor(top, 1));", ""),
    ("top = max(top, simd_shuffle_xor(top, 8));", ""),
    ("weight += simd_shuffle_xor(weight, 1);", ""),
    ("weight += simd_shuffle_xor(weight, 8);", ""),
    ("values[8 * t + row]", "values[8 * t + row + 1]"),
    ("[4 * d + column / 2]", "[4 * d + column / 2 + 1]"),
    ("+ query) * heads", "+ query + 1) * heads"),
    ("heads + head) * splits", "heads + head + 1) * splits"),
    ("* splits + split;", "* splits + split + 1;"),
    ("marks[2 * at] =", "marks[2 * at + 1] ="),
    ("marks[2 * at + 1] =", "marks[2 * at + 2] ="),
    ("sums[at * D + 8 * d + column]", "sums[at * D + 8 * d + column + 1]"),
    ("sums[at * D + 8 * d + column + 1]", "sums[at * D + 8 * d + column + 2]"),
]
# Of the second pass.
WIDER_PARTS = [
    ("split < splits", "split < splits + 1"),
    ("row * splits + split", "row * splits + split + 1"),
    ("marks[2 * at])", "marks[2 * at + 2])"),
    ("exp2(marks[2 * at]", "exp2(marks[2 * at + 2]"),
    ("marks[2 * at + 1]", "marks[2 * at + 2]"),
    ("sums[at * D + i % D]", "sums[at * D + i % D + 1]"),
    ("out[i]", "out[i + 1]"),
]


def barriers():
    """The first pass without one of its barriers, or with one for the wrong memory."""
    text = source("rows_attention/first_pass.metal")
    places = [found.start() for found in re.finditer(re.escape(BARRIER), text)]
    assert len(places) == 2
    return [
        text[:place] + instead + text[place + len(BARRIER) :]
        for place in places
        for instead in ("", BARRIER.replace("threadgroup)", "device)"))
    ]


def is_wrong(metal):
    """Whether a check or another result shows a mistake; rows, positions and parts do not fill their tiles."""
    metal.checked = True
    tried = (
        (5, 100, {"mask": "tree", "batch": 2}),
        (7, 100, {"mask": "causal"}),
        (2, POSITIONS + 30, {"mask": "none"}),
    )
    try:
        return any(not difference(*given, heads=6, **options) < CLOSE[mx.float16] for *given, options in tried)
    except KernelError:
        return True


@needs_compiler
@pytest.mark.parametrize("text", barriers(), ids=["first", "first, device", "second", "second, device"])
def test_each_barrier_that_is_missing_is_caught(text, metal, monkeypatch):
    use_source(metal, text, monkeypatch)
    assert is_wrong(metal)


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(("old", "new"), WIDER)
def test_an_index_that_is_wrong_is_caught(old, new, metal, monkeypatch):
    text = source("rows_attention/first_pass.metal")
    assert text.count(old) == 1
    use_source(metal, text.replace(old, new), monkeypatch)
    assert is_wrong(metal)


@needs_compiler
@pytest.mark.parametrize(("old", "new"), WIDER_PARTS)
def test_an_index_that_is_wrong_in_the_second_pass_is_caught(old, new, metal, monkeypatch):
    second = source("rows_attention/second_pass.metal")
    assert second.count(old) == 1
    use_source(metal, source("rows_attention/first_pass.metal"), monkeypatch, second.replace(old, new))
    assert is_wrong(metal)


def test_every_index_is_tried():
    """Each stride and each place in threadgroup memory and in outputs has a change of its own above."""
    text = re.sub(r"//.*", "", source("rows_attention/first_pass.metal"))
    tried = " ".join(old for old, _ in WIDER)
    for stride in re.findall(r"\w_strides\[\d\]\)?(?= \+| \* \d|,|\])", text):
        assert stride.rstrip(")") in tried
    for array, count in (("keys[", 3), ("values[", 2), ("marks[", 2), ("sums[", 2)):
        assert len(re.findall(rf"(?<!\w){re.escape(array)}(?!KEYS)", text)) == count
        assert len({old for old, _ in WIDER if old.startswith(array)}) == count


@lint.needs_clang
@pytest.mark.parametrize("length", [5, 100])
def test_pointers_have_the_right_address_space(length):
    queries, keys, values, _, mask = problem(1, length)
    template = [("T", mx.float16), ("D", 64), ("KEYS", 64), ("POSITIONS", 256), ("CAUSAL", 1), ("MASK", 2)]
    inputs = [queries, keys, values, mx.zeros((2,)), mask]
    first, second = passes._first(), passes._second()
    assert lint.errors(**first, inputs=inputs, output_dtypes=[mx.float32] * 2, template=template) == ""
    inputs = [mx.zeros((1, 1, 4, 1, 64)), mx.zeros((1, 1, 4, 1, 2))]
    assert lint.errors(**second, inputs=inputs, output_dtypes=[mx.float16], template=template[:2]) == ""


def test_what_fits():
    def fits(heads=4, groups=2, head_dim=64, value_dim=64, dtype=mx.float16):
        shapes = (heads, 3, head_dim), (groups, 9, head_dim), (groups, 9, value_dim)
        return made_for(*(mx.zeros((1, *shape), dtype) for shape in shapes))

    assert fits()
    assert fits(dtype=mx.float32)
    for change in ({"heads": 5}, {"head_dim": 72, "value_dim": 72}, {"value_dim": 80}, {"dtype": mx.int32}):
        assert not fits(**change)


def test_rows_are_divided_evenly_and_no_more_than_fit():
    for rows in range(1, MOST_ROWS * 16):
        tiles, threads = passes._division(rows)
        assert threads % 32 == 0
        assert 32 <= threads <= 256
        assert (tiles - 1) * threads // 4 < rows <= tiles * threads // 4


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim"), KINDS)
def test_on_a_gpu(dtype, head_dim):
    """The real compiler and the real device: right, and a row by itself is what it is among others."""
    if backend().kind != "metal":
        pytest.skip("not a Mac")
    for mask in MASKS:
        for rows, length, heads in ((2, 300, 8), (16, 1033, 6), (33, 65, 2), (64, 2100, 16)):
            found = difference(rows, length, head_dim=head_dim, dtype=dtype, heads=heads, mask=mask)
            assert found < CLOSE[dtype]
    given = problem(32, 1100, head_dim=head_dim, dtype=dtype, heads=8, mask="lengths")
    together = attention(*given)
    for rows in (1, 2, 8, 9, 16, 17):
        assert mx.array_equal(attention(*parts_of_rows(given, slice(rows))), together[:, :, :rows])
