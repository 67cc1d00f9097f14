"""Several ranks on this machine, connected as machines would be: their answers, and what happens when one dies."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import mlx.core as mx
import mlx_lm
import pytest
import quick
from mlx.utils import tree_flatten
from ranks.started import SECONDS as SECONDS_OF_A_GROUP
from ranks.started import finish, free_ports, program, ranks
from tiny import tiny_target
from tiny_families import FAMILY_CONFIGS, family_target, unavailable
from tiny_folder import write_drafter, write_target

from dflash_mlx.generation import generate
from dflash_mlx.loading import load_pair
from dflash_mlx.runtime import backend
from dflash_mlx.sampling import SamplingParams
from dflash_mlx.targets.examination import checksums
from dflash_mlx.targets.whole_layers import takes_whole_layers

pytestmark = pytest.mark.slow
QUICK = [sys.executable, quick.__file__]
COMMAND = [*QUICK, "dflash_mlx.cli.app"]
# How many answers in a row the long tests compare.
ANSWERS = int(os.environ.get("RANKS_ANSWERS", "200"))
# How long that may take on a busy machine.
SECONDS_OF_ANSWERS = 1200 + 60 * ANSWERS
# Families of tiny models that the installed mlx-lm has.
THERE = [name for name in FAMILY_CONFIGS if unavailable(name) is None]
# Tokens of a client's answer.
LENGTH = 10
# What MLX says when another rank is gone, in three pieces.
PEER = "[ring] Socket 5 was closed by the peer"
# How soon all ranks must have ended after one of them has died.
SECONDS = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def llama(folder):
    return str(write_target(folder / "llama"))


@pytest.fixture(scope="module")
def drafter(folder):
    return str(write_drafter(folder / "drafter"))


@pytest.fixture(scope="module")
def in_layers(folder):
    """A target that can be divided by whole layers only."""
    target = family_target("qwen3_next")
    if not takes_whole_layers(target.model, target.layers):
        pytest.skip(f"mlx-lm {mlx_lm.__version__} cannot divide qwen3_next")
    return str(write_target(folder / "qwen3_next", family="qwen3_next"))


@pytest.fixture(scope="module")
def recurrent(folder):
    return str(write_target(folder / "qwen3_5", family="qwen3_5"))


def shared_by(count, folder):
    """A target whose heads so many ranks can share."""
    target = tiny_target(
        "llama", num_attention_heads=2 * count, num_key_value_heads=count, head_dim=8, intermediate_size=16 * count
    )
    path = folder / f"shared by {count}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(target.config))
    weights = dict(tree_flatten(target.model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    return str(path)


@pytest.fixture(scope="module")
def for_three(folder):
    return shared_by(3, folder)


def reports(processes, *, seconds=SECONDS_OF_A_GROUP):
    """What rank 0 printed, once all have ended well; the others said one line."""
    (code, out, err), *others = finish(processes, seconds=seconds)
    assert code == 0, err
    assert [(code, out, len(err.splitlines())) for code, out, err in others] == [(0, "", 1)] * len(others)
    return [json.loads(line) for line in out.splitlines()]


def check_answers(found, wanted=1):
    """Some are more than was asked for: they come by the kind."""
    assert [report["wrong"] for report in found] == [[]] * len(found)
    for report in found:
        assert report["answers"] >= max(wanted, 18)
        assert report["left"] > 0
        assert report["cached"] > 0


@pytest.mark.long
def test_many_answers_of_two_ranks(folder, llama, recurrent):
    with ranks(2, *program("many_answers.py", "1", llama, recurrent), folder=folder) as processes:
        check_answers(reports(processes))


def test_many_answers_of_two_ranks_with_whole_layers(folder, in_layers):
    with ranks(2, *program("many_answers.py", "1", in_layers), folder=folder) as processes:
        check_answers(reports(processes))


@pytest.mark.long
def test_many_answers_of_three_ranks(folder, for_three):
    with ranks(3, *program("many_answers.py", "1", for_three), folder=folder) as processes:
        check_answers(reports(processes))


@pytest.mark.long
def test_many_answers_of_four_ranks(folder):
    with ranks(4, *program("many_answers.py", "1", shared_by(4, folder)), folder=folder) as processes:
        check_answers(reports(processes))


@pytest.mark.long
def test_answers_of_every_family_that_can_be_divided(folder):
    """At least ANSWERS in a row, each family's in its turn."""
    check_families([name for name in THERE if hasattr(family_target(name).model, "shard")], 2, folder)


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3])
def test_answers_of_families_that_are_divided_by_whole_layers(count, folder):
    """At least ANSWERS in a row. Three machines do not divide the four heads of those that have a `shard`, too."""
    targets = {name: family_target(name) for name in THERE}
    families = [name for name, target in targets.items() if takes_whole_layers(target.model, target.layers)]
    check_families(
        [name for name in families if count == 3 or not hasattr(targets[name].model, "shard")], count, folder
    )


def check_families(families, count, folder):
    if not families:
        pytest.skip(f"mlx-lm {mlx_lm.__version__} has none of these families")
    place = folder / f"{count} ranks, {len(families)} families"
    targets = [str(write_target(place / str(number), family=name)) for number, name in enumerate(families)]
    each = math.ceil(ANSWERS / len(families))
    with ranks(count, *program("many_answers.py", str(each), *targets), folder=folder) as processes:
        found = reports(processes, seconds=SECONDS_OF_ANSWERS)
    print({family: (report["answers"], report["left"]) for family, report in zip(families, found, strict=True)})
    check_answers(found, each)


@pytest.mark.parametrize("each", [3, pytest.param(ANSWERS // 4, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["llama", pytest.param("in_layers", marks=pytest.mark.long)])
def test_four_clients_of_a_server(kind, each, folder, drafter, request):
    """Each asks in turn, and leaves every third answer in the middle; the others are those of one machine."""
    model = request.getfixturevalue(kind)
    alone = load_pair(model=model, draft=False)
    words = ["serve", "--model", model, "--draft-model", drafter, "--port", "0", "--max-active", "4"]
    with ranks(2, *COMMAND, *words, folder=folder) as processes:
        url = (
            next(line for line in processes[0].stderr if "listening on" in line)
            .partition("listening on ")[2]
            .split()[0]
        )
        with httpx.Client(base_url=url, timeout=SECONDS_OF_A_GROUP) as http, ThreadPoolExecutor(4) as clients:
            found = [pair for one in clients.map(lambda seed: ask(http, seed, each), range(4)) for pair in one]
        processes[0].send_signal(signal.SIGINT)
        codes = [code for code, _, _ in finish(processes)]
    for prompt, text in found:
        whole = generate(alone, alone.encode_prompt(prompt), SamplingParams(max_tokens=LENGTH), draft=False)
        assert text == whole.text
    assert (len(found), codes) == (4 * (each - each // 3), [0, 0])


def ask(http, seed, count):
    """A client's prompts and answers."""
    rng, found = random.Random(seed), []
    for number in range(count):
        prompt = "".join(rng.choices("abcdefghij ", k=rng.randint(1, 20)))
        wanted = {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0}
        if number % 3 == 2:
            with http.stream("POST", "/v1/completions", json={**wanted, "max_tokens": 500, "stream": True}) as answer:
                next(answer.iter_lines())
        else:
            found.append((prompt, http.post("/v1/completions", json=wanted).json()["choices"][0]["text"]))
    return found


@pytest.mark.parametrize("kind", ["llama", pytest.param("in_layers", marks=pytest.mark.long)])
def test_the_command_gives_the_answer_of_one_machine(kind, folder, drafter, request):
    model = request.getfixturevalue(kind)
    words = ["generate", "hello", "--model", model, "--draft-model", drafter, "--max-tokens", "20", "--json"]
    with ranks(2, *COMMAND, *words, folder=folder) as processes:
        [found] = reports(processes)
    alone = generate(load_pair(model=model, draft=False), "hello", SamplingParams(max_tokens=20), draft=False)
    assert (found["mode"], found["token_ids"]) == ("dflash+ngram", alone.token_ids)


def test_a_conversation_through_the_launcher(llama, drafter):
    """It is stopped in its first answer, and ends where its input does."""
    launcher = [str(Path(sys.executable).parent / "mlx.launch"), "-n", "2", "--starting-port", str(free_ports(2)[0])]
    chat = ["chat", "--model", llama, "--draft-model", drafter, "--max-tokens", "1000", "--stats"]
    words = [*launcher, "--", *QUICK, "dflash_mlx.cli.launched", *chat]
    start = "import sys; from dflash_mlx.cli.launch import run_launcher; run_launcher(sys.argv[1:])"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", start, *words], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        begun = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(b"/set max-tokens 5\nagain\n", timeout=SECONDS_OF_A_GROUP)
    assert process.returncode == 0
    first, second, end = (begun + out).decode().split("\n")
    params = SamplingParams(max_tokens=len(first) + 20)  # of a letter or more each, but for some special ones
    alone = generate(load_pair(model=llama, draft=False), "hello", params, draft=False).text
    assert alone.startswith(first)
    assert (0 < len(first) < len(alone), len(second) > 0, end) == (True, True, "")
    assert b"stopped; what was said stays in the conversation" in err
    assert b"5 tokens (the limit)" in err


def test_the_doctor_looks_at_all_machines(folder, llama):
    with ranks(2, *COMMAND, "doctor", "--model", llama, "--json", folder=folder) as processes:
        (code, out, _), (other, _, _) = finish(processes)
    found = json.loads(out)
    assert (code, other, found["problems"]) == (0, 0, [])
    assert [machine["rank"] for machine in found["machines"]] == [0, 1]
    for machine in found["machines"]:
        assert (machine["files"], machine["wrong_sums"]) == (checksums(Path(llama)), 0)
        assert machine["share"].startswith("a part of every layer")


def test_heads_that_cannot_be_divided_end_all_ranks(folder, llama):
    words = ["generate", "hello", "--model", llama, "--no-draft"]
    with ranks(3, *COMMAND, *words, folder=folder) as processes:
        (code, out, err), *others = finish(processes)
    assert (code, out) == (1, "")
    assert "4 heads (num_attention_heads) cannot be divided by 3 machines" in err.splitlines()[-1]
    assert [len(err.splitlines()) for _, _, err in others] == [1, 1]


@pytest.mark.skipif(backend().kind != "cpu", reason="only on CPUs do MLX's connections wait instead of polling")
def test_a_rank_that_waits_says_that_it_is_there_and_leaves_the_cores_to_others(folder):
    with ranks(2, *program("late.py"), folder=folder) as processes:
        [found] = reports(processes)
    assert found["waited"] > 3
    assert found["still"] < found["waited"] / 2
    assert found["processor"] < found["waited"] / 2


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "what", [*(pytest.param(what, marks=pytest.mark.long) for what in ("idle", "reading")), "drafting"]
)
@pytest.mark.parametrize("kind", ["for_three", pytest.param("in_layers", marks=pytest.mark.long)])
def test_when_a_rank_dies_the_others_end(kind, what, victim, folder, request):
    with ranks(3, *program("busy.py", what, request.getfixturevalue(kind)), folder=folder) as processes:
        assert processes[0].stdout.readline().strip() == str(processes[0].pid)
        time.sleep(random.random())
        processes[victim].kill()
        started = time.perf_counter()
        found = finish(processes)
    assert time.perf_counter() - started < SECONDS
    del found[victim]
    assert [code for code, _, _ in found] == [1, 1]
    for _, _, err in found:
        [said] = [line for line in err.splitlines() if line.startswith("error: ")]
        assert f"rank {victim}" in said
        assert "all ranks stop" in said


def test_why_the_ranks_end_is_not_torn_apart_by_what_mlx_says_of_its_connections():
    done = subprocess.run(program("torn.py"), capture_output=True, text=True)
    *before, begun, said = done.stderr.splitlines()
    assert (done.returncode, said) == (1, "error: no memory; all ranks stop. Start them again.")
    assert begun in ("", "[ring] Socket ", "[ring] Socket 5 ")
    assert set(before) == {PEER}


@pytest.mark.model
@pytest.mark.long
@pytest.mark.timeout(SECONDS_OF_ANSWERS)
def test_answers_of_the_demo_pair_on_three_ranks(folder):
    """At least ANSWERS in a row."""
    with ranks(3, *program("many_answers.py", str(ANSWERS), "demo"), folder=folder) as processes:
        found = reports(processes, seconds=SECONDS_OF_ANSWERS)
    print([(report["answers"], report["left"]) for report in found])
    check_answers(found, ANSWERS)
