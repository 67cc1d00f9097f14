"""Single tokens' bytes, against the tokenizer's own decoding of texts."""

import pytest
from json_tokens import byte_tokenizer

from dflash_mlx.server.vocabulary import Vocabulary

TEXT = 'Ünïcödé "quotes" 🌈 漢字\n\ttabs, 12 true null } }'


def check(tokenizer):
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(vocabulary.bytes_of(token) for token in ids) == TEXT.encode()
    assert any("\ufffd" in vocabulary.text_of(token) for token in ids), "some tokens are parts of characters"
    [end] = tokenizer.eos_token_ids
    assert vocabulary.text_of(end) == tokenizer.decode([end])


def test_a_byte_level_vocabulary():
    check(byte_tokenizer())


@pytest.mark.slow
@pytest.mark.model
def test_the_demo_pair(demo_pair):
    check(demo_pair.tokenizer)
    vocabulary = Vocabulary(demo_pair.tokenizer)
    [space] = demo_pair.tokenizer.encode(" the", add_special_tokens=False)
    [word] = demo_pair.tokenizer.encode("the", add_special_tokens=False)
    assert (vocabulary.dropped_at_start(space), vocabulary.dropped_at_start(word)) == (1, 0)
