"""How a round's few rows are computed is decided by measuring."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny import tiny_drafter, tiny_target

from dflash_mlx import runtime
from dflash_mlx.caches.replay import Replayed
from dflash_mlx.kernels import few_rows
from dflash_mlx.kernels.few_rows import use_where_faster
from dflash_mlx.kernels.few_rows_linear import _STATE, FewRowsLinear, fitting_layers


@pytest.fixture
def pair(monkeypatch):
    """Target, drafter and their linear layers; as if on CUDA, and without races of other kernels."""
    target, drafter = tiny_target("qwen2"), tiny_drafter()
    for model in (target.model, drafter):
        model.set_dtype(mx.float16)
    linear = fitting_layers(target.model, without=[target.head_module]) + fitting_layers(drafter)
    monkeypatch.setattr(few_rows, "backend", lambda: replace(runtime.backend(), kind="cuda"))
    monkeypatch.setattr(few_rows.rows_attention, "use_where_faster", lambda *_, **__: ("", []))
    monkeypatch.setattr(few_rows, "products_work", lambda dtype: True)
    return target, drafter, linear


def uses(layers):
    kinds = {isinstance(layer, FewRowsLinear) for layer in layers}
    assert len(kinds) == 1
    return kinds.pop()


@pytest.mark.parametrize("products", [False, True])
def test_a_pair_decides_by_measuring(pair, products, monkeypatch):
    """By fewer seconds where the kernel is on."""
    target, drafter, linear = pair
    monkeypatch.setattr(few_rows, "_seconds", lambda *_: 1.0 - 0.2 * (products and uses(linear)))
    use_where_faster(target, drafter)
    assert uses(linear) == products
    assert type(target.head_module) is nn.Linear


def test_a_kernel_that_gains_too_little_is_not_used(pair, monkeypatch):
    target, drafter, linear = pair
    monkeypatch.setattr(few_rows, "_seconds", lambda *_: 1.0 - 0.01 * uses(linear))
    use_where_faster(target, drafter)
    assert not uses(linear)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"head_dim": 16, "num_attention_heads": 2}, 16),
        ({"text_config": {"head_dim": None, "num_attention_heads": 4}}, 16),
        ({"n_head": 4}, None),
    ],
)
def test_head_sizes_are_taken_from_any_config(config, found, pair, monkeypatch):
    target = replace(pair[0], config={"hidden_size": 64, "vocab_size": pair[0].vocab_size, **config})
    assert target.head_dim == found


@pytest.mark.parametrize(("slower_from", "most"), [(17, 16), (65, 64), (9999, 512)])
def test_the_kernel_for_products_is_used_up_to_where_it_stops_being_faster(slower_from, most, pair, monkeypatch):
    target, drafter, linear = pair
    monkeypatch.setattr(
        few_rows, "_seconds", lambda _, __, rows: 1.0 - 0.2 * (uses_for(linear, rows) and rows < slower_from)
    )
    use_where_faster(target, drafter)
    assert uses_for(linear, most)
    assert not uses_for(linear, most + 1)
    # By which the costs of rounds are told apart.
    assert target.kernels == f"products of up to {most} rows"


def uses_for(layers, rows):
    return uses(layers) and layers[0].__dict__[_STATE].most >= rows


def test_ways_that_pay_only_together_are_found(pair, monkeypatch):
    """Where its calls cost Python more than the product does, the kernel pays if passes are replayed."""
    target, drafter, linear = pair
    gain = {(False, False): 0.0, (False, True): -0.3, (True, False): 0.02, (True, True): 0.4}
    monkeypatch.setattr(few_rows, "_seconds", lambda *_: 1.0 - gain[target.replays, uses(linear)])
    use_where_faster(target, drafter)
    assert target.replays
    assert uses(linear)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model's folder, and an empty place for what is remembered."""
    monkeypatch.setenv("DFLASH_MLX_HOME", str(tmp_path / "home"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_what_was_chosen_for_the_same_files_is_not_measured_again(pair, folder, monkeypatch):
    target, drafter, linear = pair
    measured = []
    monkeypatch.setattr(
        few_rows, "_seconds", lambda *_: measured.append(1) or 1.0 - 0.3 * target.replays - 0.2 * uses(linear)
    )

    def measures(**options):
        measured.clear()
        target.set_replays(False)
        few_rows.set_few_rows(linear, 0)
        assert use_where_faster(target, drafter, folders=[folder], **options) == []
        assert target.replays
        assert uses(linear) == options.get("kernels", True)
        return bool(measured)

    assert measures()
    monkeypatch.setattr(target, "_rows", None)
    monkeypatch.setattr(type(target), "_probe_rows", lambda self: pytest.fail("run"))
    assert not measures()
    assert target.takes_rows()
    assert measures(again=True)
    assert measures(kernels=False)
    assert not measures()
    # Other kernels won their races since then, say by another version of MLX.
    monkeypatch.setattr(few_rows.rows_attention, "use_where_faster", lambda *_, **__: ("2 heads: 4", []))
    assert measures()
    assert not measures()
    (folder / "config.json").write_text('{"another": 1}')
    assert measures()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kernels": "", "way": [1, 0], "rows": true, "trees": true}'])
def test_what_cannot_be_read_is_measured(text, pair, folder, monkeypatch):
    target, drafter, _ = pair
    monkeypatch.setattr(few_rows, "_seconds", lambda *_: 1.0 - 0.2 * target.replays)
    use_where_faster(target, drafter, folders=[folder])
    [stored] = (folder.parent / "home" / "ways").iterdir()
    good = stored.read_text()
    stored.write_text(text)
    use_where_faster(target, drafter, folders=[folder])
    assert target.replays
    assert stored.read_text() == good


@pytest.mark.parametrize("faster", [False, True])
def test_a_computer_that_is_slow_now_and_then_does_not_decide(faster, pair, monkeypatch):
    """As one that shares its cores: nearly twice as slow two thirds of the time, for a tenth of a second to three."""
    target, drafter, _ = pair
    monkeypatch.setattr(few_rows, "_layers", lambda *_: [])

    def slowness(rng):
        """Of each run, which takes 0.05 s."""
        while True:
            for slow, share in ((1.8, 1.3), (1.0, 0.7)):
                for _ in range(round(0.1 * 20 ** rng.random() * share / 0.05)):
                    yield slow * rng.uniform(1.0, 1.02)

    for seed in range(40):
        moments = slowness(np.random.default_rng(seed))
        monkeypatch.setattr(
            few_rows, "_seconds", lambda *_, at=moments: (0.02 - 0.002 * (faster and target.replays)) * next(at)
        )
        use_where_faster(target, drafter)
        assert target.replays == faster, seed


def test_each_way_is_recorded_once(pair, monkeypatch):
    """To record takes longer than what is timed, and turns are to be short."""
    target, drafter, _ = pair
    monkeypatch.setattr(few_rows, "_layers", lambda *_: [])
    recorded = []
    trace = Replayed._trace
    monkeypatch.setattr(Replayed, "_trace", lambda self, *inputs: recorded.append(self) or trace(self, *inputs))
    use_where_faster(target, drafter)
    # The target's pass, the drafter's context and a draft.
    assert len(recorded) == len(set(recorded)) == 3


@pytest.mark.parametrize("rows", [4, 64])
def test_the_measurement_runs_and_takes_turns(rows):
    target, drafter = tiny_target("llama"), tiny_drafter()
    switched = []
    found = few_rows._compare(target, drafter, rows, "ab", switched.append)
    assert all(seconds > 0 for seconds in found.values())
    assert switched[:4] == ["a", "b"] * 2


@pytest.mark.parametrize("kind", ["cuda", "metal"])
@pytest.mark.parametrize("faster", [False, True])
def test_passes_are_replayed_where_that_is_faster(kind, faster, pair, monkeypatch):
    target, drafter, _ = pair
    monkeypatch.setattr(few_rows, "backend", lambda: replace(runtime.backend(), kind=kind))
    monkeypatch.setattr(few_rows, "_seconds", lambda *_: 1.0 - 0.2 * (faster and target.replays))
    use_where_faster(target, drafter)
    assert target.replays == faster


def test_passes_that_cannot_be_replayed_are_not(pair, monkeypatch):
    """A model that asks for a number in passing cannot be recorded."""
    target, drafter, _ = pair
    forward = type(target).forward_tapped

    def asks(self, tokens, cache, layer_ids):
        tokens.tolist()
        return forward(self, tokens, cache, layer_ids)

    monkeypatch.setattr(type(target), "forward_tapped", asks)
    monkeypatch.setattr(few_rows, "_seconds", lambda *_: 1.0 - 0.2 * target.replays)
    use_where_faster(target, drafter)
    assert not target.replays


def test_nothing_is_measured_on_a_cpu(monkeypatch):
    monkeypatch.setattr(few_rows, "backend", lambda: replace(runtime.backend(), kind="cpu"))
    monkeypatch.setattr(few_rows, "_seconds", lambda *_: pytest.fail("measured"))
    target, drafter = tiny_target("llama"), tiny_drafter()
    use_where_faster(target, drafter)
    assert not any(isinstance(layer, FewRowsLinear) for layer in target.model.modules())


@pytest.mark.parametrize("kind", ["metal", "cuda", "cpu"])
def test_all_kernels_can_be_left_out(kind, pair, monkeypatch):
    """Replaying is none of them. What rounds cost is remembered apart."""
    target, drafter, linear = pair
    monkeypatch.setattr(few_rows, "backend", lambda: replace(runtime.backend(), kind=kind))
    for module in (few_rows.exponentials, few_rows.rotary, few_rows.quantized_rows, few_rows.rows_attention):
        monkeypatch.setattr(module, "use_where_faster", lambda *_, **__: pytest.fail("a kernel was tried"))
    monkeypatch.setattr(few_rows, "_seconds", lambda *_: 1.0 - 0.2 * target.replays)
    assert use_where_faster(target, drafter, kernels=False) == []
    assert not uses(linear)
    assert target.replays == (kind != "cpu")
    assert target.kernels == "none"


def test_notes_on_kernels_are_handed_on(pair, monkeypatch):
    """And what is used, by which the costs of rounds are told apart. Attention is looked at in a round."""
    target, drafter, _ = pair
    monkeypatch.setattr(few_rows, "backend", lambda: replace(runtime.backend(), kind="metal"))
    found = []

    def products(models, *, head, report):
        found.extend([models, head])
        return "24x32: 6", ["odd"]

    def attention(models, run, *, report):
        run()
        found.append(models)
        return "2 heads: 4", ["odder"]

    monkeypatch.setattr(few_rows.quantized_rows, "use_where_faster", products)
    monkeypatch.setattr(few_rows.rows_attention, "use_where_faster", attention)
    monkeypatch.setattr(few_rows, "_seconds", lambda *_: 1.0)
    assert use_where_faster(target, drafter) == ["odd", "odder"]
    models = [target.model, drafter]
    assert found == [models, target.head_module, models]
    assert target.kernels == "24x32: 6; 2 heads: 4"
