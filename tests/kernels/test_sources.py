"""The texts of kernels."""

import re
from pathlib import Path

import pytest

from dflash_mlx.kernels import sources
from dflash_mlx.kernels.sources import included, source

FILES = sorted(path.relative_to(sources._FOLDER).as_posix() for path in sources._FOLDER.rglob("*.cu"))


@pytest.mark.parametrize("file", FILES)
def test_a_line_stands_for_a_file(file):
    line = included(file)
    [path] = re.findall(r'^#include "(.+)"  // \w+\n$', line)
    assert Path(path).read_text(encoding="utf-8") == source(file)


def test_it_names_what_the_kernel_wants_to_know_of_its_inputs():
    wanted = included("rows_attention/one_launch.cu", ["q", "k", "settings"]).split("// ")[1].split()[1:]
    text = source("rows_attention/one_launch.cu")
    assert {"q_shape", "k_strides"} <= set(wanted)
    assert all(name in text for name in wanted)
    assert not any(name.startswith("settings") for name in wanted)


def test_another_text_has_another_line(monkeypatch):
    before = included("matrix_units.cu")
    monkeypatch.setattr(sources, "source", lambda file: source(file) + "\n")
    assert included("matrix_units.cu") != before
