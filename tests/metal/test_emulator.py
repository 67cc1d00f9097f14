"""The emulator computes what Metal would, and finds what a kernel must not do."""

import importlib
import os
import re
import sys
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from metal import emulator, lint
from metal.emulator import Emulator, KernelError, needs_compiler

pytestmark = needs_compiler
WAYS = [(False, "forward", 0), (False, "reverse", 0), (False, "random", 1), (True, "random", 2)]
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

# Sums of 256 numbers: a tree in a threadgroup's memory.
TREE = f"""
    threadgroup float held[256];
    const uint i = thread_index_in_threadgroup;
    held[i] = a[thread_position_in_grid.x];
    {BARRIER}
    for (uint step = 128; step > 0; step /= 2) {{
      if (i < step) held[i] += held[i + step];
      {BARRIER}
    }}
    if (i == 0) out[threadgroup_position_in_grid.x] = held[0];
"""
# A product in tiles of 16 x 16; the second barrier keeps a tile until all have read it.
TILES = f"""
    threadgroup float left[16][16];
    threadgroup float right[16][16];
    const uint r = thread_position_in_threadgroup.y, c = thread_position_in_threadgroup.x;
    const uint row = thread_position_in_grid.y, column = thread_position_in_grid.x;
    float sum = 0.0;
    for (int k = 0; k < K; k += 16) {{
      left[r][c] = a[row * K + k + c];
      right[r][c] = b[(k + r) * N + column];
      {BARRIER}
      for (int i = 0; i < 16; i++) sum += left[r][i] * right[i][c];
      {BARRIER}
    }}
    out[row * N + column] = sum;
"""
# One simdgroup multiplies 8 x 8 matrices by way of a threadgroup's memory.
MATRICES = """
    threadgroup float held[64];
    const uint lane = thread_index_in_simdgroup;
    simdgroup_matrix<float, 8, 8> left, right, sum = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
    held[lane] = b[lane];
    held[lane + 32] = b[lane + 32];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(left, a, 8);
    simdgroup_load(right, held, 8);
    simdgroup_multiply_accumulate(sum, left, right, sum);
    simdgroup_store(sum, out, 8);
"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return emulator.shared_folder(tmp_path_factory)


def run(emulator, source, inputs, shapes, grid, threadgroup, *, template=(), dtype=mx.float32):
    names = [chr(ord("a") + i) for i in range(len(inputs))]
    outputs = ["out"] if len(shapes) == 1 else [f"out{i}" for i in range(len(shapes))]
    kernel = emulator.metal_kernel(name="tried", input_names=names, output_names=outputs, source=source)
    return kernel(
        inputs=inputs,
        template=template,
        output_shapes=shapes,
        output_dtypes=[dtype] * len(shapes),
        grid=grid,
        threadgroup=threadgroup,
    )


def tree(emulator, source=TREE):
    a = mx.random.randint(-9, 9, (1024,)).astype(mx.float32)
    [out] = run(emulator, source, [a], [(4,)], (1024, 1, 1), (256, 1, 1))
    return mx.array_equal(out, a.reshape(4, 256).sum(axis=1))


def tiles(emulator, source=TILES):
    a, b = (mx.random.randint(-9, 9, shape).astype(mx.float32) for shape in ((32, 48), (48, 16)))
    [out] = run(emulator, source, [a, b], [(32, 16)], (16, 32, 1), (16, 16, 1), template=[("K", 48), ("N", 16)])
    return mx.array_equal(out, a @ b)


def matrices(emulator, source=MATRICES):
    a, b = (mx.random.randint(-9, 9, (8, 8)).astype(mx.float32) for _ in "ab")
    [out] = run(emulator, source, [a, b], [(8, 8)], (32, 1, 1), (32, 1, 1))
    return mx.array_equal(out, a @ b + 0.5)


@pytest.mark.parametrize(("checked", "order", "seed"), WAYS)
@pytest.mark.parametrize("kernel", [tree, tiles, matrices])
def test_kernels_compute_what_they_should(folder, kernel, checked, order, seed):
    assert kernel(Emulator(folder, checked=checked, order=order, seed=seed))


def test_what_is_counted(folder):
    checked = Emulator(folder, checked=True)
    tiles(checked)
    counts = checked.counts
    assert counts.threadgroup_barriers == 2 * 2 * 3
    assert counts.threadgroup_bytes == 2 * 16 * 16 * 4
    # Each of two threadgroups reads its rows of `a` once and all of `b`.
    assert counts.fetched["a"] == counts.read["a"] == 32 * 48 * 4
    assert counts.fetched["b"] == counts.read["b"] == 2 * 48 * 16 * 4
    assert counts.written["out"] == 32 * 16 * 4
    matrices(checked)
    assert checked.counts.matrix_operations == 1


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize(
    ("kernel", "source", "barrier"),
    [
        (tree, TREE, BARRIER),
        (tiles, TILES, BARRIER),
        (matrices, MATRICES, "simdgroup_barrier(mem_flags::mem_threadgroup);"),
    ],
)
def test_each_barrier_that_is_missing_is_found(folder, kernel, source, barrier, order):
    """In any order of threads, also where the result is right; and one for the wrong memory is as good as none."""
    for found in re.finditer(re.escape(barrier), source):
        for instead in ("", barrier.replace("mem_threadgroup", "mem_device")):
            changed = source[: found.start()] + instead + source[found.end() :]
            with pytest.raises(KernelError, match=r"race|before anything was written"):
                kernel(Emulator(folder, checked=True, order=order), changed)


@pytest.mark.parametrize(
    ("what", "source"),
    [
        ("read out of bounds: 4 bytes at byte 400 of 400 of a, .*line 5", "out[i] = a[i + 1];"),
        ("read out of bounds: 4 bytes at byte -4", "out[i] = a[int(i) - 1];"),
        ("write out of bounds: 4 bytes at byte 400 of 400 of out", "out[i] = a[i]; out[i + 1] = 0;"),
        ("index 40 is out of an array's bounds", "threadgroup float t[40]; t[i % 41] = 1; out[i] = a[i];"),
        ("index 4 is out of an array's bounds", "float t[4]; for (int j = 0; j <= i; j++) t[j] = 1; out[i] = t[0];"),
        ("shifted by 32 bits", "out[i] = (1u << min(i, 32u)) + a[i];"),
        ("never written: byte 28 of 400 of out", "if (i != 7) out[i] = a[i];"),
        ("read before anything was written", "out[i] += a[i];"),
        ("race", "out[i / 2] = a[i]; if (i >= 50) out[i] = a[i];"),
        ("went different ways", f"if (i % 50 < 40) {BARRIER} out[i] = a[i];"),
        ("20 threads exchange values", "float v = a[i]; if (i % 50 < 20) v = simd_sum(v); out[i] = v;"),
        ("lane that does not exist", "out[i] = simd_shuffle(a[i], 20);"),
        ("write to an input", "const_cast<float*>(a)[i] = 1; out[i] = 1;"),
        ("more than 32768 bytes", "threadgroup float t[9000]; t[i] = 1; out[i] = t[i];"),
        ("does not compile", "out[i] = bfloat(1) + undeclared;"),
    ],
)
def test_what_a_kernel_must_not_do_is_found(folder, what, source):
    source = f"const uint i = thread_position_in_grid.x; {source}"
    with pytest.raises(KernelError, match=what):
        run(Emulator(folder, checked=True), source, [mx.ones((100,))], [(100,)], (100, 1, 1), (50, 1, 1))


def test_lanes_exchange_values(folder):
    source = """
        const uint i = thread_position_in_grid.x, lane = thread_index_in_simdgroup;
        const float v = a[i];
        out0[i] = simd_sum(v);
        out1[i] = simd_max(v) - simd_min(v);
        out2[i] = simd_shuffle_xor(v, 5);
        out3[i] = simd_shuffle(v, (lane * 7) % 32) + simd_broadcast(v, 3);
        out4[i] = simd_shuffle_down(v, 2);
    """
    a = np.random.default_rng(0).integers(-9, 9, (2, 32)).astype(np.float32)
    lanes = np.arange(32)
    found = run(Emulator(folder, order="random"), source, [mx.array(a)], [(2, 32)] * 5, (64, 1, 1), (64, 1, 1))
    expected = [
        np.broadcast_to(a.sum(1, keepdims=True), a.shape),
        np.broadcast_to(a.max(1, keepdims=True) - a.min(1, keepdims=True), a.shape),
        a[:, lanes ^ 5],
        a[:, lanes * 7 % 32] + a[:, 3:4],
        a[:, np.where(lanes < 30, lanes + 2, lanes)],
    ]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.array(ours), theirs)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_short_numbers_round_as_in_mlx(folder, dtype):
    """All of them, there and back; and numbers between two of them."""
    every = mx.arange(65536).astype(mx.uint16).view(dtype)
    every = mx.where(mx.isnan(every), mx.zeros_like(every), every)
    wide = mx.concatenate([mx.random.normal((4096,)) * scale for scale in (1e-7, 1e-4, 1.0, 1e4, 1e5)])
    copy = "const uint i = thread_position_in_grid.x; out[i] = static_cast<T>(static_cast<float>(a[i]));"
    for given in (every, wide):
        n = given.size
        [found] = run(
            Emulator(folder), copy, [given], [(n,)], (n, 1, 1), (64, 1, 1), template=[("T", dtype)], dtype=dtype
        )
        assert mx.array_equal(found, given.astype(dtype))


# ---- the text around a kernel's body is MLX's own


def text_of_mlx(kernel, call):
    """What the installed MLX generates. While a function is exported nothing is run, so no Mac is needed."""
    made = mx.fast.metal_kernel(**kernel)
    inputs = call.pop("inputs")
    sys.stdout.flush()
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryDirectory() as written:
        stdout = os.dup(1)
        os.dup2(printed.fileno(), 1)
        try:
            path = str(Path(written) / "exported")
            mx.export_function(path, lambda *arrays: made(inputs=list(arrays), verbose=True, **call), *inputs)
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        printed.seek(0)
        text = printed.read().decode()
    return text.split("```\n", 1)[1].rsplit("\n```", 1)[0]


@pytest.mark.parametrize("template", [[], [("T", mx.bfloat16), ("N", 300), ("EVEN", True)]])
def test_the_text_is_that_of_mlx(template):
    """Address spaces of short inputs, shapes, strides, the order of what is asked about threads, templates, names."""
    source = """
        const uint lane = thread_index_in_simdgroup + simdgroup_index_in_threadgroup;
        out[thread_position_in_grid.x] = a[lane * a_strides[1]] + b[a_shape[0]] + c + threadgroup_position_in_grid.y;
        more[thread_index_in_threadgroup] = thread_position_in_threadgroup.z + threads_per_threadgroup.x;
    """
    kernel = {"name": "drift", "input_names": ["a", "b", "c"], "output_names": ["out", "more"]}
    inputs = [mx.zeros((5, 300), mx.bfloat16), mx.zeros((4,)), mx.array(1.0)]
    dtypes = [mx.float16, mx.uint32]
    call = {"template": template, "grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,), (64,)]}
    header = "#define ANY 1\n"
    ours = emulator.metal_text("drift", ["a", "b", "c"], ["out", "more"], source, header, inputs, dtypes, template)
    whole = {**kernel, "source": source, "header": header}
    assert ours == text_of_mlx(whole, {**call, "inputs": inputs, "output_dtypes": dtypes})


# ---- kernels of mlx-lm, against plain operations


@pytest.fixture
def load(folder, monkeypatch):
    """Imports a module of mlx-lm anew, with its kernels made by an emulator."""

    def load(name, emulator):
        monkeypatch.setattr(mx.fast, "metal_kernel", emulator.metal_kernel)
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        spec = importlib.util.find_spec(name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize(("checked", "order", "seed"), WAYS[2:])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_recurrent_kernel_of_mlx_lm(folder, load, checked, order, seed, dtype):
    emulator = Emulator(folder, checked=checked, order=order, seed=seed)
    module = load("mlx_lm.models.gated_delta", emulator)
    mx.random.seed(0)
    shapes = [(1, 3, 1, 64), (1, 3, 1, 64), (1, 3, 2, 8)]
    q, k, v = (mx.random.normal(shape).astype(dtype) * 0.1 for shape in shapes)
    gate, beta = mx.random.uniform(0.5, 1, (1, 3, 2)), mx.random.uniform(0, 1, (1, 3, 2)).astype(dtype)
    state = mx.random.normal((1, 2, 8, 64))
    found = module.gated_delta_kernel(q, k, v, gate, beta, state)
    expected = module.gated_delta_ops(q, k, v, gate, beta, state)
    for ours, theirs in zip(found, expected, strict=True):
        assert mx.allclose(ours.astype(mx.float32), theirs.astype(mx.float32), rtol=1e-2, atol=1e-2)
        assert dtype != mx.float32 or mx.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("checked", "order", "seed"), WAYS[2:])
def test_a_state_space_kernel_of_mlx_lm(folder, load, checked, order, seed):
    emulator = Emulator(folder, checked=checked, order=order, seed=seed)
    module = load("mlx_lm.models.ssm", emulator)
    mx.random.seed(0)
    x, decay = mx.random.normal((2, 1, 4, 8)), mx.random.normal((4,))
    b, c = (mx.random.normal((2, 1, 2, 64)) for _ in "bc")
    d, dt, bias = mx.random.normal((4,)), mx.random.normal((2, 1, 4)), mx.random.normal((4,))
    state = mx.random.normal((2, 4, 8, 64))
    found = module.ssm_update_kernel(x, decay, b, c, d, dt, bias, state, (1e-3, 100.0))
    for ours, theirs in zip(found, module.ssm_attn(x, decay, b, c, d, dt, bias, state, (1e-3, 100.0)), strict=True):
        assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("checked", "order", "seed"), WAYS[2:])
def test_a_quantized_kernel_of_mlx_lm(folder, load, checked, order, seed):
    module = load("mlx_lm.models.bitlinear_layers", Emulator(folder, checked=checked, order=order, seed=seed))
    rng = np.random.default_rng(0)
    weights = rng.integers(-1, 2, (16, 256))
    packed = sum(((weights[4 * i : 4 * i + 4] + 1) << (2 * i)) for i in range(4)).astype(np.uint8)
    x = mx.array(rng.standard_normal((3, 256), dtype=np.float32))
    found = module.BitLinear(256, 16, bias=False).execute_matmul_kernel(x, mx.array(packed))
    assert mx.allclose(found, x @ mx.array(weights.astype(np.float32)).T, rtol=1e-4, atol=1e-4)


# ---- address spaces


@lint.needs_clang
@pytest.mark.parametrize(
    ("source", "size", "accepted"),
    [
        ("const device float* p = a; out[0] = p[0];", 100, True),
        ("const device float* p = a; out[0] = p[0];", 4, False),  # shorter inputs are constants
        ("auto p = a; out[0] = p[0];", 4, True),
        ("threadgroup float t[4]; t[0] = a[0]; threadgroup float* p = t + 1; out[0] = p[0];", 100, True),
        ("threadgroup float t[4]; threadgroup float* p = t; p = out; out[0] = p[0];", 100, False),
        ("const float* p = a; out[0] = p[0];", 100, False),
        ("a[0] = 1;", 100, False),
    ],
)
def test_pointers_have_the_right_address_space(source, size, accepted):
    found = lint.errors(
        name="lint",
        input_names=["a"],
        output_names=["out"],
        source=source,
        inputs=[mx.zeros((size,))],
        output_dtypes=[mx.float32],
    )
    assert (found == "") == accepted, found
