"""Which drafters training can start from."""

import mlx.core as mx
import pytest
from cases import CASES, write_folder

from dflash_mlx.drafters.convert import convert_drafter
from dflash_mlx.drafters.dflash2 import DFlash2Drafter
from dflash_mlx.errors import CheckpointError
from dflash_mlx.training.config import warm_start


def test_plain_drafters(tmp_path):
    drafter = warm_start(write_folder(tmp_path, CASES["sliding and full"]))
    assert drafter.dtype == mx.float32


def test_dflash2_drafters(tmp_path):
    drafter = warm_start(write_folder(tmp_path, CASES["second"]))
    assert isinstance(drafter, DFlash2Drafter)
    assert drafter.dtype == mx.float32


def test_the_layout_of_speculators_is_converted_first(tmp_path):
    convert_drafter(write_folder(tmp_path / "a", CASES["full"]), tmp_path / "b", to="speculators")
    with pytest.raises(CheckpointError, match="dflash-mlx convert DRAFTER NEW_FOLDER --to zlab"):
        warm_start(tmp_path / "b")
