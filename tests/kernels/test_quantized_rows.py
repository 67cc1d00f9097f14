"""A few rows times a quantized matrix: the kernels compute what their twin does, in emulators of Metal and CUDA."""

import json
import re
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from kernels.cuda_on_cpu import CudaKernel, kernels_folder
from metal import emulator, lint
from metal.emulator import Emulator, KernelError, needs_compiler
from tiny import drafted_tokens, mostly_slow, plain_tokens, tiny_drafter, tiny_target

from dflash_mlx import runtime
from dflash_mlx.kernels.quantized_rows import layers, product, twin
from dflash_mlx.kernels.quantized_rows.product import Matrix, fits, multiply, tiles
from dflash_mlx.kernels.race import ROWS
from dflash_mlx.kernels.sources import source
from dflash_mlx.policy.width import FixedWidth
from dflash_mlx.rounding import relative_difference
from dflash_mlx.targets.target import wrap_model

KINDS = [(bits, group, dtype) for bits in (4, 8) for group in (32, 64, 128) for dtype in (mx.float16, mx.bfloat16)]
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
# Weights are rounded to the type of x on CUDA only.
METAL, CUDA = {mx.float16: 5e-4, mx.bfloat16: 3e-3}, {mx.float16: 1e-3, mx.bfloat16: 6e-3}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return emulator.shared_folder(tmp_path_factory)


@pytest.fixture
def metal(folder, monkeypatch):
    """Has the Metal kernel run in an emulator, which is given back."""
    used = Emulator(folder)
    use_source(used, source("quantized_rows/kernel.metal"), monkeypatch)
    return used


@pytest.fixture
def cuda(tmp_path_factory, monkeypatch):
    """Has the CUDA kernel run on the CPU."""
    folder = kernels_folder(tmp_path_factory)
    kernel = CudaKernel(folder, **product._NAMES, source=source("quantized_rows/kernel.cu"))
    monkeypatch.setattr(product, "_cuda_kernel", lambda: kernel)
    machine = replace(runtime.backend(), kind="cuda")
    monkeypatch.setattr(product, "backend", lambda: machine)


def use_source(emulator, text, monkeypatch):
    kernel = emulator.metal_kernel(**product._NAMES, source=text)
    monkeypatch.setattr(product, "_metal_kernel", lambda: kernel)


def problem(rows, columns, depth, bits, group_size, dtype):
    """x, and the matrix as mx.quantize makes it; numbers that repeat."""
    mx.random.seed(rows + columns)
    x, wide = (mx.random.normal((n, depth)).astype(dtype) for n in (rows, columns))
    return x, mx.quantize(wide, group_size=group_size, bits=bits), {"group_size": group_size, "bits": bits}


def difference(rows, columns, depth, bits, group_size, dtype):
    x, matrix, options = problem(rows, columns, depth, bits, group_size, dtype)
    found, expected = multiply(x, *matrix, **options), twin.product(x, *matrix, **options)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    return relative_difference(found, expected)


@pytest.mark.parametrize(("bits", "group", "dtype"), KINDS)
def test_the_twin_is_mlxs_product(bits, group, dtype):
    x, matrix, options = problem(5, 24, 256, bits, group, dtype)
    wide = [part.astype(mx.float32) for part in matrix[1:]]
    expected = mx.quantized_matmul(x.astype(mx.float32), matrix[0], *wide, transpose=True, **options)
    assert relative_difference(twin.product(x, *matrix, **options), expected) < METAL[dtype]


@needs_compiler
@pytest.mark.parametrize(("bits", "group", "dtype"), KINDS)
def test_every_kind_of_matrix(bits, group, dtype, metal):
    """Depths and columns that fill tiles and blocks, and that do not; rows of one and two tiles and of two passes."""
    metal.order = "random"
    for seed, rows in enumerate((3, 16)):
        metal.seed, metal.checked = seed, rows == 3
        assert difference(rows, 20, 3 * 128, bits, group, dtype) < METAL[dtype]
    assert difference(23, 20, 384, bits, group, dtype) < METAL[dtype]


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize(("bits", "group", "dtype"), KINDS)
def test_every_kind_of_matrix_in_many_schedules(bits, group, dtype, metal):
    metal.checked, metal.order = True, "random"
    for metal.seed, rows in enumerate(range(2, 33, 3)):
        for columns, depth in ((8, 128), (20, 896), (72, 1152), (4100, 128)):
            assert difference(rows, columns, depth, bits, group, dtype) < METAL[dtype]


@needs_compiler
@pytest.mark.parametrize("rows", range(2, 33))
def test_every_number_of_rows(rows, metal):
    assert difference(rows, 24, 352, 4, 32, mx.bfloat16) < METAL[mx.bfloat16]


@needs_compiler
@pytest.mark.parametrize(("bits", "columns", "depth"), [(4, 8, 32), (8, 17, 96), (4, 4100, 64)])
def test_matrices_smaller_and_wider_than_a_tile(bits, columns, depth, metal):
    """4 threadgroups' worth of columns, none, and so many that tiles are wider."""
    metal.checked = columns < 4000
    assert difference(9, columns, depth, bits, 32, mx.float16) < METAL[mx.float16]


@needs_compiler
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("rows", [7, 14, 21])
def test_nothing_is_left_to_chance(rows, order, metal):
    """Whatever thread goes first: no race, no access out of bounds, and the same numbers."""
    x, matrix, options = problem(rows, 20, 1056, 4, 32, mx.float16)
    first = multiply(x, *matrix, **options)
    for seed in range(3):
        metal.checked, metal.order, metal.seed = True, order, seed
        assert mx.array_equal(multiply(x, *matrix, **options), first)


@needs_compiler
@pytest.mark.parametrize(("bits", "columns"), [(4, 40), (8, 40), (4, 4128)])
@pytest.mark.parametrize("rows", [2, 8, 9, 16])
def test_weights_are_read_once_for_all_rows(bits, columns, rows, metal):
    """And each matrix operation has eight rows' worth of new work."""
    depth = 256
    x, (weight, scales, biases), options = problem(rows, columns, depth, bits, 64, mx.bfloat16)
    metal.checked = True
    multiply(x, weight, scales, biases, **options)
    counts = metal.counts
    assert counts.read["w"] == counts.fetched["w"] == weight.nbytes
    assert counts.fetched["scales"] == scales.nbytes
    assert counts.fetched["biases"] == biases.nbytes
    assert counts.written["y"] == rows * columns * 2
    wide = tiles(rows, columns, depth, bits).columns
    assert counts.fetched["x"] == x.nbytes * -(-columns // (8 * wide))
    padded = -(-columns // (8 * wide)) * wide
    assert counts.matrix_operations == -(-rows // 8) * padded * depth // 8
    assert counts.threadgroup_bytes <= 16384


@needs_compiler
def test_a_row_does_not_depend_on_the_others(metal, monkeypatch):
    """Bit for bit: alone or with others, in any place, whatever they hold, up to infinity."""
    for columns, depth, bits, dtype in ((24, 1056, 4, mx.float16), (40, 512, 8, mx.bfloat16)):
        x, matrix, options = problem(32, columns, depth, bits, 32, dtype)
        alone = mx.concatenate([multiply(x[i : i + 1], *matrix, **options) for i in range(32)])
        for rows in (2, 8, 9, 16, 17, 32):
            assert mx.array_equal(multiply(x[:rows], *matrix, **options), alone[:rows])
        hostile = mx.concatenate([mx.full((3, depth), mx.inf), x[:7], mx.full((2, depth), mx.nan)]).astype(dtype)
        assert mx.array_equal(multiply(hostile, *matrix, **options)[3:10], alone[:7])


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# Each place where a kernel reads or writes memory, and each limit, one further on; (line, what to change, into what).
WIDER = [
    ("w + weight / IN_WORD", "w + weight / IN_WORD + 4"),
    ("scales[weight / GROUP]", "scales[weight / GROUP + 1]"),
    ("biases[weight / GROUP]", "biases[weight / GROUP + 1]"),
    ("x + ulong(m) * depth + k + 4 * four", "x + ulong(m) * depth + k + 4 * four + 4"),
    ("(packed[tile][i][word] >> (BITS * s))", "(packed[tile][i][word] >> (BITS * (s + 1)))"),
    ("n < columns && at < depth", "n <= columns && at < depth"),
    ("n < columns && at < depth", "n < columns && at <= depth"),
    ("m < rows && k < depth", "m <= rows && k < depth"),
    ("m < rows && k < depth", "m < rows && k <= depth"),
    ("m < rows && n < columns", "m <= rows && n < columns"),
    ("m < rows && n < columns", "m < rows && n <= columns"),
    ("start < depth", "start <= depth"),
    ("for (int word = 0; word < 4", "for (int word = 0; word < 5"),
    ("for (int s = 0; s < IN_WORD", "for (int s = 0; s < IN_WORD + 1"),
    ("four < IN_WORD / 4", "four < IN_WORD / 4 + 1"),
    ("partial[part][8 * r + row][8 * tile + column] ", "partial[part][8 * r + row][8 * tile + column + 1] "),
    ("[8 * tile + column + 1] =", "[8 * tile + column + 2] ="),
    ("partial[part][8 * r + row][8 * tile + column] ", "partial[part + 1][8 * r + row][8 * tile + column] "),
    ("partial[part][8 * r + row][8 * tile + column] ", "partial[part][8 * r + row + 1][8 * tile + column] "),
    ("sum += partial[p][i / COLUMNS][i % COLUMNS]", "sum += partial[p + 1][i / COLUMNS][i % COLUMNS]"),
    ("sum += partial[p][i / COLUMNS][i % COLUMNS]", "sum += partial[p][i / COLUMNS][i % COLUMNS + 1]"),
    ("p < SPLIT", "p < SPLIT + 1"),
    ("i < ROWS * COLUMNS", "i < ROWS * COLUMNS + 1"),
    ("y[ulong(m) * columns + n]", "y[ulong(m) * columns + n + 1]"),
]


def changes():
    assert source("quantized_rows/kernel.metal").count(BARRIER) == 1
    return [(BARRIER, ""), (BARRIER, BARRIER.replace("threadgroup)", "device)")), *WIDER]


@needs_compiler
@pytest.mark.parametrize(("old", "new"), changes())
def test_a_kernel_that_is_wrong_is_caught(old, new, metal, monkeypatch):
    """Without its barrier, or with any one index or limit one further on: by a check, or by another result.

    `start <= depth` alone is harmless: what lies beyond the depth counts as zero.
    """
    text = source("quantized_rows/kernel.metal")
    assert text.count(old) == 1
    use_source(metal, text.replace(old, new), monkeypatch)
    metal.checked = True
    try:
        # Neither rows nor columns nor depth fill their tiles.
        wrong = not difference(5, 20, 352, 4, 32, mx.float16) < METAL[mx.float16]
    except KernelError:
        wrong = True
    assert wrong == (old != "start < depth")


def test_every_index_is_tried():
    """All that stands in brackets behind an array in memory has a change of its own above."""
    text = re.sub(r"//.*", "", source("quantized_rows/kernel.metal"))
    tried = " ".join(old for old, _ in WIDER)
    for array in ("w +", "x +", "scales[", "biases[", "y["):
        assert len(re.findall(rf"(?<!\w){re.escape(array)}", text)) == tried.count(array) == 1
    assert text.count("partial[p") == 3  # two writes and a read


@lint.needs_clang
@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("bits", [4, 8])
def test_pointers_have_the_right_address_space(rows, bits):
    x, matrix, _ = problem(5, 24, 256, bits, 64, mx.float16)
    template = [("T", mx.float16), ("BITS", bits), ("GROUP", 64), ("ROWS", rows), ("TILES", 2), ("SPLIT", 2)]
    kernel = product._NAMES | {"source": source("quantized_rows/kernel.metal")}
    assert lint.errors(**kernel, inputs=[x, *matrix], output_dtypes=[mx.float16], template=template) == ""


@needs_compiler
@pytest.mark.parametrize(("bits", "group", "dtype"), mostly_slow(KINDS, KINDS[2], KINDS[9]))
def test_every_kind_of_matrix_on_cuda(bits, group, dtype, cuda):
    for rows in (3, 23):
        assert difference(rows, 20, 384, bits, group, dtype) < CUDA[dtype]


@needs_compiler
def test_a_row_does_not_depend_on_the_others_on_cuda(cuda):
    x, matrix, options = problem(20, 24, 352, 4, 32, mx.float16)
    together = multiply(x, *matrix, **options)
    assert mx.array_equal(mx.concatenate([multiply(x[i : i + 1], *matrix, **options) for i in range(20)]), together)


def test_the_sources_of_kernels_are_packaged():
    """Each file beside the code is of a kind that pyproject.toml has installed."""
    text, kernels = PYPROJECT.read_text(), Path(product.__file__).parents[1]
    for folder in (kernels, kernels / "quantized_rows", kernels / "rows_attention"):
        package = re.escape(".".join(folder.relative_to(kernels.parents[1]).parts))
        [line] = re.findall(rf'^"{package}" = (.*)$', text, re.MULTILINE)
        kinds = {path.suffix for path in folder.iterdir() if path.is_file()} - {".py"}
        assert kinds == {kind.removeprefix("*") for kind in json.loads(line)}


def test_what_fits():
    good = Matrix(24, 256, 4, 64, mx.float16)
    assert fits(good)
    for change in ({"bits": 3}, {"group_size": 16}, {"dtype": mx.float32}, {"columns": 1}):
        assert not fits(good._replace(**change))


def test_the_division_of_a_product_does_not_depend_on_its_rows():
    for kind in ("metal", "cuda"):
        with pytest.MonkeyPatch.context() as patch:
            machine = replace(runtime.backend(), kind=kind)
            patch.setattr(product, "backend", lambda machine=machine: machine)
            for columns, depth in ((8, 32), (1024, 896), (4096, 4096), (151936, 1536)):
                found = {tiles(rows, columns, depth, 4)[1:] for rows in range(1, 33)}
                assert len(found) == 1


# ---- in models


def quantized_pair(dtype=mx.float16, bits=4, **changes):
    target = tiny_target("qwen3", num_hidden_layers=2, **changes)
    drafter = tiny_drafter(taps=(0, 1), num_target_layers=2, intermediate_size=64)
    for model in (target.model, drafter):
        nn.quantize(model, group_size=32, bits=bits)
        model.set_dtype(dtype)
    return wrap_model(target.model, target.config), drafter


def used_by(models, head):
    return [layer for found in layers.matrices(models, head=head).values() for layer in found]


def certain(target, prompt, tokens):
    """How many of these tokens come before one that rounding could change: float16 moves these logits by up to 0.03."""
    logits = target.forward(mx.array([prompt + tokens]), target.make_cache())[0, len(prompt) - 1 : -1]
    best = mx.sort(logits.astype(mx.float32), axis=-1)
    gaps = (best[:, -1] - best[:, -2]).tolist()
    return next((i for i, gap in enumerate(gaps) if gap < 0.06), len(tokens))


@needs_compiler
@pytest.mark.parametrize(("bits", "prompt"), [(4, [5, 11, 7, 2, 9, 30]), (8, [24, 26, 2, 16, 32])])
def test_a_model_decodes_the_same_tokens(bits, prompt, metal, monkeypatch):
    """Two layers, a tied head, and a drafter, with every product of 2 to 32 rows through the kernel."""
    target, drafter = quantized_pair(bits=bits)
    names, tokens = target.parameter_names(), mx.array([prompt])
    expected, logits = plain_tokens(target, prompt, 12), target.forward(tokens, target.make_cache())
    safe = certain(target, prompt, expected)
    assert safe == 12
    chosen = used_by([target.model, drafter], target.head_module)
    assert len(chosen) == 2 * 7 + 2 * 7 + 2
    layers.use(chosen, (False, False) + (True,) * 31)
    monkeypatch.setattr(mx, "quantized_matmul", only_single_rows(mx.quantized_matmul))
    assert relative_difference(target.forward(tokens, target.make_cache()), logits) < 0.01
    assert drafted_tokens(target, drafter, prompt, 12, policy=FixedWidth(5)) == expected
    assert target.parameter_names() == names
    monkeypatch.undo()
    layers.use(chosen, ())
    assert {type(layer) for layer in chosen} == {nn.QuantizedLinear, nn.QuantizedEmbedding}
    assert mx.array_equal(target.forward(tokens, target.make_cache()), logits)


def only_single_rows(product):
    def checked(x, *matrix, **options):
        assert x.size == x.shape[-1]
        return product(x, *matrix, **options)

    return checked


@needs_compiler
def test_numbers_of_rows_that_lost_are_left_to_mlx(metal, monkeypatch):
    target, _ = quantized_pair()
    asked = []
    monkeypatch.setattr(
        layers, "multiply", lambda x, *_, **__: asked.append(x.size // x.shape[-1]) or multiply(x, *_, **__)
    )
    chosen = used_by([target.model], target.head_module)
    layers.use(chosen, (False, False, False, True, False, True))
    for rows in range(1, 8):
        target.forward(mx.arange(rows)[None], target.make_cache())
    assert set(asked) == {3, 5}


def test_layers_of_other_kinds_are_left_alone():
    target, _ = quantized_pair(tie_word_embeddings=False)
    found = layers.matrices([target.model], head=target.head_module)
    kinds = {type(layer) for of_one in found.values() for layer in of_one}
    assert kinds == {nn.QuantizedLinear}
    assert layers.matrices([tiny_target("qwen3").model]) == {}
    other = nn.QuantizedLinear(64, 64, group_size=32, bits=4, mode="mxfp4")
    assert layers.matrices([other]) == {}


# ---- the race


@pytest.fixture
def raced(monkeypatch, tmp_path):
    """Races that take no time: what the kernel takes, and MLX's own operation, by rows; and how many were run."""
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path))
    runs = []

    def race_matrix(matrix, weights):
        runs.append(matrix)
        return layers.Verdict({rows: (1.0, 0.5 if rows > 4 else 2.0) for rows in ROWS}, "")

    monkeypatch.setattr(layers, "race_matrix", race_matrix)
    return runs


def test_a_race_is_run_once_for_each_kind_of_matrix(raced):
    target, drafter = quantized_pair()
    reports = []
    for _ in range(2):
        used, notes = layers.use_where_faster(
            [target.model, drafter], head=target.head_module, report=lambda *report: reports.append(report)
        )
    assert len(raced) == len(set(raced)) == len(reports) > 3
    assert notes == []
    assert "32x32 4-bit, groups of 32, float16: 6,7,8" in used
    layer = target.layers[0].self_attn.o_proj
    assert [rows for rows, on in enumerate(layer.__dict__[layers._STATE]) if on] == list(range(6, 33))


def test_a_kernel_that_lost_is_not_used(raced, monkeypatch):
    target, _ = quantized_pair()
    lost = layers.Verdict({2: (1.0, 0.96)}, "4 rows differ")
    monkeypatch.setattr(layers, "race_matrix", lambda *_: lost)
    used, notes = layers.use_where_faster([target.model], head=target.head_module)
    assert used == ""
    others = len(layers.matrices([target.model], head=target.head_module)) - 1
    assert [note.endswith(f" and {others} more: 4 rows differ") for note in notes] == [True]
    assert type(target.layers[0].self_attn.o_proj) is nn.QuantizedLinear


@needs_compiler
def test_the_race_itself_runs(metal):
    matrix = Matrix(24, 64, 4, 32, mx.bfloat16)
    verdict = layers.race_matrix(matrix, [layers.random_weights(matrix, seed) for seed in range(2)])
    assert verdict.note == ""
    assert set(verdict.seconds) == set(ROWS)
    assert not any(verdict.used_for())


@pytest.mark.gpu
@pytest.mark.parametrize(("bits", "group", "dtype"), KINDS)
def test_on_a_gpu(bits, group, dtype):
    """The real compiler and the real device: right, and a row by itself is what it is among others."""
    for rows, columns, depth in ((2, 40, 384), (8, 1024, 1024), (13, 4100, 896), (16, 24, 4096), (31, 40, 1152)):
        assert difference(rows, columns, depth, bits, group, dtype) < CUDA[dtype]
    x, matrix, options = problem(32, 72, 1152, bits, group, dtype)
    together = multiply(x, *matrix, **options)
    for rows in (1, 2, 8, 9, 16, 17):
        assert mx.array_equal(multiply(x[:rows], *matrix, **options), together[:rows])
