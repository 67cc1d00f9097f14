"""The built-in prompts, and prompts from files."""

import json
from pathlib import Path

import pytest

from dflash_mlx.bench.prompts import CATEGORIES, built_in, choose_category, padder, read_prompts, short_prompts, take
from dflash_mlx.errors import UsageError


def test_four_prompts_of_each_category() -> None:
    assert [prompt.name for prompt in built_in()] == [
        f"{category}-{n}" for category in CATEGORIES for n in (1, 2, 3, 4)
    ]
    assert len({prompt.text for prompt in built_in()}) == 24
    # Varied lengths: the longest is several pages, the shortest a sentence or two; and none asks for nothing.
    lengths = sorted(len(prompt.text) for prompt in built_in())
    assert lengths[0] > 60
    assert lengths[-1] > 50 * lengths[0]
    assert {prompt.category for prompt in short_prompts()} == {"chat", "code", "math"}
    assert len(short_prompts()) == 12


def test_a_sample_has_as_many_of_each_category_as_can_be() -> None:
    assert [prompt.name for prompt in take(built_in(), 12)] == [f"{c}-{n}" for c in CATEGORIES for n in (1, 2)]
    assert [p.name for p in take(short_prompts(), 4)] == ["chat-1", "chat-2", "code-1", "math-1"]
    assert take(built_in(), 99) == take(built_in(), 0) == built_in()


def test_context_is_put_before_a_prompt_until_it_is_long_enough() -> None:
    pad = padder(lambda text: len(text.split()))
    for tokens in (200, 20_000):
        padded = pad("What was that?", tokens)
        assert padded.endswith("\n\nWhat was that?")
        assert abs(len(padded.split()) - tokens) < 0.02 * tokens
    assert pad("long enough as it is", 3) == "long enough as it is"


def test_a_file_gives_prompts_with_names_and_categories(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(
        '{"category": "law", "prompt": "Is this contract valid?"}\n\n'
        '{"prompt": "Hello"}\n{"category": "law", "prompt": "And this one?", "name": "second"}\n',
        encoding="utf-8",
    )
    prompts = read_prompts(file)
    assert [(p.name, p.category, p.text) for p in prompts] == [
        ("law-1", "law", "Is this contract valid?"),
        ("other-1", "other", "Hello"),
        ("second", "law", "And this one?"),
    ]
    assert [p.name for p in choose_category(prompts, "law")] == ["law-1", "second"]
    assert choose_category(prompts, None) == prompts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2: expected a JSON object"),
        ('["a list"]', "found list"),
        ('{"category": "chat"}', "'prompt' should be a text that is not empty; found None"),
        ('{"prompt": "  "}', "'prompt' should be a text"),
        ('{"prompt": "x", "category": 3}', "'category' should be a text that is not empty; found 3"),
        ('{"prompt": "x", "catgory": "chat"}', "unknown key 'catgory'"),
        ('{"prompt": "x", "name": "other-1"}', "'other-1' is used twice"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps({"prompt": "fine"}) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(UsageError, match="line 2") as caught:
        read_prompts(file)
    assert message in str(caught.value)


def test_a_missing_or_empty_file_and_an_unknown_category_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the prompts"):
        read_prompts(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(UsageError, match="has no prompts"):
        read_prompts(tmp_path / "empty.jsonl")
    assert [p.name for p in choose_category(built_in(), "math, chat")][3:5] == ["chat-4", "math-1"]
    with pytest.raises(UsageError, match="there are: chat, code, math, translation, extraction, long-context"):
        choose_category(built_in(), "poetry")
