"""The built-in prompts, and prompts from files."""

import json
from pathlib import Path

import pytest

from dflash_mlx.bench.prompts import BUILT_IN, choose_category, read_prompts
from dflash_mlx.errors import UsageError


def test_four_prompts_each_of_chat_code_and_math() -> None:
    assert [prompt.name for prompt in BUILT_IN] == [
        f"{category}-{n}" for category in ("chat", "code", "math") for n in (1, 2, 3, 4)
    ]
    assert len({prompt.text for prompt in BUILT_IN}) == 12
    # Varied lengths: the longest is a page, the shortest a sentence or two; and none asks for nothing.
    lengths = sorted(len(prompt.text) for prompt in BUILT_IN)
    assert lengths[0] > 60
    assert lengths[-1] > 5 * lengths[0]


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
    with pytest.raises(UsageError, match="there are: chat, code, math"):
        choose_category(BUILT_IN, "poetry")
