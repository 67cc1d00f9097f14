"""What /v1/completions says of a text that goes on, by the real worker with tiny models."""

import pytest
from fakes import running
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer
from tiny_pair import make_templated_pair

from dflash_mlx.server.logprobs import Offsets
from dflash_mlx.server.worker import Worker


@pytest.fixture(scope="module")
def server():
    pair = make_templated_pair(BPEStreamingDetokenizer)
    with running(Worker(pair, width=3), pair=pair) as found:
        yield found


def test_the_first_space_stays(server):
    """Text, tokens and offsets agree, with stop strings and without, and so does what a chat says without its space."""
    client, tokenizer = server.openai(), server.service.pair.tokenizer
    [space] = tokenizer.encode(" ", add_special_tokens=False)
    wanted = {"model": "fake", "max_tokens": 4, "logprobs": 1, "logit_bias": {str(space): 100}}
    whole = client.completions.create(prompt="return", **wanted).choices[0]
    assert whole.text == "".join(whole.logprobs.tokens) == " " * 4
    assert whole.logprobs.text_offset == [0, 1, 2, 3]
    chunks = client.completions.create(prompt="return", stream=True, **wanted)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    stopped = client.completions.create(prompt="return", stop="   ", **wanted).choices[0]
    assert (stopped.text, stopped.logprobs.tokens, stopped.finish_reason) == ("", [], "stop")
    chat = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=4, logit_bias={str(space): 100}
    )
    assert chat.choices[0].message.content == " " * 3


def test_offsets_of_tokens_that_are_parts_of_characters():
    offsets = Offsets()
    assert [offsets.next(bytes([byte])) for byte in "é🌈a".encode()] == [0, 0, 1, 1, 1, 1, 2]
