"""Headers: what is read, and that no truncated or hostile file does anything but raise CheckpointError."""

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf_writer import text, tiny_gguf, value, write_gguf

from dflash_mlx.errors import CheckpointError
from dflash_mlx.hub.gguf_file import GGUFFile


def test_metadata_and_directory_are_read(tmp_path: Path) -> None:
    metadata = {"n": 7, "f": 0.5, "yes": True, "s": "Grüße", "list": ["a", "b c"], "ints": [1, -2]}
    raw = np.arange(6, dtype="<f4").tobytes()
    path = write_gguf(tmp_path / "f.gguf", metadata, {"x": ("F32", (2, 3), raw), "y": ("F16", (5,), bytes(10))})
    with GGUFFile(path) as file:
        assert {key: file.metadata[key] for key in ("n", "f", "yes", "s", "list")} == {
            key: metadata[key] for key in ("n", "f", "yes", "s", "list")
        }
        assert file.metadata["ints"].tolist() == [1, -2]
        assert file.tensors["x"].shape == (2, 3)
        np.testing.assert_array_equal(file.data(file.tensors["x"]).view("<f4"), [[0, 1, 2], [3, 4, 5]])


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "f.gguf",
        {"general.alignment": 64},
        {"x": ("F32", (1,), struct.pack("<f", 2.5))},
        version=2,
        alignment=64,
    )
    with GGUFFile(path) as file:
        assert file.data(file.tensors["x"]).view("<f4").item() == 2.5


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "only 0 bytes"),
        (b"PK\x03\x04" + bytes(40), "expected it to begin with b'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "found version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0), "claims to hold 18,446,744,073,709,551,615 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "metadata entries"),
    ],
)
def test_headers_that_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        GGUFFile(path)


def one_entry(body: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + body + bytes(32)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (one_entry(struct.pack("<Q", 2**62)), "claims to be"),
        (one_entry(text("k") + struct.pack("<IQ", 8, 2**62)), "truncated"),
        (one_entry(text("k") + struct.pack("<IIQ", 9, 8, 2**60)), "strings in 'k'"),
        (one_entry(text("k") + struct.pack("<IIQ", 9, 12, 2**61)), "truncated"),
        (one_entry(text("k") + struct.pack("<IIQ", 9, 9, 1)), "element type 9"),
        (one_entry(text("k") + struct.pack("<I", 77)), "value type 77"),
        (one_entry(text("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (text("k") + value(1)) * 2, "appears twice"),
    ],
)
def test_hostile_metadata(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        GGUFFile(path)


def one_tensor(line: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + line + bytes(64)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (text("t") + struct.pack("<I", 2**31), "dimensions"),
        (text("t") + struct.pack("<I", 0), "dimensions"),
        (text("t") + struct.pack("<IQIQ", 1, 2**63, 0, 0), "should end at byte"),
        (text("t") + struct.pack("<IQIQ", 1, 4, 0, 2**63), "should end at byte"),
        (text("t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), "should end at byte"),
        (text("t") + struct.pack("<IQIQ", 1, 0, 0, 0), "positive sizes"),
        (text("t") + struct.pack("<IQIQ", 1, 31, 2, 0), "multiples of 32"),
        (text("t") + struct.pack("<IQIQ", 1, 32, 4, 0), "unknown type number 4"),
    ],
)
def test_hostile_tensor_directory(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(one_tensor(line))
    with pytest.raises(CheckpointError, match=reason):
        GGUFFile(path)


@pytest.mark.parametrize("alignment", [0, 2**31])
def test_hostile_alignment(tmp_path: Path, alignment: int) -> None:
    path = write_gguf(tmp_path / "f.gguf", {"general.alignment": alignment}, {})
    with pytest.raises(CheckpointError, match="alignment"):
        GGUFFile(path)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    tiny_gguf(whole)
    content = whole.read_bytes()
    rng = random.Random(1)
    # The last tensor may be followed by padding, which nobody misses.
    for length in [0, 3, 4, 8, 23, 24, *(rng.randrange(len(content) - 64) for _ in range(150))]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            GGUFFile(cut)


def test_flipped_header_bytes_never_crash(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    tiny_gguf(whole)
    content = bytearray(whole.read_bytes())
    rng = random.Random(2)
    refused = 0
    for _ in range(200):
        changed = content.copy()
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(8, 6000)] = rng.randrange(256)
        path = tmp_path / "changed.gguf"
        path.write_bytes(changed)
        try:
            with GGUFFile(path) as file:
                for info in file.tensors.values():
                    file.data(info)
        except CheckpointError:
            refused += 1
    assert refused > 50


def test_a_folder_or_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(CheckpointError, match="cannot read"):
            GGUFFile(path)
