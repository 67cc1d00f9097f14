"""What clang says of a kernel with Metal's address spaces: g++, which runs them, does not know these."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from metal.emulator import VARIABLE, metal_text

_CLANG = next(
    (name for name in ("clang++", *(f"clang++-{i}" for i in range(22, 13, -1))) if shutil.which(name) is not None), None
)
needs_clang = pytest.mark.skipif(_CLANG is None, reason="checks address spaces with clang++")


def errors(*, name, input_names, output_names, source, header="", inputs, output_dtypes, template=(), **_):
    """clang's first errors, or ""."""
    text = metal_text(name, input_names, output_names, source, header, inputs, output_dtypes, template)
    text = VARIABLE.sub(lambda found: f"static {found[0]}", re.sub(r"\[\[.*?\]\]", "", text))
    command = [_CLANG, "-std=c++17", "-fsyntax-only", "-Wno-everything", "-nostdinc", "-ferror-limit=5"]
    command += ["-include", str(Path(__file__).with_name("address_spaces.hpp")), "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True).stderr
