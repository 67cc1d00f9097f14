"""With --exact drafting changes no answer in any precision, and no bit of any logits.

The cases are those of float32 (test_lossless.py, test_batches.py), with targets in half precision and with quantized
weights. The truth is the best token of the same exact target, step by step over mlx-lm's own caches. (mlx-lm's own loop
rounds log-probabilities in half precision, where two tokens can become equal.)
"""

import random

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import test_batches
import test_lossless
from tiny import FAMILIES, VOCAB, tiny_target
from tiny_families import family_target

from dflash_mlx import loading
from dflash_mlx.caches.rows import Rows
from dflash_mlx.caches.tree_rows import keep_path
from dflash_mlx.decoding import decode as one_answer
from dflash_mlx.errors import UsageError
from dflash_mlx.generation import generate
from dflash_mlx.kernels.exact.model import make_exact
from dflash_mlx.loading import load_pair
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.targets.target import Target

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
FEW = [
    ("llama", "bfloat16"),
    ("qwen3", "4-bit"),
    ("qwen3_5", "bfloat16"),
]
MORE = [
    ("gemma3", "bfloat16"),
    ("qwen3_moe", "float32"),
    ("llama", "4-bit"),
    ("llama, sliding", "bfloat16"),
    ("qwen3_next", "float32"),
    ("lfm2", "float16"),
]
MOST = [
    ("qwen2", "float16"),
    ("llama", "float32"),
    ("qwen2", "4-bit"),
    ("gemma4", "float16"),
    ("ministral3", "bfloat16"),
    ("phi3", "bfloat16"),
    ("muse_glimmer", "float16"),
    # MLX multiplies by experts in float32 alone on a CPU.
    ("minimax", "float32"),
    ("qwen3_5_moe", "float32"),
]


def of_kind(target: Target, kind: str) -> Target:
    target.model.set_dtype(DTYPES.get(kind, mx.bfloat16))
    if kind == "4-bit":
        nn.quantize(target.model, group_size=32, bits=4)
    return target


def exact_target(family: str, kind: str) -> Target:
    target = of_kind(tiny_target(family) if family in FAMILIES else family_target(family), kind)
    make_exact(target)
    return target


@pytest.fixture(
    scope="module",
    params=[
        *FEW,
        *(pytest.param(case, marks=pytest.mark.slow) for case in MORE),
        *(pytest.param(case, marks=pytest.mark.long) for case in MOST),
    ],
    ids=lambda case: ", ".join(case),
)
def target(request):
    return exact_target(*request.param)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(one_answer, "PREFILL_STEP", test_batches.CHUNK)


def greedy_tokens(target, prompt, max_tokens, eos_ids=(), *, prefill_step_size=2048):
    """As `tiny.plain_tokens`, by the logits."""
    caches, tokens = target.make_cache(), []
    for first in range(0, len(prompt) - 1, prefill_step_size):
        target.forward(mx.array([prompt[first : min(first + prefill_step_size, len(prompt) - 1)]]), caches)
    while len(tokens) < max_tokens and not (tokens and tokens[-1] in eos_ids):
        logits = target.forward(mx.array([(prompt + tokens)[-1:]]), caches)
        tokens.append(int(mx.argmax(logits[0, -1]).item()))
    return tokens


@pytest.fixture(autouse=True)
def by_logits(monkeypatch):
    for module in (test_lossless, test_batches):
        monkeypatch.setattr(module, "plain_tokens", greedy_tokens)


def test_one_answer_equals_plain_decoding(target, monkeypatch):
    monkeypatch.setattr(test_lossless, "CASES_PER_FAMILY", 10)
    test_lossless.test_equals_plain_decoding(target, 0, monkeypatch)


def test_answers_made_together_equal_plain_decoding(target, monkeypatch, request):
    test_batches.test_each_lane_answers_as_if_alone(target, 1, monkeypatch, request)


@pytest.mark.parametrize("seed", range(2))
def test_sampled_answers_are_the_same(seed, monkeypatch):
    """With seeds, penalties, log-probabilities and a grammar."""
    make_pair = test_batches.json_pair

    def exact_pair(**options):
        pair = make_pair(**options)
        make_exact(of_kind(pair.target, "bfloat16"))
        return pair

    monkeypatch.setattr(test_batches, "json_pair", exact_pair)
    test_batches.test_sampled_lanes_draw_what_they_draw_alone(seed)


def read_by_steps(target, text, *, begin):
    """Logits (L, V) of a text after its first `begin` tokens. mlx-lm's caches take those at once, others one by one."""
    caches = target.make_cache()
    target.forward(mx.array([text[:begin]]), caches)
    return mx.concatenate([target.forward(mx.array([[token]]), caches)[0] for token in text[begin:]])


def test_logits_are_the_same_bit_for_bit(target):
    """However a text is read: in chunks of any sizes, beside others, and with other rooms and tokens after it."""
    rng = random.Random(0)
    text, begin = [rng.randrange(VOCAB) for _ in range(275)], 240
    expected = read_by_steps(target, text, begin=begin)
    for most in (40, 300):
        caches, at, parts = target.make_cache(), 0, []
        while at < len(text):
            chunk = text[at : at + rng.randint(1, most)]
            parts.append(target.forward(mx.array([chunk]), caches)[0])
            at += len(chunk)
        assert mx.array_equal(mx.concatenate(parts)[begin:], expected)
    for answers in (1, 4):
        rows = Rows.blank(target.blank_caches, answers, 300 * answers)
        own = rng.randrange(answers)
        others = mx.array([[rng.randrange(VOCAB) for _ in text] for _ in range(answers)])
        tokens = mx.where((mx.arange(answers) == own)[:, None], mx.array(text), others)
        target.forward(tokens[:, :begin], rows.layers)
        rows.lengths.value = mx.array([begin if row == own else rng.randint(0, begin) for row in range(answers)])
        assert mx.array_equal(target.forward(tokens[:, begin:], rows.layers)[own], expected)


def random_tree(rng, nodes):
    """Depths (N,) and which nodes each continues, itself included, (N, N)."""
    visible, depths = np.eye(nodes, dtype=bool), [0] * nodes
    for node in range(1, nodes):
        parent = int(rng.integers(max(0, node - 4), node))
        visible[node] |= visible[parent]
        depths[node] = depths[parent] + 1
    return depths, visible


@pytest.mark.parametrize("before", [3, 254, 300])
def test_a_path_of_a_tree_has_the_logits_of_a_chain(before):
    """Its keys lie between those of other paths, and on both sides of where parts of the caches begin. After the first
    tree they are out of order, too, also for single tokens.
    """
    target, rng, nodes = exact_target("llama", "float32"), np.random.default_rng(before), 12
    text, caches, model = rng.integers(0, VOCAB, before).tolist(), target.make_cache(), target.pass_for(())
    target.forward(mx.array([text]), caches)
    rows = Rows.of(caches, before)
    for _ in range(4):
        (depths, visible), tokens = random_tree(rng, nodes), rng.integers(0, VOCAB, nodes)
        rows.reserve(len(text) + nodes)
        logits, _ = model.over(rows, mx.array(tokens[None]), (mx.array(depths), mx.array(visible)))
        paths = [np.flatnonzero(row) for row in visible]
        for path in paths:
            expected = read_by_steps(target, text + tokens[path].tolist(), begin=len(text))
            assert mx.array_equal(logits[0, mx.array(path)], expected)
        kept = max(paths, key=len)
        keep_path(rows, mx.array(kept), target.tree_steps)
        text += tokens[kept].tolist()
        rows.lengths.value = mx.array([len(text)], dtype=mx.int32)
        # A single token, before which positions are not put in order.
        rows.reserve(len(text) + 1)
        logits, _ = model.over(rows, mx.array([[7]]))
        assert mx.array_equal(logits[0], read_by_steps(target, [*text, 7], begin=len(text)))
        text.append(7)
        rows.lengths.value = mx.array([len(text)], dtype=mx.int32)


def uneven(x, weight):
    """A product that adds in another order for more than four rows, as MLX does on some machines."""
    if x.size // x.shape[-1] <= 4:
        return x @ weight.T
    half = x.shape[-1] // 2
    return x[..., :half] @ weight[:, :half].T + x[..., half:] @ weight[:, half:].T


def test_uneven_products_change_ordinary_logits_and_no_exact_ones(monkeypatch):
    """So the other tests mean something where a machine's products are even by themselves."""

    def ordinary(layer, x):
        return uneven(x, layer.weight) + layer.bias if "bias" in layer else uneven(x, layer.weight)

    monkeypatch.setattr(nn.Linear, "__call__", ordinary)
    target, text = of_kind(tiny_target("qwen2"), "bfloat16"), list(range(10))

    def changed():
        together = target.forward(mx.array([text]), target.make_cache())[0, 1:]
        return not mx.array_equal(together, read_by_steps(target, text, begin=1))

    assert changed()
    make_exact(target)
    assert not changed()


@pytest.mark.long
@pytest.mark.model
def test_the_demo_pair_in_bfloat16():
    """Drafted in a chain and in trees."""
    pair = load_pair("demo", dtype="bfloat16", exact=True)
    prompt, params = "Name three colours.", SamplingParams(max_tokens=10, ignore_eos=True)
    expected = generate(pair, prompt, params, draft=False).token_ids
    for tree, width in ((False, 15), (True, 20)):
        assert generate(pair, prompt, params, width=width, tree=tree).token_ids == expected


def test_it_is_refused_on_several_machines_before_anything_is_fetched(monkeypatch):
    monkeypatch.setattr(loading, "other_machines", object)
    monkeypatch.setattr(loading, "ensure_model", lambda *args, **kwargs: pytest.fail("a model was fetched"))
    with pytest.raises(UsageError, match=r"same order in every pass.* on one machine, without launch"):
        load_pair("demo", exact=True)
