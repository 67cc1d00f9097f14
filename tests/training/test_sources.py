"""Files of prompts, topics and conversations, and what becomes of them."""

import json

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer
from tiny import plain_tokens
from tiny_folder import write_tokenizer

from dflash_mlx.errors import DFlashError, UsageError
from dflash_mlx.loading import load_pair
from dflash_mlx.training import TrainOptions, run
from dflash_mlx.training.sources import (
    encode_conversation,
    encode_prompts,
    read_conversations,
    read_prompts,
    read_topics,
)
from dflash_mlx.training.store import ConversationStore
from dflash_mlx.training.template import chat_frame

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture
def tokenizer(tmp_path):
    write_tokenizer(tmp_path)
    return load_tokenizer(tmp_path, eos_token_ids=[2])


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_prompts_in_every_form(tmp_path):
    user = [{"role": "user", "content": "hi"}]
    assert read_prompts(write(tmp_path / "p.txt", "hi", "", '{"x": 1}')) == [
        user,
        [{"role": "user", "content": '{"x": 1}'}],
    ]
    lines = [{"prompt": "hi"}, {"question": "hi"}, {"messages": CHAT}, CHAT[:1]]
    lines.append({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]})
    assert read_prompts(write(tmp_path / "p.jsonl", *lines)) == [user] * 5
    longer = [*CHAT, {"role": "user", "content": "and"}]
    assert read_prompts(write(tmp_path / "q.jsonl", {"messages": longer})) == [longer]


@pytest.mark.parametrize(
    ("read", "lines", "message"),
    [
        (read_prompts, ['{"prompt": "a"}', "{half"], "line 2: expected a JSON object"),
        (read_prompts, ['{"other": 1}'], "line 1: expected `prompt` or `messages`"),
        (read_prompts, ['{"messages": [{"role": "system", "content": "x"}]}'], "line 1: expected a chat with a user"),
        (read_prompts, ['{"messages": [{"text": "x"}]}'], "line 1: expected messages with role and content"),
        (read_prompts, [], "is empty"),
        (read_topics, [], "is empty"),
        (read_conversations, ['{"messages": [{"role": "user", "content": "x"}]}'], "line 1: expected an assistant"),
    ],
)
def test_lines_that_cannot_be_read_are_named(tmp_path, read, lines, message):
    with pytest.raises(UsageError, match=message):
        read(write(tmp_path / "x.jsonl", *lines))


def test_prompts_are_what_the_pair_would_encode(tokenizer):
    chats = [CHAT[:1], [{"role": "user", "content": "x" * 50}]]
    found = encode_prompts(chats, tokenizer, thinking="auto", longest=20)
    assert found == [tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True)]


def test_conversations_have_the_answers_as_spans(tokenizer):
    chat = [*CHAT, {"role": "user", "content": "and"}, {"role": "assistant", "content": "no."}]
    frame = chat_frame(tokenizer)
    found = encode_conversation(chat, tokenizer, frame, thinking="auto", max_length=100)
    texts = [tokenizer.decode(found.tokens[start:end].tolist()) for start, end in found.spans]
    assert texts == ["yes<|im_end|>", "no.<|im_end|>"]
    assert not found.greedy
    cut = encode_conversation(chat, tokenizer, frame, thinking="auto", max_length=found.spans[1][0] + 1)
    assert [end - start for start, end in cut.spans] == [4, 1]
    assert len(cut.tokens) == cut.spans[1][1]


def options(target, out, **changes):
    common = {"data_batch": 6, "max_length": 60, "max_user_tokens": 6, "layers": 1, "block_size": 4, "taps": (1, 3)}
    common |= {"steps": 2, "batch_size": 2, "anchors": 4, "measure": 0, "holdout": 0.1}
    return TrainOptions(model=str(target), out=out, **common | changes)


def stored(out):
    return ConversationStore(out / "work" / "data").conversations


def test_prompts_are_answered_once_each(target_folder, tmp_path):
    texts = [f"{i} prompt" for i in range(15)]
    chosen = options(target_folder, tmp_path / "out", prompts=write(tmp_path / "p.txt", *texts), greedy_share=1.0)
    run(chosen, quiet=True)
    pair = load_pair(model=str(target_folder), draft=False)
    prompts = [pair.encode_chat([{"role": "user", "content": text}]) for text in texts]
    conversations = stored(chosen.out)
    assert sorted(c.tokens[: c.spans[0][0]].tolist() for c in conversations) == sorted(prompts)
    for c in conversations[:4]:
        (start, end) = c.spans[0]
        tokens = c.tokens.tolist()
        assert tokens[start:end] == plain_tokens(pair.target, tokens[:start], end - start, pair.eos_ids)
    # All prompts are used up: running again with a larger budget finds nothing to add and goes on.
    run(options(target_folder, chosen.out, prompts=chosen.prompts, greedy_share=1.0, steps=3), quiet=True)
    assert len(stored(chosen.out)) == len(conversations)


def user_turns(target_folder, out, **given):
    chosen = options(target_folder, out, data_tokens=600, **given)
    run(chosen, quiet=True)
    tokenizer = load_pair(model=str(target_folder), draft=False).tokenizer
    return [tokenizer.decode(c.tokens[: c.spans[0][0]].tolist()) for c in stored(chosen.out)]


def test_topics_begin_a_share_of_the_user_turns(target_folder, tmp_path):
    topics = ["why ", "how is "]
    path = write(tmp_path / "t.txt", *topics)
    begun = {}
    for share in (1.0, 0.5):
        turns = user_turns(target_folder, tmp_path / str(share), topics=path, topics_share=share)
        assert turns
        begun[share] = [next((t for t in ("why", "how is") if f"user {t}" in turn), None) for turn in turns]
    assert set(begun[1.0]) == {"why", "how is"}
    assert set(begun[0.5]) == {"why", "how is", None}


def test_finished_conversations_are_taken_as_they_are(target_folder, tmp_path):
    rng = np.random.default_rng(0)
    answers = ["".join(rng.choice(list("abc "), 9)) for _ in range(12)]
    chats = [
        [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": answer}]
        for i, answer in enumerate(answers)
    ]
    path = write(tmp_path / "c.jsonl", *({"messages": chat} for chat in [*chats, chats[0]]))
    chosen = options(target_folder, tmp_path / "out", conversations=path)
    result = run(chosen, quiet=True)
    assert len(stored(chosen.out)) == len(set(answers))
    assert result.facts["data"]["origin"] == "from c.jsonl"
    assert result.facts["data"]["greedy"] == 0
    # Nothing there is known to be the target's greedy answer, so nothing is replayed.
    assert result.facts["replay"] is None


def test_prompts_that_are_all_too_long_are_refused(target_folder, tmp_path):
    path = write(tmp_path / "p.txt", "x" * 100)
    with pytest.raises(DFlashError, match=r"longer than 44 tokens; raise --max-length"):
        run(options(target_folder, tmp_path / "out", prompts=path), quiet=True)
