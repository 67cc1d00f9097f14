"""Machines with whole layers of a target, one after the other in this process: together they compute what it does."""

import gc
from itertools import combinations, pairwise
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from tiny import HIDDEN, LAYERS
from tiny_families import FAMILY_CONFIGS, family_target, unavailable
from tiny_folder import write_target

from dflash_mlx.caches.trimming import leaves
from dflash_mlx.errors import CheckpointError
from dflash_mlx.rounding import TOLERANCE, relative_difference
from dflash_mlx.targets.division import divide
from dflash_mlx.targets.loading import load_target
from dflash_mlx.targets.target import weight_bytes
from dflash_mlx.targets.whole_layers import WholeLayers, runs_of_layers, takes_whole_layers

PROMPT, BLOCK, MORE = [5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22, 23], [30, 31]


def group_of(rank, size):
    return SimpleNamespace(rank=rank, size=size, ranks=None)


def with_whole_layers(target, group):
    target.whole_layers = WholeLayers(target.layers, [weight_bytes(layer) for layer in target.layers], group)
    return target


def takes(name):
    """Whether a family can be divided by whole layers with the installed mlx-lm."""
    target = family_target(name)
    return takes_whole_layers(target.model, target.layers)


FAMILIES = [name for name in FAMILY_CONFIGS if unavailable(name) is None and takes(name)]


class Sums:
    """What all machines add to each sum, where the one with the first layers computes first, and rank 0 last.

    A machine needs nothing of those that come after it: to what they own they add zeros before.
    """

    def __init__(self):
        self.found, self.made = [], 0

    def begin(self):
        """The next machine's turn."""
        self.made = 0

    def add(self, part, *, group=None):
        if self.made == len(self.found):
            self.found.append(part)
        else:
            before = self.found[self.made]
            assert (part.shape, part.dtype) == (before.shape, before.dtype)
            self.found[self.made] = before + part
        self.made += 1
        return self.found[self.made - 1]


@pytest.fixture
def sums(monkeypatch):
    found = Sums()
    monkeypatch.setattr(mx.distributed, "all_sum", found.add)
    return found


def use(target, taps):
    """What a pass gives of a prompt, of blocks that are kept in part, alone and in rows, and after that."""
    caches = target.make_cache()
    found = [target.read(mx.array([PROMPT]), caches, taps)]
    if target.takes_rows():
        other = target.make_cache()
        target.read(mx.array([PROMPT[:4]]), other, [])
        held = target.as_row(target.copy_caches(caches, 0, len(PROMPT)), len(PROMPT))
        held.add(1)
        held.take_over(target.as_row(other, 4), [1])
        at = mx.array([len(PROMPT), 4])
        found += held.feed(target.pass_for(taps), mx.array([BLOCK, BLOCK[::-1]]), at=at, room=32)
        held.commit(len(BLOCK), [2, 3])
        found += held.feed(target.pass_for(taps), mx.array([MORE, MORE]), at=at + mx.array([2, 3]), room=32)
    alone = target.alone(caches)
    found += alone.feed(target.pass_for(taps), mx.array([BLOCK]), at=mx.array([len(PROMPT)]), room=32)
    alone.commit(len(BLOCK), [2])
    found += alone.feed(target.pass_for(taps), mx.array([MORE]), at=mx.array([len(PROMPT) + 2]), room=32)
    mx.eval(found)
    return found, (target.takes_rows(), target.takes_trees())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("machines", [2, 3])
def test_machines_compute_together_what_one_computes(name, machines, sums):
    """Logits, and the features of every layer."""
    taps = [*range(LAYERS), LAYERS]
    expected, ways = use(family_target(name), taps)
    counts = []
    for rank in reversed(range(machines)):
        target = with_whole_layers(family_target(name), group_of(rank, machines))
        sums.begin()
        found, said = use(target, taps)
        counts.append(sums.made)
        assert said[0] == ways[0]
    assert said == ways
    assert counts == [len(sums.found)] * machines
    for a, b in zip(found, expected, strict=True):
        assert relative_difference(a, b) <= TOLERANCE[b.dtype]


def test_families_that_can_only_be_divided_so_are_here():
    assert "qwen3_next" in FAMILIES or not hasattr(family_target("qwen3_next").model.model, "pipeline")
    assert not {"llama", "phi3"} & set(FAMILIES)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(1, 7))
def test_the_largest_run_takes_as_little_as_it_can(sizes, machines):
    if machines > len(sizes):
        return
    runs = runs_of_layers(sizes, machines)
    assert [i for run in runs for i in run] == list(range(len(sizes)))
    assert all(runs)
    found = max(sum(sizes[i] for i in run) for run in runs)
    cuts = combinations(range(1, len(sizes)), machines - 1)
    divisions = [[0, *cut, len(sizes)] for cut in cuts]
    assert found == min(max(sum(sizes[a:b]) for a, b in pairwise(ends)) for ends in divisions)


def test_the_last_layers_are_those_of_rank_0():
    """Its run is the smallest where they differ: it also has the drafter."""
    assert runs_of_layers([1] * 7, 3) == [range(3), range(3, 6), range(6, 7)]
    target = with_whole_layers(family_target("kimi_k25"), group_of(0, 3))
    assert target.whole_layers.own == range(3, 4)


@pytest.mark.skipif("qwen3_next" not in FAMILIES, reason="mlx-lm cannot divide qwen3_next")
def test_a_machine_has_the_weights_of_its_own_layers_only(tmp_path, monkeypatch):
    """Neither held nor read: MLX reads a file's arrays when they are used first."""
    wide = {"hidden_size": 256, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    file, config = FAMILY_CONFIGS["qwen3_next"]
    monkeypatch.setitem(FAMILY_CONFIGS, "qwen3_next", (file, {**config, **wide}))
    whole = family_target("qwen3_next")
    sizes, everything = [weight_bytes(layer) for layer in whole.layers], weight_bytes(whole.model)
    folder = write_target(tmp_path / "target", family="qwen3_next")
    del whole
    shares = []
    for rank in range(3):
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        target, _ = load_target(folder, dtype="float32", group=group_of(rank, 3))
        own = sum(sizes[i] for i in target.whole_layers.own)
        share = everything - sum(sizes) + own
        assert weight_bytes(target.model) == share
        assert mx.get_peak_memory() - before < share + 0.2 * min(sizes)
        shares.append(own)
        del target
    assert sum(shares) == sum(sizes)


def test_caches_of_layers_elsewhere_are_as_long_and_a_number_wide(sums):
    name = "kimi_k25"
    whole, target = family_target(name), with_whole_layers(family_target(name), group_of(0, 2))
    lengths = []
    for one in (whole, target):
        caches = one.make_cache()
        one.read(mx.array([PROMPT]), caches, [])
        lengths.append([(type(leaf), leaf.offset, leaf.keys.shape[2]) for leaf in leaves(caches)])
    assert lengths[0] == lengths[1]
    assert [leaf.keys.shape[3] for leaf in leaves(caches)] == [1, 1, 16, 16]


def test_recurrent_caches_of_layers_elsewhere_count_on(sums):
    """mlx-lm takes the mask of a batch from any recurrent layer's cache."""
    for target in (family_target("qwen3_5"), with_whole_layers(family_target("qwen3_5"), group_of(0, 2))):
        states = target.make_cache()[0]
        states.lengths = mx.array([5, 3])
        target.layers[0](mx.ones((2, 2, HIDDEN)), mask=None, cache=states)
        assert states.lengths.tolist() == [3, 1]
        assert [array.shape[0] for array in states.cache] == [2, 2]


class Layer(nn.Module):
    """A layer that doubles what it gets, or repeats it."""

    def __init__(self, wider=False):
        super().__init__()
        self.wider = wider

    def __call__(self, x, mask=None, cache=None):
        return mx.concatenate([x, x], axis=-1) if self.wider else 2 * x


def test_what_layers_share_is_left_to_those_that_are_here():
    layers = [Layer(), Layer()]
    layers[0].shared = layers[1].shared = nn.Linear(2, 2)
    layers[0].alone = nn.Linear(2, 2)
    WholeLayers(layers, [1, 1], group_of(0, 2))
    assert "weight" in layers[1].shared
    assert "weight" not in layers[0].alone


class Asking(Layer):
    """A layer that takes something from the layer before."""

    def __call__(self, x, mask=None, cache=None, residuals=None):
        return x


class Pipeline(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def pipeline(self, group, split=None):
        pass


def test_layers_that_take_something_from_each_other_are_left_together():
    assert takes_whole_layers(Pipeline([Layer()]), [Layer()])
    assert not takes_whole_layers(Pipeline([Layer()]), [Layer(), Asking()])
    assert not takes_whole_layers(nn.Sequential(Layer()), [Layer()])


def test_what_a_layer_makes_has_to_fit_the_other_machines(sums):
    layers = [Layer(wider=True), Layer()]
    WholeLayers(layers, [1, 1], group_of(1, 2))
    with pytest.raises(ValueError, match=r"\(1, 2, 6\) of"):
        layers[0](mx.ones((1, 2, 3)), cache=None)


def test_a_model_that_fails_on_one_machine_fails_on_all(sums):
    """The one that has not failed gets nothing but zeros from it, and no more sums than the other made."""

    class Model(Pipeline):
        def __call__(self, tokens, cache):
            h = mx.ones((*tokens.shape, 3))
            for layer in self.layers:
                h = layer(h, cache=cache)
            return h

    class Failing(Layer):
        def __call__(self, x, mask=None, cache=None):
            raise IndexError("not with these caches")

    for rank, kinds in ((2, [Failing, Layer, Layer]), (1, [Layer] * 3), (0, [Layer] * 3)):
        layers = [kind() for kind in kinds]
        parts = WholeLayers(layers, [1, 1, 1], group_of(rank, 3))
        sums.begin()
        with pytest.raises(RuntimeError, match="does not run with these caches"):
            parts.attempt(Model(layers), mx.ones((1, 2, 3)), mx.array([[1, 2]]), KVCache())
        assert sums.made == len(sums.found) == 3


def test_more_machines_than_layers_are_refused():
    target = family_target("kimi_k25")
    with pytest.raises(CheckpointError, match=f"has {LAYERS} for 5 machines; take at most {LAYERS}"):
        divide(target, group_of(0, 5))
