"""Damaged files of every kind that is read: one clear error or a value; never a traceback, a hang or much memory.

FUZZ_EXAMPLES=1000 in the environment tries that many of each instead of the usual few.
"""

import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from bench.fake import ratios
from cases import CASES, make_weights, write_folder
from fuzzing import VALUES, damaged_bytes, damaged_json, fuzz
from gguf_writer import tiny_gguf, tiny_metadata, tiny_tensors, write_gguf
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import BITS, torch_file
from tiny_folder import write_target

from dflash_mlx.bench import prompts
from dflash_mlx.bench.analyse import analyse
from dflash_mlx.bench.compare import compare, sentences
from dflash_mlx.cli.bench_report import read_result
from dflash_mlx.cli.line_input import read_history
from dflash_mlx.drafters.checkpoint import load_drafter
from dflash_mlx.drafters.convert import convert_drafter
from dflash_mlx.drafters.torch_file import read_mask_embedding
from dflash_mlx.errors import DFlashError
from dflash_mlx.hub.folder import check_folder
from dflash_mlx.hub.gguf import convert_gguf
from dflash_mlx.hub.memory import cache_bytes
from dflash_mlx.hub.naming import families_of
from dflash_mlx.hub.registry import ModelSource
from dflash_mlx.hub.resolve import local_facts
from dflash_mlx.targets.loading import load_target
from dflash_mlx.training import sources
from dflash_mlx.training.checkpoint import load_state
from dflash_mlx.training.state import read_json
from dflash_mlx.training.store import Conversation, read_shard, write_shard

SECONDS, BYTES = 20.0, 500_000_000  # far more than any of these small files needs on a busy machine


@contextmanager
def bounded() -> Iterator[None]:
    """An error of this project's kind and one line, or none; little memory and time."""
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(DFlashError):
        yield
    assert time.monotonic() - started < SECONDS
    # Kilobytes on Linux, bytes on macOS: there the limit is looser.
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < BYTES


@contextmanager
def file(name: str, content: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        yield path


def made(write: Callable[[Path], object], name: str = "file") -> bytes:
    """The bytes of the file that `write` makes."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / name)
        return (Path(folder) / name).read_bytes()


# -- GGUF ------------------------------------------------------------------------------------------------------------

GGUF = made(tiny_gguf)
METADATA = tiny_metadata()
TENSORS, _ = tiny_tensors(np.random.default_rng(0))
GGUF_VALUES = (
    st.booleans()
    | st.integers(0, 2**32 - 1)
    | st.floats(width=32)
    | st.text(max_size=5)
    | st.lists(st.text(max_size=3), min_size=1, max_size=3)
    | st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=3)
)


@fuzz(40)
@given(raw=damaged_bytes(GGUF))
def test_gguf_bytes(raw: bytes) -> None:
    with file("model.gguf", raw) as path, bounded():
        convert_gguf(path, path.parent)


@fuzz(40)
@given(changes=st.dictionaries(st.sampled_from(sorted(METADATA)), GGUF_VALUES | st.none(), min_size=1, max_size=3))
def test_gguf_settings(changes: dict[str, Any]) -> None:
    metadata = {key: value for key, value in (METADATA | changes).items() if value is not None}
    with file("model.gguf", b"") as path, bounded():
        write_gguf(path, metadata, TENSORS)
        convert_gguf(path, path.parent)


# -- folders of drafters and targets -----------------------------------------------------------------------------------

DRAFTER = made(lambda path: write_folder(path.parent, CASES["full"]), "model.safetensors")


def speculators(name: str) -> dict[str, Any]:
    """A case's config in the layout of speculators."""
    with tempfile.TemporaryDirectory() as folder:
        source = write_folder(Path(folder) / "source", CASES[name])
        convert_drafter(source, Path(folder) / "out", to="speculators", target="a/b")
        return dict(json.loads((Path(folder) / "out" / "config.json").read_text()))


CONFIGS = [*CASES.values(), *map(speculators, ("full", "all sliding", "second"))]
TARGET = Path(tempfile.mkdtemp()) / "target"
QUANTIZATION = {"group_size": 32, "bits": 4, "mode": "affine"}


@pytest.fixture(scope="module", autouse=True)
def target() -> Path:
    return TARGET if TARGET.exists() else write_target(TARGET)


@fuzz(60)
@given(raw=damaged_bytes(DRAFTER))
def test_safetensors(raw: bytes) -> None:
    with file("model.safetensors", raw) as path, bounded():
        (path.parent / "config.json").write_text(json.dumps(CASES["full"]))
        check_folder(path.parent)
        load_drafter(path.parent, dtype=mx.float32)


@fuzz(150)
@given(config=st.sampled_from(CONFIGS).flatmap(damaged_json))
def test_drafter_configs(config: dict[str, Any]) -> None:
    with file("config.json", json.dumps(config).encode()) as path, bounded():
        mx.save_safetensors(str(path.parent / "model.safetensors"), DRAFTER_WEIGHTS)
        check_folder(path.parent)
        load_drafter(path.parent, dtype=mx.float32)


DRAFTER_WEIGHTS = {name: mx.array(values) for name, values in make_weights(CASES["full"]).items()}


@fuzz(60)
@given(data=st.data())
def test_target_configs(data: st.DataObject) -> None:
    wanted = json.loads((TARGET / "config.json").read_text()) | {"quantization": QUANTIZATION, "auto_map": {"a": "b"}}
    if data.draw(st.booleans()):
        wanted = {**wanted, "text_config": dict(wanted), "layer_types": ["full_attention"] * 4}
    config = data.draw(damaged_json(wanted))
    with file("config.json", json.dumps(config).encode()) as path, bounded():
        (path.parent / "model.safetensors").symlink_to(TARGET / "model.safetensors")
        source = ModelSource(kind="folder", path=str(path.parent))
        check_folder(path.parent)
        families_of(config)
        local_facts(source)
        cache_bytes(config)
        load_target(path.parent, dtype="float32")


@fuzz(60)
@given(data=st.data())
def test_json_bytes(data: st.DataObject) -> None:
    """Damage below the level of JSON, for each JSON file of a folder."""
    name = data.draw(st.sampled_from(["config.json", "model.safetensors.index.json"]))
    index = {"weight_map": {"a": "model.safetensors"}}
    raw = data.draw(damaged_bytes(json.dumps(CASES["full"] if name == "config.json" else index).encode()))
    with file("model.safetensors", DRAFTER) as path, bounded():
        (path.parent / "config.json").write_text(json.dumps(CASES["full"]))
        (path.parent / name).write_bytes(raw)
        check_folder(path.parent)


MASK = made(lambda path: torch_file(path, lambda row: row, BITS), "mask_embedding.pt")


@fuzz(60)
@given(raw=damaged_bytes(MASK))
def test_mask_embeddings(raw: bytes) -> None:
    with file("mask_embedding.pt", raw) as path, bounded():
        read_mask_embedding(path, 3)


# -- prompts and conversations -----------------------------------------------------------------------------------------

BENCH = [{"category": "chat", "prompt": "Hello", "name": "a"}, {"prompt": "x"}]
CHATS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a"},
]
READERS = {
    "bench": (prompts.read_prompts, BENCH),
    "prompts": (sources.read_prompts, CHATS),
    "conversations": (sources.read_conversations, CHATS[:2]),
    "topics": (sources.read_topics, CHATS),
}


@fuzz(60)
@given(data=st.data())
def test_results_of_bench(data: st.DataObject) -> None:
    good = json.loads(json.dumps(ratios([1.5] * 6).to_json()))
    raw = data.draw(damaged_json(good).map(lambda value: json.dumps(value).encode()) | damaged_bytes(lines([good])))
    with file("results.json", raw) as path, bounded():
        found = read_result(path)
        sentences(compare(found, ratios([1.5] * 6)))
        assert len(analyse(found)) < 100


def lines(values: list[Any]) -> bytes:
    return "".join(f"{json.dumps(value)}\n" for value in values).encode()


@pytest.mark.parametrize("name", READERS)
@fuzz(60)
@given(data=st.data())
def test_jsonl(name: str, data: st.DataObject) -> None:
    reader, values = READERS[name]
    changed = [data.draw(damaged_json(value)) for value in values] + data.draw(st.lists(VALUES, max_size=1))
    raw = data.draw(st.just(lines(changed)) | damaged_bytes(lines(values)))
    with file("file.jsonl", raw) as path, bounded():
        found = reader(path)
        assert found
        if name != "bench":
            assert all(isinstance(text, str) for text in texts(found))


def texts(found: Any) -> list[Any]:
    """All that should be text in what was read."""
    return [text for chat in found for text in ([chat] if isinstance(chat, str) else map_values(chat))]


def map_values(chat: list[dict[str, str]]) -> list[str]:
    return [value for message in chat for value in message.values()]


@fuzz(30)
@given(raw=damaged_bytes(b'"one"\n"two"\n'))
def test_history(raw: bytes) -> None:
    with file("history", raw) as path:
        assert all(isinstance(entry, str) for entry in read_history(path))


# -- what a training keeps ---------------------------------------------------------------------------------------------

SHARD = made(
    lambda path: write_shard(path, [Conversation(np.arange(9), ((2, 4), (6, 9)), 1)] * 2, {"seconds": 1.0}, wide=False),
    "shard.npz",
)
PROGRESS = {"step": 1, "seconds": 1.0, "epoch": 0, "index": 0, "conversations": 1, "losses": [], "replays": []}


def state(progress: Any) -> bytes:
    arrays = {"parameters.a.b": mx.ones(3), "optimizer.step": mx.array(1), "features.sizes": mx.ones(2)}
    return made(
        lambda path: mx.save_safetensors(str(path), arrays, {"progress": json.dumps(progress)}), "state.safetensors"
    )


@fuzz(60)
@given(raw=damaged_bytes(SHARD))
def test_shards(raw: bytes) -> None:
    with file("shard.npz", raw) as path, bounded():
        read_shard(path)


@fuzz(60)
@given(raw=damaged_bytes(state(PROGRESS)) | damaged_json(PROGRESS).map(state))
def test_states(raw: bytes) -> None:
    with file("state.safetensors", raw) as path, bounded():
        load_state(path)


@fuzz(30)
@given(raw=damaged_bytes(b'{"key": "a", "replay": null, "answers": []}'))
def test_logs(raw: bytes) -> None:
    with file("measured.json", raw) as path, bounded():
        read_json(path)
