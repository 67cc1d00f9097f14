"""`generate --compare`, and the other options of `generate` that change how an answer is made."""

import io
import json

import pytest
from rich.console import Console

from dflash_mlx.cli.comparison import comparison, verdict
from dflash_mlx.cli.side_by_side import SideBySide


def test_the_answer_is_made_twice_and_compared(run, fake):
    code, out, _ = run("generate", "hi", "--pair", "fake", "--compare", "--width", "3", "--tree")
    assert code == 0
    text = "one two three four five six \n"
    assert out.startswith(f"plain decoding:\n{text}\nwith drafting:\n{text}\n")
    assert "acceptance length 3.00" in out
    assert out.splitlines()[-1] == "the words are the same: all 6 tokens are identical"
    assert [(a["draft"], a["width"], a["tree"]) for a in fake.asked] == [(False, None, False), (True, 3, True)] * 2
    assert [a["params"].max_tokens for a in fake.asked] == [8, 8, 256, 256]  # the first two warm up


def beside(width, height, *, words, status=""):
    """What is shown while two answers grow, and at the end; the second one has half of the words."""
    live, shown = io.StringIO(), io.StringIO()
    with SideBySide(["left", "right"], console=Console(file=shown, width=width, height=height)) as both:
        for number, column in enumerate(both.columns, 1):
            for word in range(words // number):
                column.write(f"word{word} ", status)
        Console(file=live, width=width, height=height).print(both._newest())
    return live.getvalue().splitlines(), shown.getvalue().splitlines()


def test_answers_stand_beside_each_other():
    live, shown = beside(80, 24, words=8, status="  9 tok/s")
    assert [line.split() for line in shown[:2]] == [
        ["left", "right"],
        ["word0", "word1", "word2", "word3", "word4", "word5", "word0", "word1", "word2", "word3"],
    ]
    assert shown[1].index("word0", 1) == 40
    assert [line.split() for line in shown[2:]] == [["word6", "word7"]]
    assert live[:3] == shown[:3]
    assert live[3].split() == ["9", "tok/s", "9", "tok/s"]


def test_of_long_answers_the_newest_rows_are_shown_until_they_are_whole():
    live, shown = beside(80, 12, words=400, status="9 tok/s")
    assert len(live) == 10
    assert "word399" in live[-2]
    assert "word0 " not in "".join(live)
    assert sum(line.count("word") for line in shown) == 600
    assert max(map(len, shown)) <= 80


def test_as_json(run, fake):
    code, out, _ = run("generate", "hi", "--pair", "fake", "--compare", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["plain"]["mode"], found["drafted"]["mode"]) == ("plain", "dflash")
    assert (found["speedup"], found["same_tokens"], found["first_difference"]) == (1.0, True, None)


def test_sampled_answers_are_compared_with_a_seed(run, fake):
    _, _, err = run("generate", "hi", "--pair", "fake", "--compare", "--temperature", "1")
    assert "using --seed 0" in err
    assert {a["params"].seed for a in fake.asked} == {0}


@pytest.mark.parametrize(
    ("a", "b", "place"), [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1)]
)
def test_the_first_difference(a, b, place):
    plain, drafted = ({"generation_tps": 10.0, "token_ids": tokens} for tokens in (a, b))
    assert comparison(plain, drafted)["first_difference"] == place


def test_a_difference_is_said():
    plain = {"generation_tps": 10.0, "token_ids": [1, 2], "acceptance": None}
    drafted = {"generation_tps": 25.0, "token_ids": [1, 3], "acceptance": None}
    lines = verdict(plain, drafted)
    assert lines[1].endswith("25.0 tok/s, 2.50 times as fast")
    assert "differ after 1 equal tokens" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare", "--no-draft"], "give one of them"),
        (["--width", "3", "--no-draft"], "give one of them"),
        (["--tree"], "--tree needs --width"),
        (["--width", "0"], "--width is 0; expected a whole number of at least 1"),
        (["--schema", "/no/such.json"], "cannot read /no/such.json"),
    ],
)
def test_misuse_before_anything_loads(run, arguments, words):
    code, out, err = run("generate", "hi", "--pair", "no-such-pair", *arguments)
    assert (code, out) == (2, "")
    assert words in err


@pytest.mark.parametrize(("text", "words"), [("{", "is not JSON"), ("[1]", "holds no JSON schema")])
def test_a_file_that_is_no_schema(run, tmp_path, text, words):
    (tmp_path / "s.json").write_text(text)
    code, _, err = run("generate", "hi", "--pair", "no-such-pair", "--schema", str(tmp_path / "s.json"))
    assert code == 2
    assert words in err


def test_a_schema_reaches_the_decoding(run, fake, tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_mlx.decoding.constraint.json_constraint", lambda pair, schema: schema)
    (tmp_path / "s.json").write_text('{"type": "object"}')
    code, _, _ = run("generate", "hi", "--pair", "fake", "--schema", str(tmp_path / "s.json"))
    assert code == 0
    assert fake.asked[0]["constraint"] == {"type": "object"}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.usefixtures("demo_pair")
def test_the_demo_pair_answers_in_a_schema_and_compares(run, tmp_path, monkeypatch, demo_home):
    monkeypatch.setenv("DFLASH_MLX_HOME", str(demo_home))
    schema = {"type": "object", "properties": {"age": {"enum": [7, 8]}}, "required": ["age"]}
    (tmp_path / "s.json").write_text(json.dumps({**schema, "additionalProperties": False}))
    arguments = ("--schema", str(tmp_path / "s.json"), "--max-tokens", "40", "--dtype", "float32")
    code, out, err = run("generate", "Ada is 7.", "--pair", "demo", *arguments, "--compare", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert json.loads(found["drafted"]["text"])["age"] in (7, 8)
    assert found["same_tokens"] is True
