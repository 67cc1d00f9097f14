"""Several ranks on this machine, connected as machines would be: their answers, and what happens when one dies."""

import json
import random
import sys
import time

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from ranks.started import finish, program, ranks
from tiny import tiny_target
from tiny_folder import write_drafter, write_target

from dflash_mlx.generation import generate
from dflash_mlx.loading import load_pair
from dflash_mlx.sampling import SamplingParams

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "dflash_mlx.cli.app"]
# How soon all ranks must have ended after one of them has died.
SECONDS = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def llama(folder):
    return str(write_target(folder / "llama"))


@pytest.fixture(scope="module")
def recurrent(folder):
    return str(write_target(folder / "qwen3_5", family="qwen3_5"))


@pytest.fixture(scope="module")
def for_three(folder):
    """A target whose heads three ranks can share."""
    target = tiny_target("llama", num_attention_heads=6, num_key_value_heads=3, head_dim=8, intermediate_size=48)
    path = folder / "three"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(target.config))
    weights = dict(tree_flatten(target.model.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    return str(path)


def reports(processes):
    """What rank 0 printed, once all have ended well; the others said one line."""
    (code, out, err), *others = finish(processes)
    assert code == 0, err
    assert [(code, out, len(err.splitlines())) for code, out, err in others] == [(0, "", 1)] * len(others)
    return [json.loads(line) for line in out.splitlines()]


def check_answers(found):
    assert all(report["answers"] >= 14 and report["cached"] > 0 for report in found)
    assert [report["wrong"] for report in found] == [[]] * len(found)


def test_many_answers_of_two_ranks(folder, llama, recurrent):
    with ranks(2, *program("many_answers.py", llama, recurrent), folder=folder) as processes:
        check_answers(reports(processes))


@pytest.mark.long
def test_many_answers_of_three_ranks(folder, for_three):
    with ranks(3, *program("many_answers.py", for_three), folder=folder) as processes:
        check_answers(reports(processes))


def test_four_clients_of_a_server(folder, llama):
    with ranks(2, *program("serving_ranks.py", llama), folder=folder) as processes:
        assert reports(processes) == [{"answers": 8, "wrong": []}]


def test_the_command_gives_the_answer_of_one_machine(folder, llama):
    drafter = str(write_drafter(folder / "drafter"))
    words = ["generate", "hello", "--model", llama, "--draft-model", drafter, "--max-tokens", "20", "--json"]
    with ranks(2, *COMMAND, *words, folder=folder) as processes:
        [found] = reports(processes)
    alone = generate(load_pair(model=llama, draft=False), "hello", SamplingParams(max_tokens=20), draft=False)
    assert (found["mode"], found["token_ids"]) == ("dflash", alone.token_ids)


def test_heads_that_cannot_be_divided_end_all_ranks(folder, llama):
    words = ["generate", "hello", "--model", llama, "--no-draft"]
    with ranks(3, *COMMAND, *words, folder=folder) as processes:
        (code, out, err), *others = finish(processes)
    assert (code, out) == (1, "")
    assert "4 heads (num_attention_heads) cannot be divided by 3 machines" in err.splitlines()[-1]
    assert [len(err.splitlines()) for _, _, err in others] == [1, 1]


@pytest.mark.parametrize(("what", "victim"), [("idle", 1), ("reading", 0), ("drafting", 1)])
def test_when_a_rank_dies_the_others_end(what, victim, folder, llama):
    with ranks(2, *program("busy.py", what, llama), folder=folder) as processes:
        assert processes[0].stdout.readline().strip() == str(processes[0].pid)
        time.sleep(random.random())
        processes[victim].kill()
        started = time.perf_counter()
        found = finish(processes)
    assert time.perf_counter() - started < SECONDS
    code, _, err = found[1 - victim]
    assert code == 1
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert said == [line for line in said if f"rank {victim}" in line and "all ranks stop" in line]
    assert len(said) == 1


@pytest.mark.model
@pytest.mark.long
def test_the_demo_pair_on_three_ranks(folder, demo_pair):
    words = ["generate", "Why is the sky blue?", "--pair", "demo", "--max-tokens", "24", "--json"]
    with ranks(3, *COMMAND, *words, folder=folder) as processes:
        [found] = reports(processes)
    alone = generate(demo_pair, "Why is the sky blue?", SamplingParams(max_tokens=24), draft=False)
    assert found["token_ids"] == alone.token_ids
