"""What can be asked for, what contradicts itself, and what decides whether a run can be continued."""

import json

import pytest
from tiny import tiny_drafter

from dflash_mlx.errors import PairError, UsageError
from dflash_mlx.training import TrainOptions
from dflash_mlx.training.config import default_taps, make_config, make_drafter, mask_token
from dflash_mlx.training.export import export_drafter
from dflash_mlx.training.loading import load


def options(**changes):
    return TrainOptions(**{"model": "some/model", "out": "out", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "name the target"),
        ({"pair": "demo"}, "name the target"),
        ({"max_length": 16}, "max-length should be at least 32"),
        ({"max_user_tokens": 300}, r"max-user-tokens should be from 4 to half of max-length \(256\); got 300"),
        ({"greedy_share": 1.5}, "greedy-share should be from 0 to 1"),
        ({"turns": 0}, "turns should be from 1 to 16"),
        ({"turns": 2, "thinking": "on"}, "--turns 1"),
        ({"thinking": "yes"}, "auto, on or off"),
        ({"data_tokens": 0}, "data-tokens should be above 0"),
        ({"prompts": "no-such-file"}, "--prompts: expected a file"),
        ({"block_size": 1}, "block-size should be from 2 to 64"),
        ({"batch_size": 48, "micro_batch": 7}, "divide the batch size 48"),
        ({"optimizer": "sgd"}, "adamw or muon"),
        ({"weights": "flat"}, "dpace or decay"),
        ({"quantize": 7}, "quantize should be"),
        ({"holdout": 0}, "holdout should be"),
        ({"minutes": -1}, "minutes should be above 0"),
        ({"draft_vocabulary": 0}, "draft-vocabulary should be above 0"),
        ({"init_from": "no-such-folder"}, "--init-from: expected a drafter's folder"),
    ],
)
def test_values_that_cannot_be_used_are_named(changes, message):
    with pytest.raises(UsageError, match=message):
        options(**changes)


def test_one_source_of_data(tmp_path):
    file = tmp_path / "x.txt"
    file.write_text("x")
    with pytest.raises(UsageError, match="give one source of data; got --topics and --prompts"):
        options(topics=file, prompts=file)


def test_budgets_have_defaults_only_when_nothing_is_said():
    assert (options().data_budget, options().training_budget) == ((30.0, None), (60.0, None))
    assert options(data_tokens=5).data_budget == (None, 5)
    assert options(steps=5, minutes=2).training_budget == (2, 5)


def test_files_count_by_content(tmp_path):
    first, moved, other = (tmp_path / name for name in ("a.txt", "b.txt", "c.txt"))
    first.write_text("one")
    moved.write_text("one")
    other.write_text("two")
    identities = [options(prompts=path).data_identity() for path in (first, moved, other)]
    assert identities[0] == identities[1] != identities[2]
    assert json.loads(json.dumps(identities[0])) == identities[0]


def test_budgets_and_device_sizes_are_no_part_of_the_identity():
    more = options(data_minutes=5, minutes=9, steps=7, micro_batch=4, data_batch=3, draft_vocabulary=9, quantize=4)
    assert more.data_identity() == options().data_identity()
    assert more.training_identity() == options().training_identity()
    assert options(layers=3).training_identity() != options().training_identity()


def test_the_papers_decay():
    assert [options().decay(block) for block in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert options(gamma=3.0).decay(16) == 3.0


@pytest.mark.parametrize(("layers", "count", "taps"), [(28, 5, (1, 7, 13, 19, 25)), (36, 5, (1, 9, 17, 25, 33))])
def test_taps_are_the_papers(layers, count, taps):
    assert default_taps(layers, count) == taps


@pytest.mark.parametrize("layers", range(1, 40))
def test_taps_are_always_layers(layers):
    for count in range(1, 8):
        taps = default_taps(layers, count)
        assert list(taps) == sorted(set(taps))
        assert 0 <= taps[0] <= taps[-1] < layers


@pytest.fixture(scope="module")
def loaded(target_folder, tmp_path_factory):
    return load(options(model=str(target_folder), out=tmp_path_factory.mktemp("out")), quiet=True)


def parts(loaded):
    return loaded.target, loaded.tokenizer, loaded.frame


def test_the_mask_token_is_one_that_text_does_not_use(loaded):
    token = mask_token(*parts(loaded))
    assert token in (0, 3)  # special, and neither an end nor in the template
    assert make_config(*parts(loaded), options(mask_token=7)).mask_token_id == 7


@pytest.mark.parametrize("taps", [(3, 1), (0, 4), (-1, 2), (1, 1)])
def test_taps_that_the_target_lacks_are_refused(loaded, taps):
    with pytest.raises(UsageError, match="rising layer numbers from 0 to 3"):
        make_config(*parts(loaded), options(taps=taps))


def test_a_warm_start_keeps_its_shape(loaded, tmp_path):
    drafter = tiny_drafter(block_size=6)
    export_drafter(drafter, tmp_path, quantize=None)
    for asked in ({}, {"layers": 2, "block_size": 6, "taps": (0, 2), "num_taps": 2, "mask_token": 3}):
        assert make_drafter(*parts(loaded), options(init_from=tmp_path, **asked)).config == drafter.config
    wrong = {"layers": 3, "block_size": 8, "taps": (1, 2), "sliding_window": 9, "mask_token": 5}
    with pytest.raises(UsageError) as error:
        make_drafter(*parts(loaded), options(init_from=tmp_path, **wrong))
    for words in (
        "--layers 3 where it has 2",
        "--block-size 8 where it has 6",
        "--taps 1,2 where it has 0,2",
        "--sliding-window 9 where it has None",
        "--mask-token 5 where it has 3",
    ):
        assert words in str(error.value)
    with pytest.raises(UsageError, match="--taps 3 where it has 2"):
        make_drafter(*parts(loaded), options(init_from=tmp_path, num_taps=3))


def test_a_warm_start_for_another_target_is_refused(loaded, tmp_path):
    export_drafter(tiny_drafter(vocab_size=50), tmp_path, quantize=None)
    with pytest.raises(PairError, match="vocabulary of 50"):
        make_drafter(*parts(loaded), options(init_from=tmp_path))


def test_a_warm_start_into_its_own_folder_is_refused(tmp_path):
    export_drafter(tiny_drafter(), tmp_path, quantize=None)
    with pytest.raises(UsageError, match="choose another --out"):
        options(init_from=tmp_path, out=tmp_path)
